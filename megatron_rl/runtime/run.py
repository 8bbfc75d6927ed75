"""The two things that the command line starts. Ray reads its environment when it is imported, so that comes first."""

from megatron_rl.config.settings import Settings
from megatron_rl.runtime.ray_session import prepare_environment


def run_training(settings: Settings, *, resume: bool) -> None:
    """Train as the settings say, or continue with `resume` from the run's newest checkpoint.

    Raises UserError for what the user can mend and the failing process's own error otherwise; nothing keeps running.
    """
    prepare_environment(settings.runtime)
    from megatron_rl.runtime.session import train

    train(settings, resume=resume)


def run_evaluation(settings: Settings) -> None:
    """Evaluate the model at model.path on data.eval with engines alone, and print the result. Raises as `run_training`."""
    prepare_environment(settings.runtime)
    from megatron_rl.runtime.session import evaluate

    evaluate(settings)
