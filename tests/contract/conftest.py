"""Options with which users check their own plug-ins: `pytest tests/contract --reward package.module:function` or `--rollout ..`."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--reward", default="megatron_rl.rewards.math:score", help="reward function to check")
    parser.addoption("--reward-label", default="4", help="label that the reward function is checked with")
    parser.addoption("--rollout", help="rollout function to check, instead of ours")
