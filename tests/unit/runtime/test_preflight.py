import json
import multiprocessing
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any, Literal

import pytest
from safetensors.torch import load_file, save_file

from megatron_rl.checkpoints.hugging_face import save_hf
from megatron_rl.checkpoints.manifest import entry_of
from megatron_rl.cli import main
from megatron_rl.config.derived import reward_workers
from megatron_rl.config.load import load_settings
from megatron_rl.config.settings import RewardSettings, Settings
from megatron_rl.convert.conversion import Options, convert
from megatron_rl.errors import UserError
from megatron_rl.planning.launch_plan import launch_plan
from megatron_rl.rewards.runner import RewardRunner
from megatron_rl.runtime import preflight as module
from megatron_rl.runtime.engines import weight_sync
from megatron_rl.runtime.preflight import GIB, check_cpu_memory, preflight
from megatron_rl.runtime.target import find_target
from megatron_rl.system.files import MANIFEST

REWARD = """
def score(*, sample):
    return float(sample.response_text == sample.prompt.label)

def broken(*, sample):
    return 1 / 0

def strict(*, sample):
    return float(sample.response_text == sample.prompt.label.strip())

async def roll(*, prompt, generator, sampling, num_samples, tokenizer, budget: int):
    return []
def advantages(*, rewards, group_ids, lengths, power: int):
    return None
def keep(*, group):
    return True

def length(*, sample):
    return float(len(sample.response_text))

class Rows:
    state = 0

    def __init__(self, *, seed, first: int = 1):
        self.first = first

    def next_rows(self, count):
        self.state += count
        return [{"prompt": f"{self.first}+1=", "label": "2", "number": number} for number in range(self.state - count, self.state)]

class Stuck(Rows):
    def next_rows(self, count):
        return [{"prompt": f"{number}+1="} for number in range(count)]
"""


@pytest.fixture(scope="module")
def plugins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the plug-ins of these tests."""
    directory = tmp_path_factory.mktemp("plugins")
    (directory / "preflight_reward.py").write_text(REWARD)
    return directory


@pytest.fixture
def words(tiny_model: Callable[..., Path], plugins: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Overrides that make a run which passes every check."""
    rows = [{"prompt": f"{number}+1=", "label": str(number + 1), "response": str(number + 1)} for number in range(20)]
    data = tmp_path / "train.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.syspath_prepend(str(plugins))
    return [
        f"run.directory={tmp_path / 'runs' / 'one'}",
        f"model.path={tiny_model()}",
        f"data={{train: {data}, max_prompt_tokens: 16, prompts_per_step: 4, samples_per_prompt: 2}}",
        "rollout.sampling.max_response_tokens=8",
        "reward.function=preflight_reward:score",
        "training.optimizer.lr=1e-4",
    ]


@pytest.fixture(scope="module")
def open_workers() -> Iterator[Callable[[RewardSettings], AbstractContextManager[RewardRunner]]]:
    """Stands for the class RewardRunner: checks with the same reward use one worker, which stays until the tests end."""
    with ExitStack() as stack:
        opened: dict[str, RewardRunner] = {}

        def runner(settings: RewardSettings, *, num_workers: int) -> AbstractContextManager[RewardRunner]:
            assert num_workers == reward_workers(), "labels of many rows are scored"
            key = settings.model_dump_json()
            if key not in opened:
                opened[key] = stack.enter_context(RewardRunner(settings))
            return nullcontext(opened[key])

        yield runner


@pytest.fixture
def check(words: list[str], open_workers: object, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    monkeypatch.setattr(module, "RewardRunner", open_workers)

    def run(*overrides: str, **keywords: Any) -> list[str]:
        return preflight(load_settings(None, [*words, *overrides]), **keywords)

    return run


@pytest.mark.parametrize(
    "reward",
    [
        "{function: mixture, args: {parts: {tags: -1, right: {function: exact, weight: 0.1}}}}",
        "{function: by_row, args: {key: k, functions: {x: {function: mixture, args: {parts: {tags: -1, exact: 1}}}, y: math}}}",
    ],
)
def test_gdpo_refuses_weights_that_it_does_not_read(check: Callable[..., list[str]], reward: str) -> None:
    words = (f"reward={reward}", "objective.advantage={kind: gdpo}")
    with pytest.raises(UserError) as caught:
        check(*words)
    assert all(part in str(caught.value) for part in ("reward.args.parts", "-1", "gdpo", "reward_weights; set that to ["))
    if "by_row" not in reward:
        assert check(*words, "objective.advantage.reward_weights=[1, 2]") == check()


def test_a_good_run_passes_without_a_note(check: Callable[..., list[str]]) -> None:
    assert check() == []
    # The longest sequence, 16 + 496 tokens, is all that the model can attend to.
    assert check("rollout.sampling.max_response_tokens=496") == []


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("model.path=nowhere", ["model.path is nowhere"]),
        ("model.megatron.num_layers=3", ["model.megatron.num_layers is 3", "needs 2"]),
        ("model.megatron.recompute_granularty=full", ["recompute_granularity"]),
        ("model.attention=transformer_engine", ["not installed"]),
        ("runtime.network_interface=eth0", ["stays on its loopback interface; remove it"]),
        ("training.topology={num_ranks: 8, tp: 8}", ["not divisible by tp 8"]),
        ("training.optimizer.learning_rate=1", ["training.optimizer.learning_rate"]),
        ("training.frozen=[model.embed.*]", ["'model.embed.*', which matches no tensor", "model.embed_tokens.weight"]),
        ('training.frozen=["*.k_proj.weight"]', ["freezes model.layers.0.self_attn.k_proj.weight", "one parameter"]),
        ("model.megatron.recompute_modules=[mlpp]", ["recompute_granularity to selective"]),
        ("training.optimizer.adam_bta1=0.8", ["adam_beta1"]),
        ("training.ddp.overlap_grad_reduc=true", ["overlap_grad_reduce"]),
        ("training.routing_replay=true", ["training.routing_replay is true", "has no experts"]),
        (
            "eval.sets.a={data: x, sampling: {logit_bias: {'3': 1, '70000': 1}}}",
            ["eval.sets.a.sampling.logit_bias has 70000", "needs ids below vocab_size", "remove it"],
        ),
        ("rollout.sglang.enable_return_routed_experts=true", ["training.routing_replay sets it"]),
        ("objective.policy_loss=nowhere:nothing", ["objective.policy_loss nowhere:nothing cannot be imported"]),
        ("objective.policy_loss=preflight_reward:score", ["objective.policy_loss preflight_reward:score has the signature"]),
        ("model.megatron.fp8=hybrid", ["model.megatron.fp8 is 'hybrid', which needs a GPU"]),
        ("data.train=nowhere.jsonl", ["nowhere.jsonl"]),
        ("data.prompt_key=question", ["train.jsonl:1", "question"]),
        ("data.max_prompt_tokens=4", ["train.jsonl:11", "the limit is 4"]),
        ("rollout.sampling.max_response_tokens=497", ["16 + rollout.sampling.max_response_tokens 497 = 513", "512"]),
        ("rollout.sglang.mem_fraction_statc=0.5", ["rollout.sglang.mem_fraction_statc", "mem_fraction_static"]),
        ("rollout.function=no_such_module:roll", ["rollout.function", "no_such_module"]),
        ("rollout.function=preflight_reward:nothing", ["rollout.function", "it has: score"]),
        ("rollout.function=preflight_reward:roll", ["rollout.args.budget is missing", "needs budget: int"]),
        (
            "rollout={function: preflight_reward:roll, args: {budget: 3}, sampling: {max_response_tokens: 8}}",
            ["preflight_reward:roll", "returned 0 samples"],
        ),
        ("rollout.environment=no_such_module:Shop", ["rollout.environment", "no_such_module"]),
        ("rollout.environment=preflight_reward:score", ["rollout.environment preflight_reward:score", "megatron_rl.Environment"]),
        ("rollout={environment: 'a:B', function: 'c:d'}", ["rollout.function is c:d", "rollout.environment is a:B", "remove the other"]),
        ("reward.function=null", ["reward.function is null without rollout.environment", "set reward.function"]),
        ("rollout.filter.function=preflight_reward:keep", ["rollout.filter.function preflight_reward:keep returned True", "needs None"]),
        ("rollout.filter={function: preflight_reward:keep, args: {x: 1}}", ["rollout.filter.args.x is no argument"]),
        ("objective.advantage=preflight_reward:advantages", ["objective.advantage.args.power is missing"]),
        ("objective.advantage={kind: plug_in, path: preflight_reward:advantages, args: {power: 2}}", ["advantages returned type NoneType"]),
        ("reward.args={weight: 2}", ["reward.args.weight is no argument of preflight_reward:score"]),
        ("reward.function=preflight_reward:scoer", ["scoer"]),
        ("reward.function=preflight_reward:broken", ["gave no reward for a probe", "ZeroDivisionError"]),
    ],
)
def test_problems_are_found(check: Callable[..., list[str]], override: str, parts: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        check(override)
    assert all(part in str(caught.value) for part in parts), str(caught.value)


def test_a_sink_without_its_package_is_found(check: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    # None stands in sys.modules for what cannot be imported.
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match=r"^before the start: observe\.wandb_project is set but wandb is not installed"):
        check("observe.wandb_project=x")


def test_a_teacher_is_checked_too(check: Callable[..., list[str]], tiny_model: Callable[..., Path]) -> None:
    teacher = tiny_model(name="teacher", layers=1, vocab=30)
    with pytest.raises(UserError, match=r"another vocabulary than .*differs in 2 tokens"):
        check(f"model.teacher={teacher}", "objective.distillation_coef=0.5")
    good = tiny_model(name="good teacher", layers=1)
    assert check(f"model.teacher={good}", "objective.distillation_coef=0.5") == []
    assert check(f"model.teacher={good}") == [f"model.teacher {good} has no effect: objective.distillation_coef is 0"]
    (good / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"good teacher has no model\.safetensors"):
        check(f"model.teacher={good}", "objective.distillation_coef=0.5")


def test_a_teacher_that_is_not_there_is_told_by_its_own_name(check: Callable[..., list[str]]) -> None:
    with pytest.raises(UserError, match=r"^before the start: model.teacher is /nope, which is not a directory"):
        check("model.teacher=/nope", "objective.distillation_coef=0.5")


def test_a_name_of_the_label_that_no_row_has(check: Callable[..., list[str]], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"train.jsonl: no row has the field 'answer'; name the right one in data.label_key"):
        check("data.label_key=answer")
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1="}\n' * 20)
    repeated, note = check("reward.function=preflight_reward:length")
    assert repeated.startswith("19 of 20 rows") and "no row of" in note and "gets label None" in note


def test_a_first_row_with_a_wrong_label_is_left_out(check: Callable[..., list[str]], tmp_path: Path) -> None:
    """It is no row to try the reward function on."""
    rows = [{"prompt": f"{number}+1=", "label": str(number + 1) if number else " "} for number in range(9)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    [note] = check("data.max_bad_rows=1", "reward.function=exact")
    assert note.startswith("1 row left out, whose label is not scored, the first: ") and "train.jsonl:1: the label ' '" in note
    held_out = f"{{data: {tmp_path}/train.jsonl, reward: {{function: exact}}}}"
    (tmp_path / "more.jsonl").write_text('{"prompt": "1+1=", "label": "2"}\n' * 4)
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[::-1]))
    with pytest.raises(UserError, match=r"eval\.sets\.own: .*train\.jsonl:9: the label ' ' cannot be scored"):
        check(f"data.train={tmp_path}/more.jsonl", f"eval.sets.own={held_out}")


def test_rows_without_a_label_are_counted_and_tried(check: Callable[..., list[str]], tmp_path: Path) -> None:
    rows = [{"prompt": f"{number}+1=", "label": "1"} for number in range(20)]
    del rows[7]["label"]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    [note] = check()
    assert note.startswith("1 of 20 rows lack the field 'label', the first is ") and "train.jsonl:8: what scores" in note
    with pytest.raises(UserError, match=r"gave no reward for a probe \(prompt eval-7, response '', label None\)"):
        check("reward.function=preflight_reward:strict")


def test_problems_are_told_together(check: Callable[..., list[str]]) -> None:
    with pytest.raises(UserError, match="2 things are wrong"):
        check("training.ddp.x=1", "data.train=nowhere.jsonl")


def test_a_model_that_is_nowhere_is_told_once(check: Callable[..., list[str]]) -> None:
    with pytest.raises(UserError) as caught:
        check("model.path=nowhere")
    assert str(caught.value).count("nowhere") == 1


def test_missing_weights_are_found(check: Callable[..., list[str]], words: list[str]) -> None:
    path = Path(words[1].partition("=")[2]) / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "num_hidden_layers": 3}))
    with pytest.raises(UserError, match=r"lacks \d+ tensors .* model\.layers\.2\."):
        check()


@pytest.fixture
def shards(tiny_model: Callable[..., Path], tmp_path: Path) -> Path:
    """A model directory of several files with an index."""
    source = tiny_model(name="whole")
    save_hf(tmp_path / "shards", load_file(source / "model.safetensors"), source=source, max_shard_bytes=100_000)
    return tmp_path / "shards"


def _lengthen(file: Path) -> None:
    with file.open("ab") as stream:
        stream.write(bytes(8))


def _rename_a_tensor(file: Path) -> None:
    tensors = load_file(file)
    name = min(tensors)
    save_file({f"{name}.other" if key == name else key: tensor for key, tensor in tensors.items()}, file)


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda file: file.unlink(), "lacks the file {name}, in which its index says that model"),
        (lambda file: os.truncate(file, file.stat().st_size - 5_000), "{name}: the file is cut off: it has {less:,} bytes, its header"),
        (lambda file: os.truncate(file, 3), "{name}: "),
        (_lengthen, "{name}: the file goes on behind its last tensor: it has {more:,} bytes, its header needs {size:,};"),
        (_rename_a_tensor, "{name} lacks tensors that the index of"),
    ],
)
@pytest.mark.parametrize("setting", ["model.path", "model.teacher"])
def test_a_damaged_file_of_weights_is_found(
    check: Callable[..., list[str]], shards: Path, damage: Callable[[Path], None], told: str, setting: str
) -> None:
    teaching = ["objective.distillation_coef=0.5"] if setting == "model.teacher" else []
    assert check(f"{setting}={shards}", *teaching) == []
    file = sorted(shards.glob("*.safetensors"))[-1]
    size = file.stat().st_size
    damage(file)
    with pytest.raises(UserError) as caught:
        check(f"{setting}={shards}", *teaching)
    assert told.format(name=file.name, size=size, less=size - 5_000, more=size + 8) in str(caught.value)
    assert str(caught.value).count("download") == 1


def test_our_own_format_gets_its_engine_weights_later(check: Callable[..., list[str]], words: list[str]) -> None:
    path = Path(words[1].partition("=")[2])
    convert(path, path.with_name("ours"), Options())
    check(f"model.path={path.with_name('ours')}")
    with pytest.raises(UserError, match=r"load_format is auto, but the engines of a training run load no weights.*; remove it"):
        check(f"model.path={path.with_name('ours')}", "rollout.sglang.load_format=auto")


def test_a_start_reads_the_data_and_calls_the_reward_itself(check: Callable[..., list[str]]) -> None:
    assert check("data.prompt_key=question", "reward.function=preflight_reward:broken", probe=False) == []


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("data.train=nowhere.jsonl", "data file nowhere.jsonl does not exist"),
        ("eval.sets.a=nowhere.jsonl", "data file nowhere.jsonl does not exist"),
        ("eval.sets.a=.", "data file . is a directory"),
        ("reward.function=no_such_module:score", "reward.function no_such_module:score cannot be imported"),
        ("runtime.ray_address=127.0.0.1:9", "runtime.ray_address is 127.0.0.1:9, but nothing answers there"),
    ],
)
def test_a_start_looks_for_the_data_and_the_reward_first(check: Callable[..., list[str]], override: str, part: str) -> None:
    with pytest.raises(UserError, match=f"^before the start: {part}"):
        check(override, probe=False)


@pytest.mark.parametrize("probe", [True, False])
def test_a_data_source_is_tried_in_the_place_of_a_file(check: Callable[..., list[str]], probe: bool) -> None:
    def source(name: str, args: str = "{}") -> str:
        return (
            f"data={{source: 'preflight_reward:{name}', args: {args}, max_prompt_tokens: 16, prompts_per_step: 4, samples_per_prompt: 2}}"
        )

    assert check(source("Rows", "{first: 3}"), probe=probe) == []
    with pytest.raises(UserError, match=r"data\.args\.frist is no argument of preflight_reward:Rows; did you mean data\.args\.first"):
        check(source("Rows", "{frist: 3}"), probe=probe)
    with pytest.raises(UserError, match=r"data\.source preflight_reward:Stuck gave row 1 as .* when fewer are asked for at once"):
        check(source("Stuck"), probe=probe)


def test_notes(check: Callable[..., list[str]], words: list[str]) -> None:
    train = load_settings(None, words).data.train
    notes = check(f"eval.sets.a={train}", "model.dtype=bfloat16", "training.optimizer={}", resume=True)
    expected = ["there is nothing to resume", "training.optimizer.lr is not set", "20 of 20 prompts of"]
    assert [any(part in note for note in notes) for part in expected] == [True] * 3
    assert len(notes) == 3


def test_a_config_that_was_changed_beside_its_manifest_is_noted(check: Callable[..., list[str]], words: list[str], tmp_path: Path) -> None:
    changed = tmp_path / "changed"
    shutil.copytree(load_settings(None, words).model.path, changed)
    (changed / MANIFEST).write_text(json.dumps({"files": {path.name: entry_of(path) for path in changed.iterdir()}}))
    assert check(f"model.path={changed}") == []
    config = json.loads((changed / "config.json").read_text())
    (changed / "config.json").write_text(json.dumps(config, indent=7))
    assert check(f"model.path={changed}") == [f"{changed / 'config.json'} is not the file of its manifest.json: it is used as it is"]


@pytest.mark.parametrize("overrides", [(), ("objective.policy_loss=sft",)])
def test_fewer_rows_than_a_step_takes_are_noted(check: Callable[..., list[str]], overrides: tuple[str, ...]) -> None:
    sizes = "data.prompts_per_step=21"
    [note] = [note for note in check(sizes, *overrides) if "rows" in note]
    assert "train.jsonl has 20 rows, and a step takes data.prompts_per_step 21: every step has some of them more than once" in note
    assert not any("20 rows" in note for note in check("data.prompts_per_step=20", *overrides))


def test_a_critic_is_checked_and_its_rate_told(check: Callable[..., list[str]]) -> None:
    assert check("objective.preset=ppo") == [
        "training.critic.optimizer.lr is not set: the critic's learning rate is 0.001, 10 times the policy's"
    ]
    assert check("objective.preset=ppo", "training.critic.optimizer.lr=1e-3") == []
    with pytest.raises(UserError, match=r"training\.critic\.optimizer\.learning_rate is not a field"):
        check("objective.preset=ppo", "training.critic.optimizer.learning_rate=1")


def test_nothing_left_to_resume(check: Callable[..., list[str]], words: list[str]) -> None:
    directory = load_settings(None, words).run.directory
    checkpoint = directory / "checkpoints" / "step-000008"
    (checkpoint / "megatron").mkdir(parents=True)
    (checkpoint / "megatron" / "manifest.json").write_text('{"files": {}}')
    (checkpoint / "run.json").write_text('{"step": 8, "source": {}, "first_evaluation": {}}')
    with pytest.raises(UserError, match=r"has done 8 steps, so nothing is left of run.num_steps 8"):
        check("run.num_steps=8", resume=True)
    check("run.num_steps=9", resume=True)


def test_memory_is_added_up(words: list[str]) -> None:
    settings = load_settings(None, [*words, "training.topology={num_ranks: 4, tp: 2}", "rollout.num_engines=2"])
    # 4 ranks x 0.5 + 2 engines x (1.6 + 4 x 0.25) + 2 copies x 0.25 x 20 bytes
    needed = 4 * 0.5 + 2 * (1.6 + 4 * 0.25) + 2 * 0.25 * 20

    def check(settings: Settings, **more: int) -> list[str]:
        sizes = {"num_engines": settings.rollout.num_engines, "parameters": GIB // 4, "teacher_parameters": 0, **more}
        return check_cpu_memory(settings.training, settings.objective, **sizes)

    assert check(settings, available=int((needed + 0.1) * GIB)) == []
    assert f"at least {needed:.1f} GiB" in check(settings, available=int((needed - 0.1) * GIB))[0]
    with_critic = load_settings(None, [*words, "training.topology={num_ranks: 4, tp: 2}", "rollout.num_engines=2", "objective.preset=ppo"])
    needed += 2 * 0.25 * 20
    assert f"at least {needed:.1f} GiB" in check(with_critic, available=int((needed - 0.1) * GIB))[0]
    wanted = ["training.topology={num_ranks: 4, tp: 2}", "rollout.num_engines=2", "objective.preset=ppo", "objective.kl.coef=0.1"]
    needed += 2 * 0.25 * 4
    with_reference = load_settings(None, [*words, *wanted])
    assert f"at least {needed:.1f} GiB" in check(with_reference, available=int((needed - 0.1) * GIB))[0]
    # 2 copies x 0.5 x (4 bytes that rest + 4 in their place)
    needed += 2 * 0.5 * 8
    assert f"at least {needed:.1f} GiB" in check(with_reference, teacher_parameters=GIB // 2, available=int((needed - 0.1) * GIB))[0]


def test_a_replay_needs_no_engines(check: Callable[..., list[str]], words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "available_memory_bytes", lambda: GIB)
    (note,) = check()
    assert "1 rank and 1 engine take at least" in note
    monkeypatch.setattr(module, "open_record", lambda *_, **__: (nullcontext(), 0))
    # Neither data nor code of the rollout is asked.
    gone = ("data.train=gone.jsonl", "reward.function=gone:score", "rollout.environment=gone:Gone")
    assert check(*gone, replay=Path("run")) == []
    settings = load_settings(None, words)
    needs = find_target(settings.training.topology, None, settings.runtime, config_only=False).needs
    assert (needs.num_ranks, needs.num_engines) == (1, 0)


def launched(settings: Settings) -> dict[str, dict[str, str]]:
    rollout = None if settings.supervised else settings.rollout
    return launch_plan(settings, find_target(settings.training.topology, rollout, settings.runtime, config_only=False))


def test_plan_says_what_would_be_launched(words: list[str]) -> None:
    settings = load_settings(None, [*words, "training.topology={num_ranks: 2, tp: 2}", "rollout.sglang.mem_fraction_static=0.5"])
    sizes, processes, places, backends = launched(settings).values()
    assert places == {"node 0": "ranks 0-1 on CPUs 0-1; engine 0 on CPU 2"}
    assert sizes["sequences per step"] == "4 prompts × 2 samples = 8"
    assert sizes["tokens per step"] == "at most 24 × 8 = 192"
    assert "tp 2" in processes["Megatron"]
    assert "mem_fraction_static=0.5" in processes["SGLang's arguments"]
    assert "api_key" not in processes["SGLang's arguments"]
    assert backends["torch here"]
    assert "critic" not in processes


def test_plan_names_the_transport_and_its_reason(words: list[str]) -> None:
    def said(*more: str, kind: Literal["cpu", "cuda"] = "cpu") -> str:
        settings = load_settings(None, [*words, *more])
        return weight_sync(settings.weight_transport, settings.weights, colocate=settings.runtime.colocate, device_kind=kind)

    assert said() == "broadcast: a process group of gloo (weights.transport not set, runtime.colocate false)"
    assert said("runtime.colocate=true") == "ipc: shared memory of the host (weights.transport not set, runtime.colocate true)"
    assert said("runtime.colocate=true", kind="cuda").startswith("ipc: the memory of the shared GPU (")
    assert said("weights.transport=disk", "runtime.colocate=true") == "disk: files in run.directory (weights.transport)"
    settings = load_settings(None, words)
    processes = launched(settings)["What would be launched"]
    assert processes["weight sync"] == said()


def test_plan_has_the_critic(words: list[str]) -> None:
    settings = load_settings(None, [*words, "objective.preset=ppo"])
    processes = launched(settings)["What would be launched"]
    assert processes["critic"] == "on the same ranks, learning rate 0.001"


def test_plan_of_supervised_training_has_no_engine(words: list[str]) -> None:
    settings = load_settings(None, [*words, "objective.policy_loss=sft"])
    processes = launched(settings)["What would be launched"]
    assert processes["SGLang"].startswith("none")
    assert "reward workers" not in processes


def test_check_prints_settings_that_can_be_read_back(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, children = sorted(tmp_path.rglob("*")), multiprocessing.active_children()
    assert main(["train", "--check", *words]) == 0
    assert set(multiprocessing.active_children()) <= set(children)
    text = capsys.readouterr().out
    assert "sequences per step" in text
    assert text.endswith("nothing was started, nothing was written.\n")
    assert [path for path in sorted(tmp_path.rglob("*")) if "__pycache__" not in str(path)] == before
    printed = tmp_path / "printed.yaml"
    printed.write_text(text)
    assert load_settings(printed) == load_settings(None, words)


def test_supervised_runs_ask_nothing_of_engine_and_reward(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(settings: Settings) -> list[str]:
        raise AssertionError("not needed for supervised training")

    monkeypatch.setattr(module, "RewardRunner", refuse)
    monkeypatch.setattr(module, "_check_rollout", refuse)
    # No engine generates, so a response beyond the model's context is none.
    notes = preflight(load_settings(None, [*words, "objective.policy_loss=sft", "rollout.sampling.max_response_tokens=1000000"]))
    assert [note.split(" has no effect")[0] for note in notes] == ["data.samples_per_prompt 2", "the section rollout", "the section reward"]
