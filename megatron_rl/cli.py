"""The command line.

Those that read what runs wrote are in report/commands.

Heavy modules are imported inside the command with the need, so that help and mistakes answer at
once.
"""

import asyncio
import re
import shutil
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import click

from megatron_rl.check import report as report_checks
from megatron_rl.config.decided import Decision, with_values
from megatron_rl.config.help import SettingsCommand
from megatron_rl.config.load import apply_overrides, load_decided, split_words
from megatron_rl.config.settings import RuntimeSettings, Settings
from megatron_rl.config.yaml_text import format_value
from megatron_rl.errors import UserError
from megatron_rl.exit_status import exit_status
from megatron_rl.plugins.kinds import PluginKind
from megatron_rl.plugins.loader import kind_of
from megatron_rl.report.buffer_command import opened
from megatron_rl.report.commands import reading
from megatron_rl.runtime.grace import Grace
from megatron_rl.runtime.supervisor import leave, supervise
from megatron_rl.system.process_variables import check_directory, check_home, settle_output

_COUNT = click.IntRange(1, 2**17)
_STAND_INS = 2
_OVERRIDES = {"ignore_unknown_options": True, "allow_interspersed_args": True}


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="megatron-rl")
def cli() -> None:
    """RL post-training for large language models: Megatron-Core trains, SGLang generates."""
    check_directory()


for command in reading.commands.values():
    cli.add_command(command)


@cli.command(cls=SettingsCommand, short_help="Train a policy.", context_settings=_OVERRIDES, options_metavar="[OPTIONS]")
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[CONFIG.yaml] [key.path=value | --key.path value]...")
@click.option("--check", is_flag=True, help="Resolve and check everything, print what would be launched, start nothing.")
@click.option("--config-only", is_flag=True, help="With --check: for machines elsewhere, from the model's config.json; plan the memory.")
@click.option("--resume", is_flag=True, help="Continue the run in run.directory from its last checkpoint; start it where there is none.")
@click.option("--weights-only", is_flag=True, help="With --resume: go on with the checkpoint's weights and a new optimizer.")
@click.option("--replay", type=click.Path(path_type=Path), help="Train on the batches that this run, or file of buffer export, recorded.")
@click.option("--reward", metavar="MODULE:FUNCTION", help="Short for reward.function=MODULE:FUNCTION.")
@click.option("--ray-address", metavar="ADDRESS", help="Short for runtime.ray_address=ADDRESS: use a running Ray cluster.")
def train(
    words: tuple[str, ...],
    check: bool,
    config_only: bool,
    resume: bool,
    weights_only: bool,
    replay: Path | None,
    **short: str | None,
) -> None:
    """Train a policy.

    Settings come from CONFIG.yaml and from overrides, whose values are YAML; a later override wins. Example:

    megatron-rl train grpo.yaml run.seed=2 --training.optimizer.lr 2e-6

    `megatron-rl train --help SECTION` lists the settings of a section, such as rollout or training.schedule, and --help all lists all.
    """
    if config_only and not check:
        raise UserError("--config-only was given without --check, but a run needs weights, data and machines; add --check")
    if weights_only and not resume:
        raise UserError("--weights-only was given without --resume, but a new run has no checkpoint to take weights from; add --resume")
    settings, decisions = _settings(words, **short)
    if replay is not None:
        if settings.supervised:
            raise UserError(f"--replay is {replay}, but supervised training takes no samples of engines; leave it out")
        with opened(replay):
            pass
    # Heavy from here on: megatron-core and transformers are asked for their knowledge.
    from megatron_rl.runtime.preflight import preflight
    from megatron_rl.runtime.resumption import check_is_not_a_copy

    if resume:
        check_is_not_a_copy(split_words(words, options=_own_options()).config, settings.run.directory)
    if check:
        from megatron_rl.planning.check_run import check_run

        check_run(settings, decisions, resume=resume, replay=replay, config_only=config_only)
        return
    print("checking settings, model and data ...", flush=True)
    for decision in decisions:
        print(f"decided: {decision.path}={decision.value} ({decision.reason})", flush=True)
    for note in preflight(settings, resume=resume, probe=False, replay=replay):
        print(f"megatron-rl: note: {note}", file=sys.stderr)
    _session(settings.runtime).train(settings, resume=resume, weights_only=weights_only, replay=replay)


@cli.command(name="eval", short_help="Evaluate models on held-out prompts.", context_settings=_OVERRIDES, options_metavar="[OPTIONS]")
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[MODEL]... [CONFIG.yaml] [key.path=value | --key.path value]...")
@click.option("--data", type=click.Path(path_type=Path), help="File of held-out rows, in place of eval.sets.")
@click.option("--samples", type=click.IntRange(1, 2**10), help="Answers to each prompt of every set.")
@click.option("--out", type=click.Path(path_type=Path), help="Directory of the results; MODEL-evaluation when not given.")
@click.option("--url", help="An OpenAI-compatible server, as http://HOST:PORT/v1; MODEL is then a name there. The key is OPENAI_API_KEY.")
@click.option("--reward", metavar="MODULE:FUNCTION", help="Short for reward.function=MODULE:FUNCTION.")
@click.option("--ray-address", metavar="ADDRESS", help="Short for runtime.ray_address=ADDRESS: use a running Ray cluster.")
def evaluate(
    words: tuple[str, ...], data: Path | None, samples: int | None, out: Path | None, url: str | None, **short: str | None
) -> None:
    """Evaluate each MODEL: a Hugging Face directory, a run or a checkpoint of one, or a model served at --url.

    With the settings of a run, MODEL is its model.path when not given. After a kill the same command goes on.
    Example: megatron-rl eval runs/first/huggingface --data aime24.jsonl --samples 16
    """
    from megatron_rl.evaluation.eval_words import UNTRAINED, data_words, policy_in, print_results, split_models, with_options

    models, others = split_models(words)
    if url is not None and not models:
        raise UserError("--url was given without MODEL, needs the name by which the server knows the model; add it")
    results = {}
    for model in models or (None,):
        path = [] if model is None else [f"model.path={format_value(model if url is not None else str(policy_in(Path(model))))}"]
        given, decisions = _settings((*data_words(data), *others, *UNTRAINED, *path), **short)
        # No candidates are recorded, so there is no limit of them.
        given = with_values(given, {one.path: None for one in decisions if one.path == "rollout.sampling.top_k"})
        name = str(given.model.path)
        own = out / re.sub(r"[^\w.-]", "-", name).lstrip("-") if out is not None and len(models) > 1 else out
        if url is not None:
            own = own or Path(re.sub(r"[^\w.-]", "-", name) + "-evaluation")
        settings = with_options(given, samples=samples, out=own)
        if url is not None:
            from megatron_rl.evaluation.remote import evaluate_url

            results[name] = asyncio.run(evaluate_url(settings, url=url))
        else:
            results[name] = _session(settings.runtime).evaluate(settings)
    print_results(results)
    if empty := [f"{name} {one.name}" for name, found in results.items() for one in found if "reward" not in one.estimates]:
        raise UserError(f"no answer was scored of {', '.join(empty)}, needs one at least; the same command asks for all of them again")


@cli.command(short_help="Generate samples without training.", context_settings=_OVERRIDES, options_metavar="[OPTIONS]")
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[CONFIG.yaml] [key.path=value | --key.path value]...")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="FILE.jsonl, FILE.parquet or FILE.sqlite, as buffer export.")
@click.option("--count", type=click.IntRange(1), help="Prompts of data.train, in a run's order; those of a step when not given.")
@click.option("--tokens", is_flag=True, help="With ids, mask, log-probs and weight versions of every token.")
def rollout(words: tuple[str, ...], out: Path, count: int | None, tokens: bool) -> None:
    """Generate samples of data.train with rewards by model.path, as the first step of a run would, into a file.

    After a kill the same command goes on. Example: megatron-rl rollout grpo.yaml --out samples.jsonl --count 1000
    """
    from megatron_rl.evaluation.eval_words import GENERATED
    from megatron_rl.report.buffer_command import check_new, print_statistics, write_samples

    check_new(out)
    # The samples are in this directory until they are all there.
    unfinished = out.with_name(f"{out.name}.partial")
    own = (f"run.directory={format_value(str(unfinished))}", "eval.sets={}", *GENERATED)
    given, _ = _settings((*words, *own))
    if given.supervised:
        raise UserError(f"objective.policy_loss is {given.objective.policy_loss.kind}, which takes no samples of engines; set another one")
    # The run's own number of engines, which have the devices alone.
    settings = with_values(given, {"runtime.colocate": False})
    with opened(_session(settings.runtime).generate(settings, count=count or settings.data.prompts_per_step)) as recorded:
        print_statistics(recorded)
        write_samples(recorded, out, step=None, group=None, tokens=tokens)
    shutil.rmtree(unfinished)


@cli.command(short_help="Show the prompts that a run would see.", context_settings=_OVERRIDES, options_metavar="[OPTIONS]")
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[CONFIG.yaml] [key.path=value | --key.path value]...")
def data(words: tuple[str, ...]) -> None:
    """Read data.train and eval.sets with the tokenizer of model.path, as a run would.

    Print the notes on repeated, held-out, long and unlabelled rows, the lengths in tokens, and three rendered prompts of each. Example:

    megatron-rl data model.path=Qwen3-0.6B data.train=rows.parquet data.label_key=reward_model.ground_truth
    """
    settings, _ = _settings(("run.directory=.", *words))
    from megatron_rl.data.overview import detailed_overview
    from megatron_rl.data.source import RunPrompts

    sets, seed = settings.eval.sets, settings.run.seed
    prompts = RunPrompts.read(settings.model.path, settings.data, sets=sets, seed=seed, supervised=settings.supervised)
    print("\n".join(detailed_overview(prompts)))
    if settings.reward.function is not None and not settings.supervised:
        from megatron_rl.config.derived import reward_workers
        from megatron_rl.rewards.gold import unscored_in
        from megatron_rl.rewards.runner import RewardRunner

        with RewardRunner(settings.reward, num_workers=reward_workers()) as runner:
            runner.find_form()
            for reason in asyncio.run(unscored_in(prompts, settings.reward, score=runner.score)):
                print(f"not scored: {reason}")


@cli.command(name="import", short_help="Translate a script of slime or verl.")
@click.argument("project", type=click.Choice(["slime", "verl"]))
@click.argument("source", type=click.Path(path_type=Path), metavar="SCRIPT.sh|CONFIG.yaml")
@click.argument("given", nargs=-1, metavar="[NAME=VALUE]...")
@click.option(
    "--model", type=click.Path(path_type=Path), help="Hugging Face directory, or one with its config.json; the script's when not given."
)
@click.option("--gpu", default="H100-80", show_default=True, metavar="TYPE", help="Type of the GPUs.")
@click.option("--out", type=click.Path(path_type=Path), help="File to write; the standard output when not given.")
def import_script(project: Any, source: Path, given: tuple[str, ...], **options: Any) -> None:
    """Print the settings of a run of slime or verl as ours, under comments with what has no place here and why.

    The script is read, not executed; NAME=VALUE gives a variable that it takes from outside. Arguments that describe the model are
    compared with config.json. Example: megatron-rl import slime run-qwen3-4B.sh --model /models/Qwen3-4B --out grpo.yaml
    """
    from megatron_rl.importers import import_settings

    import_settings(project, source, given=given, **options)


@cli.command(short_help="Plan the memory of a layout on GPUs.", context_settings=_OVERRIDES, options_metavar="[OPTIONS]")
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="MODEL|CONFIG.yaml [key.path=value | --key.path value]...")
@click.option("--gpu", default="H100-80", show_default=True, metavar="TYPE", help="Type of the GPUs.")
@click.option(
    "--gpus", type=_COUNT, metavar="N", help="GPUs of the run, engines included; without a layout, layouts that fit are looked for."
)
@click.option("--tp", type=_COUNT, help="Tensor parallel size.")
@click.option("--pp", type=_COUNT, help="Pipeline parallel size.")
@click.option("--vpp", type=_COUNT, help="Virtual pipeline stages per rank.")
@click.option("--cp", type=_COUNT, help="Context parallel size.")
@click.option("--ep", type=_COUNT, help="Expert parallel size.")
@click.option("--etp", type=_COUNT, help="Tensor parallel size of experts.")
@click.option("--sequence-parallel", is_flag=True, default=None, help="Shard activations over tensor parallel ranks.")
def plan(words: tuple[str, ...], gpu: str, gpus: int | None, **layout: int | bool | None) -> int:
    """Say what each GPU of a run would hold, and whether it fits. Needs the model's config.json only, no weights and no GPU.

    MODEL is a Hugging Face directory or a config.json; settings of a run (`megatron-rl train --help all` lists them) come from
    CONFIG.yaml and from overrides. The exit status is 2 when it does not fit.
    Example: megatron-rl plan /models/Qwen3-30B-A3B --gpu H100-80 --gpus 64
    """
    from megatron_rl.planning.command import print_plans

    topology = {name: size for name, size in layout.items() if size is not None}
    fits = print_plans(split_words(words, options=_own_options()), gpu=gpu, num_gpus=gpus, topology=topology)
    return 0 if fits else 2


@cli.command(name="convert", short_help="Convert a checkpoint into another format.")
@click.argument("source", type=click.Path(path_type=Path))
@click.argument("target", type=click.Path(path_type=Path))
@click.option("--to", type=click.Choice(["hf", "megatron"]), help="Format of TARGET; the other one than SOURCE's when not given.")
@click.option("--dtype", type=click.Choice(["bfloat16", "float16", "float32"]), help="Round weights to this; as they are when not given.")
@click.option("--quantize", type=click.Choice(["fp8-block"]), help="Write float8 codes with a scale for each block of 128 x 128.")
@click.option("--adapter", type=click.Path(path_type=Path), help="Merge this LoRA adapter, a directory that PEFT saved.")
@click.option("--config", type=click.Path(path_type=Path), help="Hugging Face directory of the model, where SOURCE has no config.json.")
@click.option("--max-shard-size", default="4GB", show_default=True, metavar="SIZE", help="Largest file, such as 500MB or 4GB.")
@click.option("--copy-code", is_flag=True, help="Copy Python files of the source, too. They are never run here.")
@click.option("--drop-mtp", is_flag=True, help="Leave out layers of multi-token prediction; they are kept as they are when not given.")
@click.option("--verify", is_flag=True, help="Compare all tensors of both sides exactly.")
def convert_checkpoint(source: Path, target: Path, verify: bool, max_shard_size: str, **asked: Any) -> int:
    """Convert the checkpoint SOURCE into the directory TARGET, tensor by tensor, without a GPU.

    SOURCE is a Hugging Face directory (also a quantised one), a checkpoint of a run, or a distributed checkpoint of Megatron-LM, slime or
    verl; its files say which. TARGET appears when it is complete; after a kill the same command starts anew.
    The exit status is 2 when --verify finds that the two differ.
    """
    from megatron_rl.convert.conversion import convert, parse_options, say_on_terminal, verify_conversion

    options = parse_options(max_shard_size=max_shard_size, **asked)
    print(f"{target}: {convert(source, target, options, say=say_on_terminal)}")
    if not verify:
        return 0
    return 0 if report_checks([verify_conversion(source, target, options).check()]) else 2


@cli.command(short_help="Serve a model with an SGLang server.", context_settings=_OVERRIDES, options_metavar="[OPTIONS]")
@click.argument("model", type=click.Path(path_type=Path))
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[ARGUMENT=VALUE]...")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(1, 65535), default=30000, show_default=True, help="Port to listen on.")
def serve(model: Path, words: tuple[str, ...], host: str, port: int) -> None:
    """Serve MODEL, a Hugging Face directory such as a run's export, by OpenAI's API, on GPUs or without.

    An argument of the SGLang server follows by its own name. Requests need the key that the command prints once the server is ready,
    in an example that can be pasted; each start makes another key. Example: megatron-rl serve runs/first/huggingface tp_size=2
    """
    from megatron_rl.serve import serve as serve_model

    serve_model(model, apply_overrides({}, list(words)), host=host, port=port)


@cli.command(name="verify-checkpoint", short_help="Look for damage in a checkpoint.")
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--config", type=click.Path(path_type=Path), help="Hugging Face directory of the model, where PATH has no config.json.")
@click.option("--equal-to", type=click.Path(path_type=Path), help="A sound checkpoint, of any format, whose numbers PATH is to have.")
def verify_checkpoint(path: Path, config: Path | None, equal_to: Path | None) -> int:
    """Account for every tensor of the files and every parameter of the model, and print one line for each promise. Needs no GPU.

    The exit status is 2 when one is broken.
    """
    from megatron_rl.convert.verification import verify

    return 0 if report_checks(verify(path, config=config, equal_to=equal_to)) else 2


@cli.command(name="check-plugin", short_help="Try a plug-in of yours on its contract.")
@click.argument("path", metavar="MODULE:NAME")
@click.option("--kind", type=click.Choice(get_args(PluginKind)), help="What it is; found by the arguments that it takes when not given.")
@click.option("--args", "words", multiple=True, metavar="NAME=VALUE", help="An argument of its own; may be given several times.")
@click.option("--model", type=click.Path(path_type=Path), help="Directory of a model, whose tokenizer and chat template a rollout gets.")
@click.option("--data", type=click.Path(path_type=Path), help="File of rows, whose first one is the prompt; without it the prompt is 2+2=.")
def check_plugin(path: str, kind: PluginKind | None, words: tuple[str, ...], model: Path | None, data: Path | None) -> int:
    """Call the plug-in at MODULE:NAME as a run would, and print one line for each promise of its contract. Starts no engine.

    The exit status is 2 when it breaks one. Example: megatron-rl check-plugin my_package.rewards:score --args threshold=0.5
    """
    from megatron_rl.runtime.plugin_contracts import check

    args, kind = apply_overrides({}, list(words)), kind or kind_of(path)
    if model is not None and kind not in ("rollout", "environment"):
        raise UserError(f"--model is {model}, but a plug-in of the kind {kind} gets no tokenizer; leave it out")
    if data is not None and kind not in ("reward", "rollout", "environment"):
        raise UserError(f"--data is {data}, but a plug-in of the kind {kind} gets no prompt; leave it out")
    return 0 if report_checks(check(path, kind, args, model=model, data=data)) else 2


@cli.command(short_help="List the families of models that can be trained.")
def models() -> None:
    """Print, for each architecture of config.json that can be trained, what is proved for it, and which are refused and why."""
    from megatron_rl.models.families.family_table import printed_table

    print("\n".join(printed_table()))


@cli.command(short_help="Check this machine and its packages.")
@click.option("--directory", type=click.Path(path_type=Path), default=Path(), help="Where runs are written; by default here.")
@click.option("--gpu", is_flag=True, help="Try the GPUs of this node with real ranks, engines and runs as well (20 minutes).")
@click.option(
    "--on-cpu",
    type=click.IntRange(min=_STAND_INS),
    is_flag=False,
    flag_value=_STAND_INS,
    default=None,
    metavar="[COUNT]",
    help=f"With --gpu: COUNT processes on the CPU ({_STAND_INS} when not given) stand for GPUs, to try the trial itself.",
)
def doctor(directory: Path, gpu: bool, on_cpu: int | None) -> int:
    """Compare this machine and its packages with what was tested; print the command that mends each difference.

    With --gpu, start tiny models on the GPUs and print a line with a number for each promise, from the all-reduce to layouts, checkpoints,
    sleeping engines and whole runs; the exit status is 1 when one is broken.
    """
    if on_cpu and not gpu:
        raise UserError("--on-cpu was given without --gpu, whose stand-in it chooses; add --gpu")
    if gpu:
        from megatron_rl.runtime.ray_session import prepare_environment

        prepare_environment(RuntimeSettings())
        from megatron_rl.doctor.trial import accept

        return 0 if accept(directory, stand_ins=on_cpu or 0) else 1
    from megatron_rl.doctor.machine import examine

    return 0 if report_checks(examine(directory)) else 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line on `arguments` (the process's own when None); return the exit status."""
    settle_output()
    with Grace():
        if arguments is not None:
            return exit_status(partial(_command, list(arguments)))
        supervise()
        return leave(exit_status(partial(_command, sys.argv[1:])))


def _command(words: list[str]) -> int | None:
    with cli.make_context("megatron-rl", words) as context:
        status: int | None = cli.invoke(context)
        return status


def _own_options() -> list[str]:
    """Return the options of the running command, without dashes."""
    context = click.get_current_context()
    return [name.removeprefix("--") for option in context.command.get_params(context) for name in option.opts if name.startswith("--")]


def _settings(words: Sequence[str], *, reward: str | None = None, ray_address: str | None = None) -> tuple[Settings, tuple[Decision, ...]]:
    check_home()
    given = split_words(words, options=_own_options())
    short = {"reward.function": reward, "runtime.ray_address": ray_address}
    overrides = [*given.overrides, *(f"{key}={format_value(value)}" for key, value in short.items() if value is not None)]
    return load_decided(given.config, overrides)


def _session(settings: RuntimeSettings) -> ModuleType:
    """Return the module that starts processes, after settling Ray's environment, read at import."""
    from megatron_rl.runtime.ray_session import prepare_environment

    prepare_environment(settings)
    from megatron_rl.runtime import session

    return session
