"""Help of commands with settings: type, default and description of each setting.

Shown are the settings of a first run, or of one section.
"""

import click

from megatron_rl.config.eval_sets import EvalSet
from megatron_rl.config.messages import closest
from megatron_rl.config.settings_reference import SettingField, sections, setting_fields
from megatron_rl.errors import UserError

FIRST_RUN = (
    *("run.directory", "run.num_steps", "run.seed", "model.path", "data.train", "eval.sets", "data.prompts_per_step"),
    *("data.samples_per_prompt", "objective.preset", "rollout.num_engines", "rollout.sampling.max_response_tokens"),
    *("reward.function", "training.topology.num_ranks", "training.topology.tp", "training.optimizer", "runtime.colocate"),
)
"""The settings of a first run."""
EVERYTHING = "all"
_EVALUATION = "eval"


class SettingsCommand(click.Command):
    """A command whose help ends with FIRST_RUN, or with the settings of sections named beside --help."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Keep the words beside --help for `format_epilog`."""
        after = next((index + 1 for index, word in enumerate(args) if word in ctx.help_option_names), len(args))
        ctx.meta["sections"] = [word for word in args[after:] if not word.startswith("-")]
        return super().parse_args(ctx, args)

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write only a section's settings where a section is named. Raises UserError for an unknown section."""
        if not ctx.meta["sections"]:
            super().format_help(ctx, formatter)
        for named in ctx.meta["sections"]:
            known = [*sections(), EVERYTHING]
            if named not in known:
                guess = closest(named, known)
                meant = f"did you mean {guess}?" if guess else f"known are {', '.join(known)}"
                raise UserError(f"--help {named} names no section of settings; {meant}")
            fields_of: dict[str, list[SettingField]] = {}
            for field in setting_fields():
                if named == EVERYTHING or field.path.startswith(f"{named}."):
                    fields_of.setdefault(field.path.rpartition(".")[0], []).append(field)
            if named in (_EVALUATION, EVERYTHING):
                fields_of[f"{_EVALUATION}.sets.NAME"] = list(setting_fields(EvalSet))
            for section, fields in fields_of.items():
                with formatter.section(f"{section}: {sections().get(section, 'one set of held-out prompts').rstrip('.')}"):
                    formatter.write_dl([(field.path, _words(field)) for field in fields], col_max=48)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the settings of a first run, and the names of the sections with more settings."""
        fields = {field.path: field for field in setting_fields()}
        with formatter.section("Settings that a first run sets"):
            formatter.write_dl([(path, _words(fields[path])) for path in FIRST_RUN], col_max=48)
        formatter.write_paragraph()
        formatter.write_text(f"{len(fields) - len(FIRST_RUN)} more are in the sections {', '.join(sections())}.")


def _words(field: SettingField) -> str:
    default = "required" if field.required else f"default {field.default}"
    return f"{field.meaning} [{field.type}; {default}]"
