from pathlib import Path

import pytest

from megatron_rl.config.load import Words, apply_overrides, split_words
from megatron_rl.errors import UserError

OPTIONS = ("check", "resume", "reward", "ray-address")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["a.yaml", "run.seed=1", "--run.seed", "2", "--run.seed=3"], Words(Path("a.yaml"), ("run.seed=1", "run.seed=2", "run.seed=3"))),
        (["run.seed=1", "a.yaml"], Words(Path("a.yaml"), ("run.seed=1",))),
        ([], Words(None, ())),
        (["--run.seed", "-1"], Words(None, ("run.seed=-1",))),
        (["runs/lr=1/settings.yaml"], Words(Path("runs/lr=1/settings.yaml"), ())),
        (["--run", "{seed: 1}"], Words(None, ("run={seed: 1}",))),
        (["run.directory=a=b"], Words(None, ("run.directory=a=b",))),
        (["--data.eval="], Words(None, ("data.eval=",))),
    ],
)
def test_words_become_file_and_overrides(words: list[str], expected: Words) -> None:
    assert split_words(words, options=OPTIONS) == expected


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["a.yaml", "b.yaml"], "at most one file"),
        (["--chek"], "did you mean --check?"),
        (["--ray-adress", "x"], "did you mean --ray-address?"),
        (["--seed", "1"], "did you mean run.seed?"),
        (["--run.seed"], "has no value"),
        (["--run.seed", "--run.num_steps", "3"], "--run.seed has no value"),
    ],
)
def test_other_words_are_refused(words: list[str], part: str) -> None:
    with pytest.raises(UserError, match=part.replace("?", r"\?")):
        split_words(words, options=OPTIONS)


def test_overrides_nest_and_the_last_one_wins() -> None:
    values = {"run": {"seed": 1, "directory": "x"}, "data": None}
    result = apply_overrides(values, ["run.seed=2", "run.seed=3", "data.train=t", "rollout.sampling.temperature=1e-1", "run.directory="])
    assert result == {"run": {"seed": 3, "directory": None}, "data": {"train": "t"}, "rollout": {"sampling": {"temperature": 0.1}}}
    assert values == {"run": {"seed": 1, "directory": "x"}, "data": None}


def test_a_section_can_be_replaced_and_then_changed() -> None:
    assert apply_overrides({"run": {"seed": 1}}, ["run={num_steps: 2}", "run.seed=5"]) == {"run": {"num_steps": 2, "seed": 5}}


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("run.seed.x=1", "goes through run.seed, which is 1"),
        ("run.seed", "key.path=value"),
        ("run..seed=1", "key.path=value"),
        ("run.seed=[1", "not valid YAML"),
    ],
)
def test_bad_overrides_are_refused(override: str, part: str) -> None:
    with pytest.raises(UserError, match=part):
        apply_overrides({"run": {"seed": 1}}, [override])
