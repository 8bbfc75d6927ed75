"""Try a rollout function or an environment against a scripted engine."""

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_rl.config.derived import leaves_tokens_out
from megatron_rl.config.settings import RolloutSettings
from megatron_rl.data.row_files import Row
from megatron_rl.engines.answers import Generation
from megatron_rl.engines.sampling import Sampling
from megatron_rl.errors import UserError, counted
from megatron_rl.plugins.kinds import Rollout
from megatron_rl.rollout.groups import without_exit
from megatron_rl.rollout.opened_rollout import opened_rollout
from megatron_rl.rollout.sample_checks import check_samples
from megatron_rl.system.deadlines import PLUGIN_PROBE_S
from megatron_rl.system.frozen_arrays import Candidates
from megatron_rl.types import Experts, Ints, Prompt, Sample, StopReason

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class NumberTokenizer:
    """Stand-in for a tokenizer without a model: text is the tokens' numbers and blanks."""

    vocab_size = 50
    eos_token_id = 1
    chat_template = None

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
    """An engine that answers with seeded random tokens below `vocab_size`, and remembers them."""

    context = 2**14

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._random = np.random.default_rng(0)
        self.made: dict[float, tuple[int, int]] = {}
        """Log-prob of each made token -> the token and the weights' version; all are unique."""
        self.seen: dict[float, Ints] = {}  # log-prob of each token made -> all tokens before

    async def generate(
        self, token_ids: Ints, *, sampling: Sampling, num_samples: int = 1, session: str | None = None
    ) -> tuple[Generation, ...]:
        """Return `num_samples` responses of 1 to `sampling.max_tokens` tokens to `token_ids` [P]."""
        await asyncio.sleep(0)
        return tuple(self._answer(np.asarray(token_ids), sampling) for _ in range(num_samples))

    def _answer(self, prompt: Ints, sampling: Sampling) -> Generation:
        length = int(self._random.integers(1, sampling.max_tokens + 1))
        tokens = self._random.integers(0, self._vocab_size, length)
        log_probs = -self._random.random(length).astype(np.float32)
        self.made.update((float(log_prob), (int(token), 3)) for log_prob, token in zip(log_probs, tokens, strict=True))
        whole = np.concatenate([prompt, tokens])
        self.seen.update((float(log_prob), whole[: len(prompt) + number]) for number, log_prob in enumerate(log_probs))
        candidates = Candidates.of([token, (token + 1) % self._vocab_size] for token in tokens) if sampling.records_candidates else None
        return Generation(tokens, log_probs, np.full(length, 3), StopReason.STOP, scripted_experts(whole)[:-1], candidates)


def scripted_experts(tokens: Ints) -> Experts:
    """Return experts [T, 1, 2] of `tokens` [T]: number modulo 50, 50 plus position modulo 200."""
    return np.stack([tokens % 50, 50 + np.arange(len(tokens)) % 200], axis=-1).astype(np.uint8)[:, None]


def prompt_of(row: Row | None) -> Prompt:
    """Return a prompt of made-up tokens with the text and the fields of `row`, or `2+2=` without one."""
    row = row or Row(origin="", prompt="2+2=", label="4", response=None, metadata={})
    messages = () if isinstance(row.prompt, str) else row.prompt
    text = row.prompt if isinstance(row.prompt, str) else messages[-1]["content"]
    return Prompt(id="contract", token_ids=np.array([1, 2, 3]), text=text, label=row.label, metadata=row.metadata, messages=messages)


class RolloutTrial:
    """A trial of a rollout, own function or hosted; every method raises UserError on a breach.

    It is asked for an answer to `prompt_of(row)`.
    """

    def __init__(
        self,
        settings: RolloutSettings,
        *,
        tokenizer: "PreTrainedTokenizerBase | NumberTokenizer | None" = None,
        model_type: str | None = None,
        need_experts: bool = True,
        row: Row | None = None,
    ) -> None:
        self._settings, self._model_type, self._name = settings, model_type, settings.name
        self._tokenizer: Any = tokenizer or NumberTokenizer()
        self._need_experts, self._need_candidates = need_experts, leaves_tokens_out(settings.sampling)
        self._prompt = prompt_of(row)
        self._engine = ScriptedEngine(len(self._tokenizer))
        self.samples: tuple[Sample, ...] = ()

    def run(self) -> None:
        """Call the rollout for 1 and for 4 samples, and check the results as a run does."""

        async def work() -> tuple[Sample, ...]:
            opened = opened_rollout(self._settings, tokenizer=self._tokenizer, model_type=self._model_type, must_reward=False)
            async with opened as rollout:
                return (*await self._call(rollout, 1), *await self._call(rollout, 4))

        self.samples = asyncio.run(work())

    async def _call(self, rollout: Rollout, num_samples: int) -> tuple[Sample, ...]:
        try:
            made = rollout(
                prompt=self._prompt,
                generator=self._engine,
                sampling=Sampling(max_tokens=8, top_k=2, records_candidates=self._need_candidates),
                num_samples=num_samples,
                tokenizer=self._tokenizer,
            )
            samples = await asyncio.wait_for(without_exit(made), PLUGIN_PROBE_S)
        except TimeoutError as error:
            raise UserError(f"{self._name} has not answered a probe after {PLUGIN_PROBE_S:.0f} s; look what it waits for") from error
        except Exception as error:  # a user's function can fail in any way
            raise UserError(
                f"{self._name} failed for a probe of {counted(num_samples, 'sample')}: {type(error).__name__}: {error}"
            ) from error
        try:
            return check_samples(
                samples,
                prompt=self._prompt,
                num_samples=num_samples,
                vocab_size=len(self._tokenizer),
                max_tokens=self._engine.context,
                need_experts=self._need_experts,
                need_candidates=self._need_candidates,
            )
        except UserError as error:
            raise UserError(f"{self._name}: {error}") from error

    @property
    def has_unrewarded_end(self) -> bool:
        """Return True where a trajectory was ended by its environment or agent, without a reward."""
        ended = (each for each in self.samples if "num_turns" in each.metadata and each.stop_reason is StopReason.STOP)
        return any(each.reward is None for each in ended)

    def check_trained(self) -> None:
        """Check that each sample has a trained token, each from the engine with log-prob and version."""
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
        """Check that the engine made each trained token from exactly the sample's tokens before."""
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
