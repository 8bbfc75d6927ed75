from typing import Any

import pytest

from megatron_rl.config.settings import Settings
from megatron_rl.config.settings_reference import sections, setting_fields

BY_PATH = {field.path: field for field in setting_fields()}


def test_every_setting_says_what_it_is() -> None:
    assert [path for path, field in BY_PATH.items() if not field.description] == []


def test_there_are_at_most_102_settings_of_our_own() -> None:
    """Without arguments, the mappings that hold them, sections (whose settings are counted) and what upstream classes take."""
    arguments = {path for path, field in BY_PATH.items() if field.kinds or path.rpartition(".")[2] == "args"}
    upstream = {f"{path}" for path in BY_PATH if path.rpartition(".")[2] in ("megatron", "sglang", "optimizer", "ddp")}
    own = BY_PATH.keys() - arguments - upstream - set(sections())
    assert len(own) <= 102, sorted(own)
    assert len(arguments) > 25 and len(upstream) == 5


def test_arguments_say_which_kinds_have_them() -> None:
    by_kinds = {(field.path, field.kinds): field for field in setting_fields()}
    assert ("objective.policy_loss.dual_clip", ("clip", "clip_cov")) in by_kinds
    gamma = by_kinds["objective.advantage.gamma", ("reinforce_plus_plus", "gae")]
    assert (gamma.type, gamma.default) == ("number >= 0, <= 1", "1.0")
    assert gamma.meaning == "(reinforce_plus_plus, gae) Discount per trainable token."
    assert BY_PATH["objective.policy_loss.kind"].type.startswith("one of clip, cispo, ")
    assert (BY_PATH["rollout.order.kind"].default, BY_PATH["rollout.order.partial"].kinds) == ("in_order", ("first_complete",))
    assert BY_PATH["objective.policy_loss.kind"].default == "clip" and BY_PATH["objective.entropy.control.kind"].required
    assert by_kinds["objective.entropy.control.delta", ("trl", "skywork", "paper", "clip_high")].default == "0.005"


def test_a_few_settings_in_full() -> None:
    seed = BY_PATH["run.seed"]
    assert (seed.type, seed.default, seed.required) == ("integer >= 0", "0", False)
    assert BY_PATH["run.directory"].required
    assert BY_PATH["objective.policy_loss.low"].type == "number >= 0, or null"
    assert BY_PATH["objective.off_policy"].default == "null"
    assert BY_PATH["objective.off_policy.mode"].type == "one of none, truncate, mask"
    assert BY_PATH["reward.max_error_rate"].type == "number >= 0, <= 1"
    assert "dapo" in BY_PATH["objective.preset"].type


def test_listed_settings_are_those_that_settings_have() -> None:
    """Every leaf of resolved settings is listed, so that the help cannot be incomplete."""

    def leaves(value: dict[str, Any], prefix: str = "") -> set[str]:
        paths: set[str] = set()
        for name, inner in value.items():
            path = f"{prefix}{name}"
            paths |= leaves(inner, f"{path}.") if path in sections() and inner is not None else {path}
        return paths

    required = {"run": {"directory": "x"}, "model": {"path": "m"}, "data": {"train": "t"}}
    resolved = Settings.model_validate(required).model_dump()
    optional = {path for path in sections() if path in BY_PATH}
    listed = {path for path in BY_PATH if not any(path.startswith(f"{section}.") for section in optional)}
    # Arguments of kinds that are not the default.
    listed -= {path for path, field in BY_PATH.items() if field.kinds and path.rpartition(".")[0] not in optional}
    dumped = {path for path in leaves({key: value for key, value in resolved.items() if key != "objective"})}
    assert {path for path in listed if not path.startswith("objective.")} == dumped


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("training.topology.etp", "integer >= 1, or null"),
        ("rollout.sampling.stop", "list of string"),
        ("objective.advantage.reward_weights", "list of number, or null"),
        ("weights.transport", "one of broadcast, disk, ipc, or null"),
        ("reward.args", "mapping"),
        ("model.teacher", "path, or null"),
        ("data.shuffle", "true or false"),
        ("objective.kl", "section, or null"),
    ],
)
def test_types_in_words(path: str, words: str) -> None:
    assert BY_PATH[path].type == words
