"""Contracts of plug-ins, tried on the plug-in: arguments, results, and fidelity to the engines.

`megatron-rl check-plugin` prints these checks, `train --check` stops at the first failure,
tests/contract asserts all.
"""

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from megatron_rl.algorithms.advantage import PlugInAdvantage, group_advantages
from megatron_rl.algorithms.aggregation import Sequences
from megatron_rl.algorithms.objective import Objective
from megatron_rl.algorithms.policy_loss import PolicyTerms
from megatron_rl.algorithms.unclipped_losses import PlugInLoss
from megatron_rl.check import Check
from megatron_rl.config.settings import DataSettings, FilterSettings, RewardSettings, RolloutSettings
from megatron_rl.data.row_files import Row
from megatron_rl.data.row_source import OwnRows
from megatron_rl.deadlines import PLUGIN_PROBE_S
from megatron_rl.engines.client import Generation
from megatron_rl.engines.sampling import Sampling
from megatron_rl.errors import UserError, counted
from megatron_rl.plugins import KINDS, PluginKind, load, without_exits
from megatron_rl.rewards.runner import RewardRunner, probe_sample
from megatron_rl.rollout.group_choice import load_filter
from megatron_rl.rollout.groups import load_rollout, without_exit
from megatron_rl.rollout.sample_checks import check_samples
from megatron_rl.types import Experts, Group, Ints, Prompt, Reward, RewardOutcome, Sample, StopReason

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

RESPONSES = ("4", "5", "", "no idea", "\\boxed{4}", "\N{GRINNING FACE}", "x" * 10_000)
"""Responses for the trial of a reward function."""
PROBE_REWARDS: tuple[tuple[float | None, ...], ...] = ((0.0, 1.0), (1.0, 1.0), (0.0,), (0.5, None), (-1e6, 0.0, 1e6, 1.0))
"""Rewards of the groups for the trial of a filter; None for a failed reward call."""
NUM_PROBE_ROWS = 10
"""Rows that a data source has to give again."""
NO_ARGS: Mapping[str, Any] = MappingProxyType({})


class NumberTokenizer:
    """Stand-in for a tokenizer without a model: text is the tokens' numbers and blanks."""

    vocab_size = 50
    eos_token_id = 1

    def __len__(self) -> int:
        """Return the number of tokens in the vocabulary."""
        return self.vocab_size

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the numbers as text; no token is special."""
        return " ".join(str(int(token)) for token in token_ids)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Return the numbers in `text`; each other word gives a number from its characters."""
        return [(int(word) if word.isdigit() else sum(map(ord, word))) % self.vocab_size for word in text.split()]

    def apply_chat_template(self, *messages: object, **options: object) -> str:
        """Raise ValueError: a chat needs the tokenizer of a model."""
        raise ValueError("the tokenizer of this trial has no chat template, needs a model's; give its directory by --model DIR")


class ScriptedEngine:
    """An engine that answers with seeded random tokens below `vocab_size`.

    The engine remembers each token's log-prob and version. Experts of a token are the token's
    number modulo 50, and 50 plus the position modulo 200.
    """

    context = 2**14

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._random = np.random.default_rng(0)
        self.made: dict[float, tuple[int, int]] = {}
        """Log-prob of each made token -> the token and the weights' version; all are unique."""
        self.seen: dict[float, Ints] = {}
        """Log-prob of each token made -> all tokens before."""

    async def generate(
        self, token_ids: Ints, *, sampling: Sampling, num_samples: int = 1, session: str | None = None
    ) -> tuple[Generation, ...]:
        """Return `num_samples` responses of 1 to `sampling.max_tokens` tokens to `token_ids` [P].

        `session` changes nothing.
        """
        await asyncio.sleep(0)
        return tuple(self._answer(np.asarray(token_ids), sampling) for _ in range(num_samples))

    def _answer(self, prompt: Ints, sampling: Sampling) -> Generation:
        length = int(self._random.integers(1, sampling.max_tokens + 1))
        tokens = self._random.integers(0, self._vocab_size, length)
        log_probs = -self._random.random(length).astype(np.float32)
        self.made.update((float(log_prob), (int(token), 3)) for log_prob, token in zip(log_probs, tokens, strict=True))
        whole = np.concatenate([prompt, tokens])
        self.seen.update((float(log_prob), whole[: len(prompt) + number]) for number, log_prob in enumerate(log_probs))
        return Generation(tokens, log_probs, np.full(length, 3), StopReason.STOP, scripted_experts(whole)[:-1])


def scripted_experts(tokens: Ints) -> Experts:
    """Return the scripted engine's experts [T, 1, 2] of a sequence `tokens` [T]."""
    return np.stack([tokens % 50, 50 + np.arange(len(tokens)) % 200], axis=-1).astype(np.uint8)[:, None]


def check(
    path: str, kind: PluginKind, args: Mapping[str, Any] = NO_ARGS, *, tokenizer: "PreTrainedTokenizerBase | None" = None
) -> Iterator[Check]:
    """Try the plug-in at `path`, with `args`, on each promise of its kind's contract in order.

    A rollout gets `tokenizer`, a model's, or NumberTokenizer for None.
    """
    try:
        load(path, kind=kind, args=args)
    except UserError as error:
        yield Check("it can be imported and called with its arguments", "broken", str(error))
        return
    yield Check("it can be imported and called with its arguments")
    attempts = _rollout_attempts(path, args, tokenizer) if kind == "rollout" else _ATTEMPTS[kind](path, args)
    for promise, attempt in attempts:
        try:
            with without_exits(f"{KINDS[kind].setting} {path}", doing="being tried"):
                attempt()
        except UserError as error:
            yield Check(promise, "broken", str(error))
            return
        yield Check(promise)


def require(path: str, kind: PluginKind, args: Mapping[str, Any]) -> None:
    """Raise UserError with the first promise of its contract that the plug-in breaks."""
    for found in check(path, kind, args):
        if found.level == "broken":
            raise UserError(found.text)


Attempts = Iterator[tuple[str, Callable[[], None]]]
"""Promises in words, each with a function that raises UserError for a broken promise."""


def _reward_attempts(path: str, args: Mapping[str, Any]) -> Attempts:
    prompt = Prompt(id="contract", token_ids=np.array([1]), text="2+2=", label="4")
    with RewardRunner(RewardSettings(function=path, args=dict(args))) as runner:
        first: list[Reward] = []

        def every_response() -> None:
            runner.probe(prompt)
            first.extend(score_all(runner, prompt))
            for response, reward in zip(RESPONSES, first, strict=True):
                if reward.outcome is not RewardOutcome.SCORED:
                    raise UserError(f"reward.function {path} gave no reward for the response {response[:40]!r}: {reward.message}")

        def same_again() -> None:
            for response, one, other in zip(RESPONSES, first, score_all(runner, prompt), strict=True):
                if one.value != other.value:
                    raise UserError(
                        f"reward.function {path} gave {one.value} and then {other.value} for the response {response[:40]!r}, needs the same"
                    )

        yield "any response gets a finite reward", every_response
        yield "the same response gets the same reward again", same_again


def score_all(runner: RewardRunner, prompt: Prompt) -> list[Reward]:
    """Return the rewards of RESPONSES as answers to `prompt`."""

    async def work() -> list[Reward]:
        return await asyncio.gather(*(runner.score(probe_sample(prompt, response)) for response in RESPONSES))

    return asyncio.run(work())


def _rollout_attempts(path: str, args: Mapping[str, Any], tokenizer: "PreTrainedTokenizerBase | None") -> Attempts:
    trial = RolloutTrial(RolloutSettings(function=path, args=dict(args)), tokenizer=tokenizer)
    yield "one prompt becomes as many trajectories as are asked for", trial.run
    yield "what is trained on is what the engine made, with its log-prob and version", trial.check_trained
    yield "what is trained on stands behind the tokens that the engine saw", trial.check_seen
    yield "what no engine made is masked and has version -1", trial.check_masked
    yield "experts come along for every token before the last that was made", trial.check_experts


class RolloutTrial:
    """A rollout function tried with a scripted engine; every method raises UserError on a breach.

    `tokenizer` is the model's where there is one. `need_experts` says that samples have to bring
    experts.
    """

    def __init__(
        self, settings: RolloutSettings, *, tokenizer: "PreTrainedTokenizerBase | NumberTokenizer | None" = None, need_experts: bool = True
    ) -> None:
        self._rollout = load_rollout(settings)
        self._name = f"rollout.function {settings.function or 'single_turn'}"
        self._tokenizer: Any = tokenizer or NumberTokenizer()
        self._need_experts = need_experts
        self._engine = ScriptedEngine(len(self._tokenizer))
        self.samples: tuple[Sample, ...] = ()

    def run(self) -> None:
        """Call the function for 1 and for 4 samples, and check the results as a run does."""
        self.samples = (*self._call(1), *self._call(4))

    def _call(self, num_samples: int) -> tuple[Sample, ...]:
        prompt = Prompt(id="contract", token_ids=np.array([1, 2, 3]), text="2+2=", label="4")

        async def work() -> Sequence[Sample]:
            made = self._rollout(
                prompt=prompt,
                generator=self._engine,
                sampling=Sampling(max_tokens=8),
                num_samples=num_samples,
                tokenizer=self._tokenizer,
            )
            return await asyncio.wait_for(without_exit(made), PLUGIN_PROBE_S)

        try:
            samples = asyncio.run(work())
        except TimeoutError as error:
            raise UserError(f"{self._name} has not answered a probe after {PLUGIN_PROBE_S:.0f} s; look what it waits for") from error
        except Exception as error:  # a user's function can fail in any way
            raise UserError(
                f"{self._name} failed for a probe of {counted(num_samples, 'sample')}: {type(error).__name__}: {error}"
            ) from error
        try:
            return check_samples(
                samples,
                prompt=prompt,
                num_samples=num_samples,
                vocab_size=len(self._tokenizer),
                max_tokens=self._engine.context,
                need_experts=self._need_experts,
            )
        except UserError as error:
            raise UserError(f"{self._name}: {error}") from error

    def check_trained(self) -> None:
        """Check that each trained token came from the engine with log-prob and version.

        Each sample has a trained token.
        """
        for sample in self.samples:
            if not sample.loss_mask.any():
                raise UserError(f"{self._name} returned sample {sample.index} with loss_mask False everywhere, needs a token to train on")
            for position in np.flatnonzero(sample.loss_mask):
                got = (int(sample.response_ids[position]), int(sample.weight_versions[position]))
                made = self._engine.made.get(float(sample.rollout_log_probs[position]))
                if got != made:
                    raise UserError(
                        f"{self._name} returned sample {sample.index} whose response_ids and weight_versions are {got} at trained token "
                        f"{position}, needs {made or 'those'}, which came with the rollout log-prob {sample.rollout_log_probs[position]:g} "
                        "in one Generation"
                    )

    def check_seen(self) -> None:
        """Check that the engine was asked for each trained token with the sample's own text before.

        The text before is the sample's prompt and the response tokens before the trained token.
        """
        for sample in self.samples:
            tokens = np.concatenate([sample.prompt.token_ids, sample.response_ids])
            for position in np.flatnonzero(sample.loss_mask):
                before = tokens[: len(sample.prompt.token_ids) + position]
                seen = self._engine.seen[float(sample.rollout_log_probs[position])]
                if not np.array_equal(before, seen):
                    raise UserError(
                        f"{self._name} returned sample {sample.index} with {before[-8:].tolist()} before trained token {position}, "
                        f"{len(before)} tokens in all, needs the {len(seen)} that the engine was asked with, which end in "
                        f"{seen[-8:].tolist()}; where a turn saw another history, make it a sample with a prompt of its own"
                    )

    def check_masked(self) -> None:
        """Check loss_mask False and version -1 for tokens that no engine made."""
        for sample in self.samples:
            for position, log_prob in enumerate(sample.rollout_log_probs):
                made = self._engine.made.get(float(log_prob))
                got = (bool(sample.loss_mask[position]), int(sample.weight_versions[position]))
                if (made is None or made[0] != sample.response_ids[position]) and got != (False, -1):
                    raise UserError(
                        f"{self._name} returned sample {sample.index} with loss_mask {got[0]} and weight_versions {got[1]} at token "
                        f"{position}, which no engine made, needs False and -1"
                    )

    def check_experts(self) -> None:
        """Check that the experts are the engine's, of all tokens before the last made token."""
        for sample in self.samples:
            tokens = np.concatenate([sample.prompt.token_ids, sample.response_ids])
            last_made = len(sample.prompt.token_ids) + int(np.flatnonzero(sample.weight_versions >= 0)[-1])
            if sample.routed_experts is None or not np.array_equal(sample.routed_experts, scripted_experts(tokens)[:last_made]):
                num = "no" if sample.routed_experts is None else f"other or {len(sample.routed_experts)}"
                raise UserError(
                    f"{self._name} returned sample {sample.index} with {num} routed_experts, needs those of the last Generation, which are "
                    f"of {last_made} tokens; training.routing_replay trains with them"
                )


def _advantage_attempts(path: str, args: Mapping[str, Any]) -> Attempts:
    estimator = PlugInAdvantage(path=path, args=dict(args)).loaded(load)
    rewards = torch.tensor([1.0, 0.0, 0.25, 5.0, -3.0, 2.0, 7.0], dtype=torch.float64)
    group_ids, lengths = torch.tensor([0, 0, 0, 1, 1, 1, 2]), torch.tensor([3, 5, 2, 4, 9, 1, 6])

    def one_each() -> None:
        for given in (rewards, torch.ones(7, dtype=torch.float64)):
            _advantages(given, torch.arange(7))
        for group in range(3):
            _advantages(rewards, torch.nonzero(group_ids == group).flatten())

    def _advantages(given: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        return group_advantages(estimator, rewards=given[order], group_ids=group_ids[order], lengths=lengths[order])

    def any_order() -> None:
        order = torch.tensor([6, 3, 0, 4, 1, 5, 2])
        sorted_ones, mixed = _advantages(rewards, torch.arange(7))[order], _advantages(rewards, order)
        if not torch.allclose(sorted_ones, mixed, rtol=1e-9, atol=1e-12):
            raise UserError(
                f"objective.advantage {path} returned {mixed.tolist()} for samples in another order, needs "
                f"{sorted_ones.tolist()}; find the samples of a prompt by group_ids"
            )

    yield "every sample gets a finite float64 advantage, also in groups of equal rewards or of one", one_each
    yield "the order of the samples does not matter", any_order


def _policy_loss_attempts(path: str, args: Mapping[str, Any]) -> Attempts:
    loss = PlugInLoss(path=path, args=dict(args)).loaded(load, Objective())

    def loss_of(advantages: Sequence[float]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return losses [T] of sequences of 3 and 2 tokens, and their log-probs [T]."""
        log_probs = torch.tensor([-0.5, -1.0, -2.0, -0.1, -3.0], dtype=torch.float64, requires_grad=True)
        old = torch.tensor([-0.6, -1.0, -1.5, -0.1, -3.5], dtype=torch.float64)
        mask = torch.ones(5, dtype=torch.bool)
        sequences = Sequences(index=torch.tensor([0, 0, 0, 1, 1]), mask=mask, tokens=torch.tensor([3.0, 2.0], dtype=torch.float64))
        terms = PolicyTerms(
            log_probs=log_probs, old_log_probs=old, log_ratio=log_probs - old, advantages=torch.tensor(advantages, dtype=torch.float64),
            sequences=sequences, ref_log_probs=old,
        )  # fmt: skip
        return loss.losses(terms).losses, log_probs

    def losses() -> None:
        for advantages in ((1.0, 1.0, 1.0, -2.0, -2.0), (0.0,) * 5):
            made, _ = loss_of(advantages)
            if not made.isfinite().all():
                raise UserError(f"objective.policy_loss {path} returned losses {made.tolist()}, needs finite numbers")

    def gradient() -> None:
        made, log_probs = loss_of((1.0, 1.0, 1.0, -2.0, -2.0))
        if not made.requires_grad:
            raise UserError(f"objective.policy_loss {path} returned losses without a gradient, needs one with respect to terms.log_probs")
        (slope,) = torch.autograd.grad(made.sum(), log_probs)
        if not slope.isfinite().all() or not slope.any():
            raise UserError(
                f"objective.policy_loss {path} returned losses whose gradient with respect to terms.log_probs is {slope.tolist()}, needs "
                "finite numbers other than 0"
            )

    yield "every token gets a finite loss", losses
    yield "the losses have a gradient with respect to the log-probs", gradient


def _data_source_attempts(path: str, args: Mapping[str, Any]) -> Attempts:
    settings = DataSettings(source=path, args=dict(args))

    def opened() -> OwnRows:
        return OwnRows(settings=settings, seed=7, need_response=False)

    def contents(rows: Sequence[tuple[str, Row]]) -> list[Row]:
        return [row for _, row in rows]

    expected: list[Row] = []

    def rows() -> None:
        expected.extend(contents(opened().take(NUM_PROBE_ROWS)))

    def same(got: Sequence[Row], what: str, fix: str) -> None:
        for number, (row, other) in enumerate(zip(got, expected, strict=True)):
            if row != other:
                raise UserError(f"data.source {path} gave row {number} as {row.prompt!r:.60} {what}, was {other.prompt!r:.60}; {fix}")

    def same_seed() -> None:
        same(contents(opened().take(NUM_PROBE_ROWS)), "with the same seed", "draw from numpy.random.default_rng(seed)")

    def any_count() -> None:
        source = opened()
        parts = [source.take(count) for count in (1, 3, NUM_PROBE_ROWS - 4)]
        same(contents([row for part in parts for row in part]), "when fewer are asked for at once", "let a row follow from its number")

    def resumed() -> None:
        source, other = opened(), opened()
        before = source.take(3)
        other.restore(json.loads(json.dumps(source.state())))
        same(contents([*before, *other.take(NUM_PROBE_ROWS - 3)]), "after state and restore", "keep in state all that rows follow from")

    yield "rows can be used as the lines of a data file are", rows
    yield "the same seed gives the same rows", same_seed
    yield "the rows do not depend on how many are asked for at once", any_count
    yield "it goes on from its state, which JSON can hold", resumed


def _filter_attempts(path: str, args: Mapping[str, Any]) -> Attempts:
    keep = load_filter(FilterSettings(function=path, args=dict(args)))

    def every_group() -> None:
        for rewards in PROBE_REWARDS:
            keep(_probe_group(rewards))

    def same_again() -> None:
        for rewards in PROBE_REWARDS:
            answers = keep(_probe_group(rewards)), keep(_probe_group(rewards))
            if answers[0] != answers[1]:
                raise UserError(f"rollout.filter.function {path} returned {answers[0]!r} and then {answers[1]!r} for equal groups")

    yield "any group gets None or a reason", every_group
    yield "the same group gets the same answer again", same_again


def _probe_group(rewards: Sequence[float | None]) -> Group:
    """Return a group whose samples have these rewards; None makes a failed reward call."""
    prompt = Prompt(id="contract", token_ids=np.array([1]), text="2+2=", label="4")
    outcomes = [
        Reward(RewardOutcome.TIMEOUT, message="timeout") if reward is None else Reward(RewardOutcome.SCORED, reward) for reward in rewards
    ]
    samples = [replace(probe_sample(prompt, str(index)), index=index, reward=outcome) for index, outcome in enumerate(outcomes)]
    return Group(id=prompt.id, prompt=prompt, samples=tuple(samples))


_ATTEMPTS: Mapping[PluginKind, Callable[[str, Mapping[str, Any]], Attempts]] = MappingProxyType({
    "reward": _reward_attempts,
    "filter": _filter_attempts,
    "advantage": _advantage_attempts,
    "policy_loss": _policy_loss_attempts,
    "data_source": _data_source_attempts,
})  # fmt: skip
