"""The run of an evaluation: answers to the prompts of each set, kept one by one, and the estimates.

prompts of a set ──► `answer` (engines, or a server) ──► reward ──► NAME.jsonl ──► NAME.json
"""

import asyncio
import hashlib
import json
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_rl.config.eval_sets import EvalSettings
from megatron_rl.config.settings import RewardSettings, RolloutSettings
from megatron_rl.engines.sampling import eval_sampling
from megatron_rl.evaluation.estimates import CONFIDENCE, Estimate, estimates
from megatron_rl.evaluation.graded_answers import AnswerFile, answers_of
from megatron_rl.observe.metrics import Last, Metric
from megatron_rl.rollout.generator import together
from megatron_rl.types import Group, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

EVALUATION_DIRECTORY = "evaluation"
"""In the run directory: a directory for each evaluated step, with two files for each set."""


Ask = Callable[..., Awaitable[Group]]
"""From a prompt of the set `name`, `num_samples` and `sampling` to answers with rewards, as `RolloutManager.answer`."""


@dataclass(frozen=True, slots=True)
class SetResult:
    """The estimates of one set, by name; `failures` counts the failed answers by cause, with the most frequent message."""

    name: str
    estimates: Mapping[str, Estimate]
    failures: Mapping[str, int]
    message: str
    path: Path

    @property
    def metrics(self) -> dict[str, Metric]:
        """Return the values as metrics `eval/SET/…`."""
        return {f"eval/{self.name}/{name}": Last(estimate.value) for name, estimate in self.estimates.items()}

    def __str__(self) -> str:
        main = next((name for name in ("accuracy", "reward") if name in self.estimates), None)
        return f"{self.name}: {'no answer was scored' if main is None else f'{main} {self.estimates[main]}'}{self.failed}"

    @property
    def failed(self) -> str:
        """Return the failures in words, nothing without any."""
        counts = ", ".join(f"{count} {cause}" for cause, count in self.failures.items())
        return f"; failed: {counts}, most often: {self.message}" if counts else ""


class Evaluator:
    """Evaluates sets of `settings` with these `prompts` by answers of `ask`.

    `tokenizer` is the engines', None for another server. `rollout` and `reward` are the run's. `say`
    gets a sentence about answers that are there and of no use.
    """

    def __init__(
        self,
        settings: EvalSettings,
        ask: Ask,
        *,
        prompts: Mapping[str, tuple[Prompt, ...]],
        tokenizer: "PreTrainedTokenizerBase | None",
        rollout: RolloutSettings,
        reward: RewardSettings,
        seed: int,
        say: Callable[[str], None] = print,
    ) -> None:
        self._say = say
        self.settings, self._ask, self._prompts, self._seed, self._reward = settings, ask, prompts, seed, reward
        ends = [] if tokenizer is None else [tokenizer.eos_token_id]
        self._samplings = {name: eval_sampling(rollout.sampling, each.sampling, eos_token_ids=ends) for name, each in settings.sets.items()}
        template = "" if tokenizer is None else str(tokenizer.chat_template or "")
        self._facts = {
            "rollout": {"name": rollout.name, "args": rollout.args, "max_turns": rollout.max_turns, "renderer": rollout.renderer},
            "engine": None if tokenizer is None else f"sglang {version('sglang')}",
            "template_sha256": hashlib.sha256(template.encode()).hexdigest() if template else None,
            "seed": seed,
        }

    def num_answers(self, names: Sequence[str]) -> int:
        """Return the number of answers to all prompts of these sets."""
        return sum(len(self._prompts[name]) * self.settings.sets[name].samples for name in names)

    def num_prompts(self, names: Sequence[str]) -> int:
        """Return the number of prompts of these sets."""
        return sum(len(self._prompts[name]) for name in names)

    async def run(
        self,
        names: Sequence[str],
        *,
        directory: Path,
        facts: Mapping[str, Any],
        goes_on: bool = False,
        advance: Callable[[], None] = lambda: None,
    ) -> list[SetResult]:
        """Evaluate the sets `names`, and keep answers and results in `directory`.

        `facts` are those of the evaluated weights. With `goes_on` the answers of a killed evaluation
        with the same facts are not asked for again. `advance` is called for each finished prompt.
        """
        return await together(self._evaluate(name, directory, facts=facts, goes_on=goes_on, advance=advance) for name in names)

    async def _evaluate(
        self, name: str, directory: Path, *, facts: Mapping[str, Any], goes_on: bool, advance: Callable[[], None]
    ) -> SetResult:
        begin_s, samples = time.monotonic(), self.settings.sets[name].samples
        told = await asyncio.to_thread(self._facts_of, name)
        file = AnswerFile(directory / f"{name}.jsonl", facts={**told, **facts}, num_samples=samples, goes_on=goes_on)
        if file.changed:
            self._say(f"the answers in {file.path} are made anew, because they were of other {', '.join(file.changed)}")
        prompts, found = self._prompts[name], dict(file.kept)

        async def answer(prompt: Prompt) -> None:
            if prompt.id not in found:
                group = await self._ask(prompt, name=name, num_samples=samples, sampling=self._samplings[name])
                found[prompt.id] = answers_of(group, num_samples=samples)
                file.add(found[prompt.id])
            advance()

        await together(answer(prompt) for prompt in prompts)
        all_answers = [found[prompt.id] for prompt in prompts]
        estimated = await asyncio.to_thread(estimates, all_answers, num_samples=samples, seed=self._seed)
        made = [version for answers in all_answers for answer in answers for version in answer.weight_versions]
        failed = [(answer.cause, answer.message) for answers in all_answers for answer in answers if answer.cause is not None]
        failures, messages = Counter(cause for cause, _ in failed), Counter(message.partition("\n")[0] for _, message in failed)
        result = {
            "confidence": CONFIDENCE,
            "estimates": {key: asdict(estimate) for key, estimate in estimated.items()},
            "failures": failures,
            "weight_versions": [min(made), max(made)] if made else [],
            "seconds": round(time.monotonic() - begin_s, 3),
        }
        await asyncio.to_thread(file.finish, all_answers, result)
        return SetResult(name, estimated, failures, next((message for message, _ in messages.most_common(1)), ""), file.result)

    def _facts_of(self, name: str) -> dict[str, Any]:
        """Return what the answers of a set depend on, besides the weights."""
        own, prompts = self.settings.sets[name], self._prompts[name]
        digest, reward = hashlib.sha256(), own.reward or self._reward
        for prompt in prompts:
            seen = (prompt.text, prompt.token_ids.tolist(), prompt.label, list(prompt.messages), dict(prompt.metadata))
            digest.update(json.dumps(seen, sort_keys=True).encode())
        return {
            **self._facts,
            **{"set": name, "data": str(own.data), "prompts_sha256": digest.hexdigest(), "num_prompts": len(prompts)},
            "samples": own.samples,
            **{"sampling": asdict(self._samplings[name]), "reward": {"function": reward.function, "args": reward.args}},
        }


def weight_files(model: Path) -> str:
    """Return a digest of the names, sizes and times of the files of a model, which are not read."""
    found = sorted((path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in model.iterdir() if path.is_file())
    return hashlib.sha256(repr(found).encode()).hexdigest()
