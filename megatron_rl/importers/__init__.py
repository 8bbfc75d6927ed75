"""Settings of other projects as ours, and adapters for their plug-ins. A workshop: no run needs it.

Here is `megatron-rl import`: translate, leave out what a run refuses, and print YAML.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from megatron_rl.errors import UserError
from megatron_rl.system.files import write_atomic


def import_settings(
    project: Literal["slime", "verl"], source: Path, *, given: Sequence[str], model: Path | None, gpu: str, out: Path | None
) -> None:
    """Write the settings of the run of `project` that `source` describes to `out`, or print them; say what is left over.

    `given` are variables NAME=VALUE of the script's caller. Raises UserError.
    """
    # Imported here, because a worker with an adapter of this package needs none of it.
    from megatron_rl.importers import slime, verl
    from megatron_rl.importers.translation import settle

    if wrong := next((word for word in given if "=" not in word), None):
        raise UserError(f"import was given {wrong!r} after the script, needs NAME=VALUE, a variable of the script; correct it")
    variables = {"HOME": str(Path.home()), "PWD": str(Path.cwd()), **dict(word.split("=", 1) for word in given)}
    translation = {"slime": slime, "verl": verl}[project].translate(source, given=variables, model=model)
    translation.settings["runtime.cluster.gpu"] = gpu
    problems = settle(translation, origin=str(source))
    text = translation.text(str(source), problems=problems)
    if out is None:
        print(text, end="")
    else:
        write_atomic(out, text)
        print(f"{out}: {len(translation.settings)} settings", flush=True)
    for what, count in (("without a place here", len(translation.left)), ("to be mended before it starts", len(problems))):
        if count:
            print(f"megatron-rl: note: {count} {what}; the comments at the top say which and why", file=sys.stderr)
