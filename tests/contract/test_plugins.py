"""The contracts of plug-ins. Check your own: `pytest tests/contract/test_plugins.py --plugin package.module:name --kind rollout`."""

from pathlib import Path

import pytest

from megatron_rl.config.settings import RolloutSettings
from megatron_rl.plugins.kinds import KINDS
from megatron_rl.rollout.rollout_trial import RolloutTrial
from megatron_rl.runtime.plugin_contracts import check

ROOT = Path(__file__).parents[2]

EXAMPLES = {
    "advantage": "advantage:advantage",
    "data_source": "data_source:Sums",
    "environment": "environment:Guess",
    "filter": "filter:keep",
    "policy_loss": "policy_loss:loss",
    "reward": "reward:score",
    "rollout": "rollout:rollout",
}
OURS = [
    ("reward", "megatron_rl.rewards.math:score"),
    ("reward", "tags"),
    ("reward", "rewards_under_test:rank"),
    ("rollout", "megatron_rl.rollout.groups:single_turn"),
    ("rollout", "two_turns:rollout"),
    ("rollout", "cut_history:rollout"),
    ("environment", "examples.agents.shop:Shop"),
]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Check the plug-in that is asked for; else ours, one rollout of them with tokens that no engine made."""
    if "path" in metafunc.fixturenames:
        asked, kind = metafunc.config.getoption("--plugin", default=None), metafunc.config.getoption("--kind", default="reward")
        examples = [(name, f"examples.plugins.{path}") for name, path in EXAMPLES.items()]
        metafunc.parametrize(("kind", "path"), [(kind, asked)] if asked else [*OURS, *examples])


def test_a_plugin_keeps_its_contract(kind, path: str) -> None:
    checks = list(check(path, kind))
    assert [each.text for each in checks if each.level == "broken"] == []
    assert len(checks) > 1, "more is checked than that it can be imported"


def test_every_kind_has_an_example_of_under_20_lines() -> None:
    assert EXAMPLES.keys() == KINDS.keys()
    for path in EXAMPLES.values():
        assert len((ROOT / "examples" / "plugins" / f"{path.partition(':')[0]}.py").read_text().splitlines()) < 20


def test_our_rollout_of_two_turns_has_tokens_that_no_engine_made() -> None:
    trial = RolloutTrial(RolloutSettings(function="two_turns:rollout"))
    trial.run()
    for sample in trial.samples:
        middle = sample.loss_mask[1:-1]
        assert sample.loss_mask[0] and sample.loss_mask[-1] and not middle.all(), "masked tokens stand between trained ones"


@pytest.mark.parametrize(
    ("kind", "name", "message"),
    [
        ("reward", "unsteady", "needs the same"),
        ("reward", "fails_for_emoji", "gave no reward for the response"),
        ("reward", "old_form", "but is called as (sample=..)"),
        ("rollout", "wrong_version", "needs (31, 3), which came with the rollout log-prob"),
        ("rollout", "trains_on_a_tool", "which came with"),
        ("rollout", "masked_with_a_version", "no engine made, needs False and -1"),
        ("rollout", "without_experts", "no routed_experts"),
        ("rollout", "another_history", "before trained token 0, 4 tokens in all, needs the"),
        ("rollout", "without_label", "a prompt whose label is None, needs '4'"),
        ("rollout", "one_too_few", "returned 0 samples of 0 trajectories, needs 1"),
        ("filter", "keeps_by_true", "returned True of type bool for the group of prompt contract, needs None to keep it"),
        ("filter", "needs_rewards", "failed for the group of prompt contract: TypeError"),
        ("advantage", "by_position", "for samples in another order, needs"),
        ("advantage", "float32", "returned torch.float32 (7,), needs a float64 tensor (7,)"),
        ("advantage", "infinite", "returned nan for the reward 1.0, needs finite"),
        ("policy_loss", "mean_loss", "returned losses of shape (), needs a tensor of shape (5,)"),
        ("policy_loss", "constant_loss", "without a gradient"),
        ("policy_loss", "infinite_loss", "needs finite numbers"),
        ("data_source", "Shuffled", "with the same seed, was"),
        ("data_source", "ByCall", "when fewer are asked for at once, was"),
        ("data_source", "Forgetful", "after state and restore, was"),
        ("data_source", "OddState", "has the state {1}, which JSON cannot hold"),
        ("data_source", "Stateless", "failed while giving its state: AttributeError"),
        ("data_source", "Ends", "returned 3 rows, needs a list of 10; a source has no end"),
        ("data_source", "Generates", "of type generator, needs a list of 2"),
        ("data_source", "Labels", "row 0: 'label' is ['5'], needs a string or a number"),
        ("data_source", "Texts", "row 0: is 'text', needs a mapping"),
        ("data_source", "Fails", "failed while giving 2 rows: KeyError: 'rows'"),
        ("data_source", "rows", "is a function, needs a class with next_rows(count)"),
        ("data_source", "NoRows", "has no method next_rows"),
        ("rollout", "fails", "failed for a probe of 1 sample: KeyError: 'tool'"),
        ("rollout", "exits", "failed for a probe of 1 sample: RuntimeError: the rollout raised SystemExit"),
        ("policy_loss", "exits_in_a_loss", "raised SystemExit while being tried, needs to return"),
        ("filter", "interrupts", "failed for the group of prompt contract: KeyboardInterrupt"),
        ("reward", "exits_in_a_worker", "SystemExit: 3"),
    ],
)
def test_a_broken_promise_names_plugin_field_got_and_needed(kind, name: str, message: str) -> None:
    *kept, last = check(f"broken_plugins:{name}", kind)
    assert all(each.level == "ok" for each in kept)
    assert last.level == "broken" and message in last.text and f"broken_plugins:{name}" in last.text
