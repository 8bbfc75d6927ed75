"""One answer of an evaluation, kept as a line of JSON, and the file of a set's answers."""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from megatron_rl.errors import UserError
from megatron_rl.system.files import disk_errors, write_atomic
from megatron_rl.types import Group, Reward, Sample, trajectories


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One trajectory from a held-out prompt, with the reward, or the cause of its failure.

    `prompt_id` is SET-ROW, rows counted from 0. `cause` is None where the answer has a reward, else
    reward_error, reward_timeout, or rollout_ with the cause of a `types.Failure`. `correct` is the
    component accuracy, or without one the reward, where that is 0 or 1. `answer` is the extracted
    one, empty where there is none, None of a reward function that extracts none. `num_tokens`
    counts generated tokens, `weight_versions` are the first and the last, empty for another server.
    """

    prompt_id: str
    index: int
    prompt: str
    label: str | None
    text: str = ""
    cause: str | None = None
    message: str = ""
    reward: float | None = None
    correct: bool | None = None
    answer: str | None = None
    components: Mapping[str, float] = field(default_factory=dict)
    num_tokens: int = 0
    stop_reason: str | None = None
    weight_versions: Sequence[int] = ()

    def __post_init__(self) -> None:
        # JSON has lists alone.
        object.__setattr__(self, "weight_versions", tuple(self.weight_versions))

    @property
    def is_made(self) -> bool:
        """Return True where there is a text, scored or not."""
        return self.stop_reason is not None


def answers_of(group: Group, *, num_samples: int) -> list[Answer]:
    """Return all trajectories of a group asked for `num_samples`, failed ones too."""
    asked: dict[str, Any] = {"prompt_id": group.id, "prompt": group.prompt.text, "label": group.prompt.label}
    made = [Answer(index=index, **asked, **_facts(parts)) for index, parts in enumerate(trajectories(group.samples))]
    failed = [
        Answer(index=index, **asked, cause=f"rollout_{failure.cause}", message=f"{failure.headline}\n{failure.trace}".strip())
        for index, failure in enumerate(group.failures, start=len(made))
    ]
    lost = range(len(made) + len(failed), num_samples)
    return [*made, *failed, *(Answer(index=index, **asked, cause="rollout_error", message="the rollout made too few") for index in lost)]


def _facts(parts: Sequence[Sample]) -> dict[str, Any]:
    """Return the fields of an answer that the samples of one trajectory decide."""
    last = parts[-1]
    versions = [int(version) for part in parts for version in part.weight_versions if version >= 0]
    truncated = next((part for part in parts if part.truncated), last)
    return {
        "text": last.response_text,
        "num_tokens": len(versions) or sum(len(part.response_ids) for part in parts),
        "stop_reason": truncated.stop_reason.value,
        "weight_versions": (min(versions), max(versions)) if versions else (),
        **_scored(last.reward),
    }


def _scored(reward: Reward | None) -> dict[str, Any]:
    if reward is None or reward.value is None:
        outcome, message = ("error", "it has no reward") if reward is None else (reward.outcome.value, reward.message)
        return {"cause": f"reward_{outcome}", "message": message}
    verdict = reward.components.get("accuracy", reward.value)
    return {
        "reward": reward.value,
        "correct": bool(verdict) if verdict in (0.0, 1.0) else None,
        "answer": reward.answer,
        "components": dict(reward.components),
    }


class AnswerFile:
    """The answers of one set in `path`, a line each; those of a prompt are written at once, and put in order at the end.

    With `facts` in the file beside it equal to those of the answers that are there, an evaluation
    that was killed goes on: `kept` has the answers to each prompt that has all `num_samples`.
    Otherwise it begins anew; `changed` names the facts that make answers there those of another one.
    """

    def __init__(self, path: Path, *, facts: Mapping[str, Any], num_samples: int, goes_on: bool) -> None:
        self.path, self.result = path, path.with_suffix(".json")
        self._facts = json.loads(json.dumps(facts))
        with disk_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        then: Any = _facts_in(self.result) if goes_on and path.exists() and path.stat().st_size else None
        kept = _whole(path, num_samples) if then == self._facts else {}
        names = {*then, *self._facts} if isinstance(then, dict) else ()
        self.changed = sorted(name for name in names if then.get(name) != self._facts.get(name))
        self.kept: dict[str, list[Answer]] = kept
        # First the answers: a kill in between must not leave others beside these facts.
        write_atomic(path, "".join(map(_line, (answer for answers in kept.values() for answer in answers))))
        write_atomic(self.result, json.dumps({"facts": self._facts}, indent=2) + "\n")

    def add(self, answers: Iterable[Answer]) -> None:
        """Append all answers to one prompt."""
        with disk_errors(self.path), self.path.open("a", encoding="utf-8") as file:
            file.write("".join(map(_line, answers)))

    def finish(self, answers: Iterable[Iterable[Answer]], values: Mapping[str, Any]) -> None:
        """Put all `answers` in this order, and write the result: the facts and these values."""
        write_atomic(self.path, "".join(map(_line, chain.from_iterable(answers))))
        write_atomic(self.result, json.dumps({"facts": self._facts, **values}, indent=2, ensure_ascii=False) + "\n")


def read_answers(path: Path) -> list[Answer]:
    """Return the answers in a file. Raises UserError for a line that is no answer."""
    answers = []
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            try:
                answers.append(Answer(**json.loads(line)))
            except (ValueError, TypeError) as error:
                raise UserError(f"{path}:{number}: not an answer of an evaluation ({error}); remove that line") from error
    return answers


def by_prompt(answers: Iterable[Answer]) -> dict[str, list[Answer]]:
    """Return the answers of each prompt by its id: two rows of one text are two prompts."""
    found: dict[str, list[Answer]] = {}
    for answer in answers:
        found.setdefault(answer.prompt_id, []).append(answer)
    return found


def _whole(path: Path, num_samples: int) -> dict[str, list[Answer]]:
    """Return the answers to prompts that have all of theirs scored, without the torn last line of a kill."""
    if not path.exists():
        return {}
    content = path.read_bytes()
    if not content.endswith(b"\n"):
        os.truncate(path, content.rfind(b"\n") + 1)
    found = by_prompt(read_answers(path)).items()
    return {name: kept for name, kept in found if len(kept) == num_samples and all(each.cause is None for each in kept)}


def _facts_in(result: Path) -> Any:
    try:
        return json.loads(result.read_text("utf-8")).get("facts")
    except (OSError, ValueError, AttributeError):
        return None


def _line(answer: Answer) -> str:
    return json.dumps(asdict(answer), ensure_ascii=False) + "\n"
