"""`megatron-rl train --check`: everything about a run that is known before its start."""

import sys
from collections.abc import Iterable, Mapping
from contextlib import redirect_stdout
from pathlib import Path

from megatron_rl.config.decided import Decision
from megatron_rl.config.gpus import find_gpu
from megatron_rl.config.load import dump_settings
from megatron_rl.config.settings import Settings
from megatron_rl.errors import UserError


def check_run(settings: Settings, decisions: Iterable[Decision], *, resume: bool, replay: Path | None, config_only: bool) -> None:
    """Check a run, and print its settings as a YAML settings file, with everything else as comments.

    Raises UserError for a run that could not start, and for one that does not fit.
    """
    from megatron_rl.models.read_spec import read_model_spec
    from megatron_rl.planning.launch_plan import launch_plan
    from megatron_rl.planning.run_plan import plan_run
    from megatron_rl.runtime.preflight import preflight
    from megatron_rl.runtime.target import find_target

    # Run before the first print, so that nothing else is printed beside an error. Output of the user's own functions
    # during the trial is no part of the settings file.
    with redirect_stdout(sys.stderr):
        notes = preflight(settings, resume=resume, replay=replay, config_only=config_only)
    plan, cluster = None, settings.runtime.cluster
    if config_only and cluster.gpu is not None:
        plan = plan_run(settings, read_model_spec(settings.model.path), gpu=find_gpu(cluster.gpu), num_nodes=cluster.num_nodes)
    planned = "" if plan is None else "".join(f"# {line}".rstrip() + "\n" for line in plan.lines())
    if plan is not None and not plan.fits:
        print(planned, end="", flush=True)
        raise UserError(f"{plan.verdict}; `megatron-rl plan` lists layouts that fit")
    decided = {"What was decided, as it was not set": {one.path: f"{one.value}: {one.reason}" for one in decisions}}
    rollout = settings.rollout if replay is None and not settings.supervised else None
    target = find_target(settings.training.topology, rollout, settings.runtime, config_only=config_only)
    tables = {**decided, **launch_plan(settings, target, replay=replay)}
    if not config_only and replay is None:
        from megatron_rl.data.overview import overview
        from megatron_rl.data.source import RunPrompts

        sets, seed = settings.eval.sets, settings.run.seed
        prompts = RunPrompts.read(settings.model.path, settings.data, sets=sets, seed=seed, supervised=settings.supervised)
        tables["Prompts"] = overview(prompts)
    if resume and not config_only:
        from megatron_rl.runtime.resumption import resume_rows

        tables["What would be resumed"] = resume_rows(settings.run, dump_settings(settings))
    print(dump_settings(settings))
    _print_as_comments(tables)
    sys.stdout.flush()
    for note in notes:
        print(f"megatron-rl: note: {note}", file=sys.stderr)
    print(f"{planned}# Check passed: nothing was started, nothing was written.")


def _print_as_comments(tables: Mapping[str, Mapping[str, str]]) -> None:
    for title, rows in tables.items():
        print(f"# {title}")
        for name, value in rows.items():
            print(f"#   {name:<34} {value}")
        print("#")
