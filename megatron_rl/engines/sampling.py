"""Sampling of a request's tokens: the trainer takes the same temperature and the same candidates."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_rl.algorithms.entropy_aware import EntropyAware
from megatron_rl.config.derived import leaves_tokens_out
from megatron_rl.config.eval_sets import EvalSampling
from megatron_rl.config.settings import SamplingSettings
from megatron_rl.engines.entropy_processor import PARAMETER
from megatron_rl.errors import UserError

LOWEST_TEMPERATURE = 1e-6  # SGLang takes the likeliest token below this, and reports log-probs at temperature 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Sampling of one request: `temperature` 0 takes the likeliest token.

    Candidates for a token are the `top_k` likeliest (None: all), of these the likeliest up to a
    probability of `top_p` together, and of these those with `min_p` times the probability of the
    likeliest or more. `records_candidates` asks for them with each token, and for log-probs over
    them alone. `entropy` instead shapes the distribution of each token, log-probs included. `stop`
    strings and `stop_token_ids` end a response and are kept. `seed` is the first sample's, and others
    count on from it, for a deterministic engine.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    records_candidates: bool = False
    entropy: EntropyAware | None = None
    max_tokens: int
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise UserError(f"sampling temperature is {self.temperature}, needs a finite number >= 0")
        if 0 < self.temperature < LOWEST_TEMPERATURE:
            raise UserError(
                f"sampling temperature is {self.temperature}, which the engine takes for greedy and reports no log-probs of; needs 0, or "
                f"at least {LOWEST_TEMPERATURE}"
            )
        if self.max_tokens < 1:
            raise UserError(f"sampling max_tokens is {self.max_tokens}, needs at least 1")
        if not 0 < self.top_p <= 1:
            raise UserError(f"sampling top_p is {self.top_p}, needs a probability above 0 and at most 1")
        if not 0 <= self.min_p < 1:
            raise UserError(f"sampling min_p is {self.min_p}, needs a share of at least 0 and below 1")
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"sampling top_k is {self.top_k}, needs a number of tokens of at least 1, or None for all")
        if self.records_candidates and self.top_k is None:
            raise UserError("sampling records candidates without top_k, which the engine needs for that; set rollout.sampling.top_k")
        if self.entropy is not None and (self.temperature == 0 or self.top_p < 1 or self.top_k is not None or self.min_p > 0):
            raise UserError(
                f"sampling has entropy with temperature {self.temperature}, top_p {self.top_p}, top_k {self.top_k} and min_p {self.min_p}, "
                "needs a temperature above 0 and none of the others, which log-probs would not show; give its quadrants a top_k or top_p"
            )

    def of_sample(self, index: int) -> "Sampling":
        """Return the sampling of a request for sample `index` alone."""
        return self if self.seed is None else replace(self, seed=self.seed + index)

    def request(self, index: int = 0) -> dict[str, Any]:
        """Return all parameters of sample `index`: none may come from a generation_config.json."""
        return {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": -1 if self.top_k is None else self.top_k,
            "min_p": self.min_p,
            "frequency_penalty": self.frequency_penalty,
            "presence_penalty": self.presence_penalty,
            "repetition_penalty": self.repetition_penalty,
            "logit_bias": {str(token): bias for token, bias in (self.logit_bias or {}).items()} or None,
            "max_new_tokens": self.max_tokens,
            "stop": list(self.stop) or None,
            "stop_token_ids": list(self.stop_token_ids) or None,
            "skip_special_tokens": False,
            "no_stop_trim": True,
            "sampling_seed": self.of_sample(index).seed,
            **({} if self.entropy is None else {"custom_params": {PARAMETER: self.entropy.numbers(temperature=self.temperature)}}),
        }


def make_sampling(settings: SamplingSettings, *, eos_token_ids: Sequence[int], greedy: bool = False) -> Sampling:
    """Return the sampling of the settings; `eos_token_ids` always end a response.

    Without `greedy` the candidates of each token are recorded where the settings leave tokens out.
    """
    drawn: dict[str, Any] = {name: getattr(settings, name) for name in ("top_p", "top_k", "min_p", "entropy")}
    return Sampling(
        temperature=0.0 if greedy else settings.temperature,
        **({} if greedy else {**drawn, "records_candidates": leaves_tokens_out(settings)}),
        max_tokens=settings.max_response_tokens,
        stop=settings.stop,
        stop_token_ids=tuple(dict.fromkeys((*settings.stop_token_ids, *eos_token_ids))),
    )


def eval_sampling(settings: SamplingSettings, own: EvalSampling, *, eos_token_ids: Sequence[int]) -> Sampling:
    """Return the sampling of an evaluation: `own` values, and those of the `settings` where not set."""
    values = {**settings.model_dump(exclude={"entropy"}), **own.model_dump(exclude_none=True)}
    ends = tuple(dict.fromkeys((*values.pop("stop_token_ids"), *eos_token_ids)))
    return Sampling(max_tokens=values.pop("max_response_tokens"), stop_token_ids=ends, top_k=values.pop("top_k") or None, **values)
