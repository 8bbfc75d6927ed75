"""Plug-ins that each break one promise."""

import itertools
from dataclasses import replace

import numpy as np
from two_turns import rollout as two_turns

from megatron_rl.algorithms.policy_loss import PolicyLossTerms
from megatron_rl.rollout.groups import single_turn

CALLS = itertools.count()


def unsteady(*, sample):
    return float(next(CALLS))


def fails_for_emoji(*, sample):
    return float(len(sample.response_text.encode("ascii")))


def old_form(*, prompt, response, label, metadata):
    return 0.0


async def one_too_few(*, num_samples, **arguments):
    return await single_turn(num_samples=num_samples, **arguments) if num_samples > 1 else []


async def fails(*, prompt, **arguments):
    return [prompt.metadata["tool"]]


async def exits(**arguments):
    raise SystemExit(3)


def interrupts(*, group):
    raise KeyboardInterrupt


def exits_in_a_loss(*, objective, terms):
    raise SystemExit(3)


def exits_in_a_worker(*, sample):
    raise SystemExit(3)


async def wrong_version(**arguments):
    return [replace(sample, weight_versions=sample.weight_versions + 1) for sample in await single_turn(**arguments)]


async def trains_on_a_tool(**arguments):
    """The tool's tokens with log-probs and versions that look as an engine's."""
    samples = await two_turns(**arguments)
    return [
        replace(
            sample,
            loss_mask=np.ones(len(sample.loss_mask)),
            rollout_log_probs=np.nan_to_num(sample.rollout_log_probs, nan=-0.5),
            weight_versions=np.abs(sample.weight_versions),
        )
        for sample in samples
    ]


async def masked_with_a_version(**arguments):
    return [replace(sample, weight_versions=np.abs(sample.weight_versions)) for sample in await two_turns(**arguments)]


async def without_experts(**arguments):
    return [replace(sample, routed_experts=None) for sample in await single_turn(**arguments)]


async def another_history(*, prompt, **arguments):
    """What the engine was not asked with stands before what it made."""
    other = replace(prompt, token_ids=[1, 2, 3, 4])
    return [replace(sample, prompt=other) for sample in await single_turn(prompt=prompt, **arguments)]


async def without_label(*, prompt, **arguments):
    return [replace(sample, prompt=replace(prompt, label=None)) for sample in await single_turn(prompt=prompt, **arguments)]


def keeps_by_true(*, group):
    return True


def needs_rewards(*, group):
    return "too little" if sum(sample.reward.value for sample in group.samples) < -1e9 else None


def mean_loss(*, objective, terms):
    return PolicyLossTerms(-terms.log_probs.mean())


def constant_loss(*, objective, terms):
    return PolicyLossTerms(-terms.log_probs.detach())


def infinite_loss(*, objective, terms):
    return PolicyLossTerms(-terms.log_probs / terms.advantages)


def by_position(*, rewards, group_ids, lengths):
    return rewards - rewards[0]


def float32(*, rewards, group_ids, lengths):
    return rewards.float()


def infinite(*, rewards, group_ids, lengths):
    return (rewards - rewards.mean()) / rewards.std()


class Source:
    """Keeps every promise of a data source."""

    state = 0

    def __init__(self, *, seed):
        self.seed = seed

    def next_rows(self, count):
        first, self.state = self.state, self.state + count
        return [self.row(number) for number in range(first, first + count)]

    def row(self, number):
        return {"prompt": f"{self.seed}-{number}", "label": "5"}


class Shuffled(Source):
    def row(self, number):
        return {"prompt": str(next(CALLS))}


class ByCall(Source):
    def next_rows(self, count):
        self.state += 1
        return [{"prompt": f"{self.state}-{number}"} for number in range(count)]


class Forgetful(Source):
    def __init__(self, *, seed):
        super().__init__(seed=seed)
        self.known = 0

    def row(self, number):
        self.known += 1
        return {"prompt": str(self.known)}


class OddState(Source):
    state = {1}  # noqa: RUF012

    def next_rows(self, count):
        return [{"prompt": "2+3="}] * count


class Stateless:
    def __init__(self, *, seed):
        pass

    def next_rows(self, count):
        return [{"prompt": "2+3="}] * count


class Ends(Source):
    def next_rows(self, count):
        return super().next_rows(count)[:3]


class Generates(Source):
    def next_rows(self, count):
        return (self.row(number) for number in range(count))


class Labels(Source):
    def row(self, number):
        return {"prompt": "2+3=", "label": ["5"]}


class Texts(Source):
    def row(self, number):
        return "text"


class Fails(Source):
    def next_rows(self, count):
        raise KeyError("rows")


class NoRows:
    def __init__(self, *, seed):
        pass


def rows(*, seed):
    return Source(seed=seed)
