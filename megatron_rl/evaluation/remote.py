"""Evaluation of a model behind an OpenAI-compatible server, by the same sets, rewards and estimates."""

import asyncio
import os
from collections.abc import Mapping
from contextlib import AsyncExitStack, ExitStack
from dataclasses import replace
from typing import Any

import aiohttp
import numpy as np

from megatron_rl.config.data_settings import DataFiles, DataSettings
from megatron_rl.config.derived import request_deadline_s, reward_workers
from megatron_rl.config.settings import Settings
from megatron_rl.data.row_files import Row
from megatron_rl.data.row_table import read_rows
from megatron_rl.data.source import messages_of
from megatron_rl.engines.sampling import Sampling
from megatron_rl.errors import TrajectoryError, UserError
from megatron_rl.evaluation.evaluator import Evaluator, SetResult
from megatron_rl.rewards.gold import check_held_out
from megatron_rl.rewards.runner import RewardRunner, scores_of_sets
from megatron_rl.rewards.servers import post_json
from megatron_rl.rollout.generator import together
from megatron_rl.rollout.groups import ATTEMPTS, Score
from megatron_rl.types import Failure, Group, Prompt, Sample, StopReason

_OPENAI = ("temperature", "top_p", "frequency_penalty", "presence_penalty", "max_tokens")
_EXTENSIONS: dict[str, Any] = {"top_k": None, "min_p": 0.0, "repetition_penalty": 1.0, "logit_bias": None}
"""Fields that servers may lack, sent where they differ from these values."""
_KEEPS_STOP = ("no_stop_trim", "include_stop_str_in_output")
"""Fields of SGLang and vLLM that leave the stop string in an answer."""
_TEMPLATE = "chat_template_kwargs"
"""Of a row and of data: sent with messages, as SGLang and vLLM take it."""
_IS_CHAT = "remote_is_chat"
"""In the metadata of a prompt: its row has messages, which the server renders."""


class RemoteModel:
    """The model called `name` of the server at `url`, asked for `most_requests` answers at once."""

    def __init__(
        self, session: aiohttp.ClientSession, url: str, name: str, *, score: Score, scores: Mapping[str, Score], most_requests: int
    ) -> None:
        self._session, self._url, self._name, self._score, self._scores = session, url.rstrip("/"), name, score, scores
        self._slots = asyncio.Semaphore(most_requests)

    async def answer(self, prompt: Prompt, *, name: str, num_samples: int, sampling: Sampling) -> Group:
        """Return `num_samples` answers with rewards; a request that fails ATTEMPTS times is a failure of the group."""
        score = self._scores.get(name, self._score)
        made = await together(self._sample(prompt, index, sampling) for index in range(num_samples))
        samples = [each for each in made if isinstance(each, Sample)]
        rewards = await asyncio.gather(*map(score, samples))
        scored = enumerate(zip(samples, rewards, strict=True))
        numbered = tuple(replace(each, index=index, reward=reward) for index, (each, reward) in scored)
        return Group(prompt.id, prompt, numbered, tuple(each for each in made if isinstance(each, Failure)))

    async def _sample(self, prompt: Prompt, index: int, sampling: Sampling) -> Sample | Failure:
        is_chat = prompt.metadata[_IS_CHAT]
        extended = {name: getattr(sampling, name) for name, usual in _EXTENSIONS.items() if getattr(sampling, name) != usual}
        fields = {"model": self._name, **{name: getattr(sampling, name) for name in _OPENAI}, **extended, "seed": index}
        fields |= {"messages": list(prompt.messages)} if is_chat else {"prompt": prompt.text}
        fields |= {_TEMPLATE: kwargs} if is_chat and (kwargs := prompt.metadata[_TEMPLATE]) else {}
        # Rewards see the string that ended an answer, as those of engines do.
        fields |= {"stop": list(sampling.stop), **dict.fromkeys(_KEEPS_STOP, True)} if sampling.stop else {}
        fields |= {"stop_token_ids": list(sampling.stop_token_ids)} if sampling.stop_token_ids else {}
        try:
            path = "chat/completions" if is_chat else "completions"
            options: dict[str, Any] = {"attempts": ATTEMPTS, "deadline": "model.deadline_s", "slot": self._slots}
            return _read(await post_json(self._session, f"{self._url}/{path}", fields, **options), prompt)
        except TrajectoryError as error:
            return Failure(error.cause, str(error))


def _read(answer: Any, prompt: Prompt) -> Sample:
    """Return the sample of an answer, whose tokens are counted and not known. Raises TrajectoryError."""
    try:
        choice = answer["choices"][0]
        text = choice["message"]["content"] if "message" in choice else choice["text"]
        num_tokens, reason = int((answer.get("usage") or {}).get("completion_tokens") or 0), choice.get("finish_reason")
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise TrajectoryError("contract", f"the server's answer is no completion ({type(error).__name__}: {error})") from error
    sample = Sample.written(prompt, [0] * num_tokens, text=text or "")
    return replace(sample, stop_reason=StopReason.LENGTH if reason == "length" else StopReason.STOP)


async def evaluate_url(settings: Settings, *, url: str) -> list[SetResult]:
    """Evaluate model.path, a name, of the server at `url` on eval.sets; keep answers and results in run.directory."""
    if not settings.rollout.is_single_turn:
        raise UserError(f"--url was given with {settings.rollout.name}, but a server is asked once for each answer; remove it")
    sets, rollout, log_path = settings.eval.sets, settings.rollout, settings.run.directory / "logs" / "rewards.log"
    rows = {name: read_rows(DataFiles(path=each.data), settings=settings.data) for name, each in sets.items()}
    prompts = {
        name: tuple(_prompt(f"{name}-{number}", row, settings.data) for number, row in enumerate(found)) for name, found in rows.items()
    }
    deadline_s = request_deadline_s(settings.model, settings.eval.longest_sampling(rollout.sampling))
    api_key = os.environ.get("OPENAI_API_KEY")
    async with AsyncExitStack() as stack:
        options: dict[str, Any] = {"num_workers": reward_workers(), "log_path": log_path}
        rewards = stack.enter_context(RewardRunner(settings.reward, **options))
        rewards.probe(next(iter(prompts.values()))[0])
        workers = stack.enter_context(ExitStack())
        scores = scores_of_sets(sets, settings.reward, prompts=prompts, stack=workers, **options)
        for key, one in sets.items():
            named = (replace(prompt, id=row.origin) for prompt, row in zip(prompts[key], rows[key], strict=True) if row.label is not None)
            await check_held_out(key, named, one.reward_of(settings.reward), score=scores.get(key, rewards.score))
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        timeout = aiohttp.ClientTimeout(total=deadline_s)
        session = await stack.enter_async_context(
            aiohttp.ClientSession(timeout=timeout, headers=headers, connector=aiohttp.TCPConnector(limit=0))
        )
        name, most = str(settings.model.path), rollout.max_concurrent_requests or 256
        remote = RemoteModel(session, url, name, score=rewards.score, scores=scores, most_requests=most)
        reading: dict[str, Any] = {"prompts": prompts, "tokenizer": None, "rollout": rollout, "reward": settings.reward}
        evaluator = Evaluator(settings.eval, remote.answer, **reading, seed=settings.run.seed)
        return await evaluator.run(tuple(sets), directory=settings.run.directory, facts={"model": name, "url": url}, goes_on=True)


def _prompt(name: str, row: Row, data: DataSettings) -> Prompt:
    """Return a prompt whose tokens only the server knows. Raises UserError for one of tokens."""
    if row.token_ids:
        raise UserError(f"{row.origin}: the prompt is a list of token ids, needs text or messages with --url; write it as text")
    if row.metadata.get("tools"):
        raise UserError(f"{row.origin}: has 'tools', which --url does not send; evaluate the model's directory, or rename the field")
    messages = messages_of(row, system_prompt=data.system_prompt)
    text = row.prompt if isinstance(row.prompt, str) else "\n".join(str(message.get("content", "")) for message in messages)
    own = row.metadata.get(_TEMPLATE) or {}
    metadata = {**row.metadata, _TEMPLATE: {**data.chat_template_kwargs, **own}, _IS_CHAT: bool(messages)}
    return Prompt(id=name, token_ids=np.zeros(1, np.int64), text=text, label=row.label, metadata=metadata, messages=messages)
