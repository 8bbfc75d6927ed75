"""Commands that read what runs have written: score, compare, report, samples, status and trace.

Modules are imported inside the command with the need, so that help and mistakes answer at once.
"""

import re
from pathlib import Path

import click

from megatron_rl.errors import UserError
from megatron_rl.report.buffer_command import buffer


@click.group()
def reading() -> None:
    """Hold the commands."""


reading.add_command(buffer)


@reading.command(short_help="Score a file of responses, and compare rewards.")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--reward", "rewards", multiple=True, required=True, help="A name, MODULE:FUNCTION, or YAML {function: .., args: ..}.")
@click.option("--column", help="Field with a number, to compare with: reward, of the answers that an evaluation kept.")
@click.option("--label-key", help="Field with the right answer, or a path such as reward_model.ground_truth.")
@click.option("--out", type=click.Path(path_type=Path), help="File for all of it as JSON.")
def score(file: Path, rewards: tuple[str, ...], column: str | None, label_key: str | None, out: Path | None) -> None:
    """Score the responses in FILE, rows with prompt, label and response or text, by each --reward, without a model.

    Print outcomes, the slowest calls, and the rows on which two rewards, or one and a column, differ. Example:

    megatron-rl score runs/first/evaluation/step-000010/aime24.jsonl --reward math --reward my.rewards:score --column reward
    """
    from megatron_rl.evaluation.scoring import read_reward, score_file

    score_file(file, [read_reward(words) for words in rewards], column=column, label_key=label_key, out=out)


@reading.command(short_help="Say if runs differ on their evaluation sets.")
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="RUN RUN...")
@click.option("--step", type=click.IntRange(0), help="Step to compare at; the last that all runs evaluated when not given.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("comparison.png"), show_default=True, help="Picture of the curves.")
def compare(runs: tuple[Path, ...], step: int | None, out: Path) -> None:
    """Compare each RUN with the first by their kept answers: a paired bootstrap over the prompts of each set that both have.

    RUN is a run.directory, or what `megatron-rl eval` wrote. Curves of all are drawn into one picture.
    """
    from megatron_rl.report.curves import compare_runs

    compare_runs(runs, step=step, out=out)


@reading.command(short_help="Show a run on a page, whether it has ended or not.")
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--steps", metavar="A-B", help="Curves and samples of these steps alone.")
@click.option("--group", "groups", multiple=True, metavar="ID", help="A group to show in any case; may be given several times.")
@click.option("--out", type=click.Path(path_type=Path), help="Another file than report.html in DIRECTORY, without curves.png.")
def report(directory: Path, steps: str | None, groups: tuple[str, ...], out: Path | None) -> None:
    """Write curves.png and report.html into DIRECTORY, the run.directory of a run; print the page's path.

    The page has curves, samples with the numbers of their tokens, distributions and settings; it needs no network and no server.
    """
    from megatron_rl.report.page import report_run

    found = re.fullmatch(r"(\d+)(?:-(\d+))?", steps or "0")
    if found is None:
        raise UserError(f"--steps is {steps!r}, needs one step or two, as in --steps 10-20")
    first, last = int(found[1]), int(found[2] or found[1])
    print(report_run(directory, between=None if steps is None else (first, last), out=out, marked=groups))


@reading.command(short_help="Print samples of a run.")
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--step", type=click.IntRange(min=0), help="Step that trained on the samples; the newest when not given.")
@click.option("--worst", type=click.IntRange(min=0), default=None, help="Samples with the lowest rewards; 3 when nothing is asked for.")
@click.option("--best", type=click.IntRange(min=0), default=0, help="Samples with the highest rewards.")
@click.option("--group", metavar="ID", help="All samples of this group instead.")
def samples(directory: Path, step: int | None, worst: int | None, best: int, group: str | None) -> None:
    """Print samples of the run in DIRECTORY with prompt, reward and answer; control characters are escaped.

    Example: megatron-rl samples runs/first --step 12 --worst 5
    """
    from megatron_rl.report.run_samples import printed_samples

    worst = worst if worst is not None else 0 if best else 3
    for line in printed_samples(directory, step=step, worst=worst, best=best, group=group):
        print(line)


@reading.command(short_help="Write a step of a run as a trace for Perfetto.")
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--step", type=click.IntRange(min=0), help="The newest when not given; 0 is the start.")
@click.option("--out", type=click.Path(path_type=Path), help="Another file than trace-STEP.json in DIRECTORY.")
def trace(directory: Path, step: int | None, out: Path | None) -> None:
    """Write when driver, ranks, engines, groups and rewards of the run in DIRECTORY worked in a step, for https://ui.perfetto.dev.

    Work that had not ended by the newest row is missing. Clocks of several nodes are not compared.
    Example: megatron-rl trace runs/first --step 12
    """
    from megatron_rl.report.trace import trace_step

    path, num_spans = trace_step(directory, step=step, out=out)
    print(f"{path}: {num_spans} spans; open it in https://ui.perfetto.dev or chrome://tracing")


@reading.command(short_help="Say what runs do, on this node or another one.")
@click.argument("directories", nargs=-1, type=click.Path(path_type=Path), metavar="[DIRECTORY]...")
@click.option("--watch", is_flag=True, help="Print again every few seconds, until all runs have ended.")
@click.option("--json", "as_json", is_flag=True, help="A JSON object for each run, in place of text.")
@click.option("--serve", type=click.IntRange(0, 65535), metavar="PORT", help="Serve it to Prometheus on loopback instead, until Ctrl-C.")
def status(directories: tuple[Path, ...], watch: bool, as_json: bool, serve: int | None) -> int:
    """Print phase, waits, engines, speed, disk, expected end and advice of each run, from the files in its DIRECTORY alone.

    DIRECTORY is the run.directory of a run or has runs below; the working directory when not given. The exit status is the largest
    of: 0 runs or finished, 1 failed or killed, 3 late or silent, 75 interrupted and to be resumed.
    """
    from megatron_rl.report.status import print_status, runs_below

    runs = [run for each in directories or (Path(),) for run in runs_below(each)]
    if serve is None:
        return print_status(runs, watch=watch, as_json=as_json)
    from megatron_rl.report.prometheus import serving

    with serving(serve) as publish:
        return print_status(runs, watch=True, as_json=as_json, publish=publish)
