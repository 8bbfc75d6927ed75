"""Each cause, made on purpose in a real tiny model, and the diagnosis: log-probs are recomputed, none is invented."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_rl.algorithms.rounding_limits import DENSE, FLOAT32, Limits
from megatron_rl.data.batch import batch_from_sequences
from megatron_rl.errors import ParityError
from megatron_rl.system.frozen_arrays import Candidates
from megatron_rl.types import Floats, TrainBatch
from megatron_rl.weights.diagnosis import changed_samples, correlation, likeliest, weights_apart
from megatron_rl.weights.parity import SampledProbe, check_probe


class Model:
    """A model of transformers as one side: it samples and scores; `kept` is a top-p after which log-probs are normalised anew."""

    def __init__(self, path: Path, *, dtype: torch.dtype = torch.float32, factor: float = 1.0, kept: float = 1.0) -> None:
        self._model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
        self._factor, self._kept = factor, kept

    @torch.no_grad()
    def log_probs(self, batch: TrainBatch, *, temperature: float) -> Floats:
        rows = [torch.tensor(ids) for ids in np.split(batch.tokens, batch.cu_seqlens[1:-1])]
        logits = self._model(torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)).logits.float() / (temperature * self._factor)
        log_probs = self._kept_part(logits.log_softmax(-1))
        found = [of_row[: len(ids) - 1].gather(1, ids[1:, None])[:, 0] for of_row, ids in zip(log_probs, rows, strict=True)]
        return np.concatenate([[0.0, *values.clamp(min=-30).tolist()] for values in found]).astype(np.float32)

    def _kept_part(self, log_probs: Tensor) -> Tensor:
        if self._kept == 1.0:
            return log_probs
        ordered, order = log_probs.exp().sort(-1, descending=True)
        kept = ordered.cumsum(-1) - ordered < self._kept
        return torch.where(kept.gather(-1, order.argsort(-1)), log_probs, -torch.inf).log_softmax(-1)

    @torch.no_grad()
    def continued(self, prompts: Sequence[Sequence[int]], *, length: int, temperature: float, cut: float = 1.0) -> list[list[int]]:
        """`length` tokens, each one of the likeliest that have the probability `cut` or `kept` together."""
        random, rows = torch.Generator().manual_seed(0), [torch.tensor(prompt) for prompt in prompts]
        shown, self._kept = self._kept, min(self._kept, cut)
        for _ in range(length):
            logits = self._model(torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)).logits.float() / (temperature * self._factor)
            last = torch.stack([of_row[len(ids) - 1] for of_row, ids in zip(logits, rows, strict=True)])
            drawn = torch.multinomial(self._kept_part(last.log_softmax(-1)).exp(), 1, generator=random)
            rows = [torch.cat([ids, one]) for ids, one in zip(rows, drawn, strict=True)]
        self._kept = shown
        return [ids.tolist()[len(prompt) :] for ids, prompt in zip(rows, prompts, strict=True)]


PROMPTS = [[2 + number, 3 + number * number % 20, *range(4, 4 + number)] for number in range(8)]


def probe_of(
    *engines: Model, temperature: float = 0.8, cut: float = 1.0, scorers: Sequence[Model] = (), prompts: Any = PROMPTS
) -> SampledProbe:
    starts, responses, made = [], [], []
    for number, engine in enumerate(engines):
        starts += prompts
        responses += engine.continued(prompts, length=20, temperature=temperature, cut=cut)
        made += [f"engine-{number}"] * len(prompts)
    batch = batch_from_sequences(prompts=starts, responses=responses)
    of_engine = [batch.select(np.flatnonzero(np.array(made) == name)) for name in dict.fromkeys(made)]
    sampled = [engine.log_probs(part, temperature=temperature) for engine, part in zip(engines, of_engine, strict=True)]
    scores = [engine.log_probs(part, temperature=1.0) for engine, part in zip(scorers or engines, of_engine, strict=True)]
    log_probs = np.where(batch.loss_mask, np.concatenate(sampled), 0.0)
    batch = dataclasses.replace(batch, rollout_log_probs=log_probs, weight_versions=np.where(batch.loss_mask, 0, -1))
    return SampledProbe(batch, batch, made, temperature, np.concatenate(scores))


def diagnosed(probe: SampledProbe, trainer: Model, *, weights: str | None = None, mixture: bool = False, limits: Limits = FLOAT32) -> str:
    options: dict[str, Any] = {"replays": False, "mixture": mixture, "weights": lambda urls: weights}
    return likeliest(probe, trainer.log_probs, limits=limits, scoring=limits, **options) or "agree"


@pytest.fixture
def edited(tiny_model: Callable[..., Path]) -> Callable[..., Model]:
    """`edited(change, factor=2.0)` is a model whose tensors went through `change`; other keywords are of config.json."""
    count = iter(range(100))

    def make(change: Callable[[dict[str, Tensor]], None] | None = None, *, side: dict[str, Any] | None = None, **config: Any) -> Model:
        path = tiny_model(name=f"model{next(count)}", tied=False, **config)
        if change is not None:
            tensors = load_file(path / "model.safetensors")
            change(tensors)
            save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        return Model(path, **(side or {}))

    return make


def other_layer(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.1.mlp.down_proj.weight"] *= -1.0


def other_row(name: str) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[name][7] *= -1.0

    return change


@pytest.mark.parametrize("limits", [FLOAT32, DENSE], ids=["float32", "bfloat16"])
def test_each_cause_is_diagnosed(edited: Callable[..., Model], limits: Limits) -> None:
    right, other = edited(), edited(other_layer)
    causes: dict[str, tuple[Model, str]] = {
        "temperature": (edited(side={"factor": 1.25}), "those of temperature 1 (mean"),
        "top_p": (edited(side={"kept": 0.8}), "a top_p, top_k or min_p on the engine alone, since its log-probs are nowhere lower"),
        "rope": (edited(rope_theta=10.0), "positions or rope, since tokens with fewer than 2 before them agree"),
        "window": (edited(use_sliding_window=True, sliding_window=8, max_window_layers=0), "an attention window or a scaled rope from"),
        "row of the embedding": (edited(other_row("model.embed_tokens.weight")), "the token 7 "),
        "layer": (other, "a weight that was converted otherwise"),
    }
    if limits is FLOAT32:
        causes["dtype"] = edited(side={"dtype": torch.bfloat16}), "another dtype on one side, since ranks have float32"
        # A token in 25 is fewer than the outliers that bfloat16 may have.
        causes["row of the head"] = edited(other_row("lm_head.weight")), "the token 7 "
    found = {name: diagnosed(probe_of(engine), right, limits=limits) for name, (engine, _) in causes.items()}
    assert {name: text for name, text in found.items() if causes[name][1] not in text} == {}
    assert diagnosed(probe_of(right), right, limits=limits) == "agree"
    one_of_two = diagnosed(probe_of(right, other), right, limits=limits)
    assert one_of_two.startswith("likeliest cause on engine-1 alone (1 other engine agreed): one of a weight")
    # The engine's own prompt phase agrees with the trainer.
    assert "sampling or decoding of the engine" in diagnosed(probe_of(other, scorers=[right]), right, limits=limits)
    assert diagnosed(probe_of(other), right, weights="stale").endswith(": stale")


def test_a_router_with_other_rows_is_a_matter_of_routing(edited: Callable[..., Model]) -> None:
    """Behind the last layer's router few tokens go to other experts, and no later one sees it."""
    mixture = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 16, "num_experts_per_tok": 1}

    def exchanged(tensors: dict[str, Tensor]) -> None:
        gate = tensors["model.layers.1.mlp.gate.weight"]
        gate[[2, 3]] = gate[[3, 2]]

    engine, trainer = (edited(change, **mixture, moe_intermediate_size=16, norm_topk_prob=False) for change in (exchanged, None))
    found = diagnosed(probe_of(engine), trainer, mixture=True)
    assert "routing, since few tokens differ much" in found and "training.routing_replay takes the engine's experts" in found, found
    assert "routing" not in diagnosed(probe_of(engine), trainer)


@pytest.mark.parametrize("cut", [0.8, 1.0])
def test_tokens_drawn_by_a_top_p_that_log_probs_hide(edited: Callable[..., Model], cut: float) -> None:
    """SGLang's log-probs are those of the whole vocabulary, whatever the top_p of the request."""
    model = edited()
    probe = probe_of(model, cut=cut, prompts=PROMPTS * 4)
    if cut == 1.0:
        check_probe(probe, model.log_probs, limits=FLOAT32, replays=False)
        return
    with pytest.raises(ParityError, match=r"engine-0 drew likelier tokens than .* standard errors above 0, needs at most 5.* top_p"):
        check_probe(probe, model.log_probs, limits=FLOAT32, replays=False)


CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "tokens reversed": (lambda ids, values: (ids[::-1], values), "tokens in reversed order"),
    "tokens shuffled": (
        lambda ids, values: (np.random.default_rng(0).permutation(ids), values),
        "other tokens than those that were scored",
    ),
    "log-probs 0": (lambda ids, values: (ids, values * (ids[0] % 2)), "log-probs that are missing"),
    "log-probs one early": (lambda ids, values: (ids, np.append(values[1:], -1.0)), "those of the token after"),
    "log-probs one late": (lambda ids, values: (ids, np.append(-1.0, values[:-1])), "those of the token before"),
    "log-probs alike": (lambda ids, values: (ids, np.full_like(values, -1.5)), "log-probs that were not measured, since all 150 are -1.5"),
    "noise": (lambda ids, values: (ids, values + np.random.default_rng(0).normal(0, 0.02, len(ids))), "changed a little"),
}


def test_the_change_of_samples_is_named(edited: Callable[..., Model]) -> None:
    model = edited()
    batch = probe_of(model).batch
    rows = list(zip(batch.cu_seqlens[:-1], batch.prompt_lengths, batch.cu_seqlens[1:], strict=True))
    found = {}
    for name, (change, _) in CHANGES.items():
        tokens, log_probs = batch.tokens.copy(), np.array(batch.rollout_log_probs)
        for begin, prompt, end in rows:
            of_row = slice(begin + prompt, end)
            tokens[of_row], log_probs[of_row] = change(tokens[of_row], log_probs[of_row])
        # Those of older weights say nothing.
        versions = np.where(np.arange(len(tokens)) >= len(tokens) - 10, -2, batch.weight_versions)
        changed = dataclasses.replace(
            batch, tokens=tokens, rollout_log_probs=np.where(versions == -2, -9.0, log_probs), weight_versions=versions
        )
        found[name] = changed_samples(changed, model.log_probs, version=0, temperature=0.8, limits=FLOAT32)
    assert {name: text for name, text in found.items() if CHANGES[name][1] not in text} == {}


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_a_correlation_is_that_of_a_loop() -> None:
    first, second = np.array([-0.5, -3.0, -0.25, -7.0], np.float32), np.array([-0.75, -2.0, -0.5, -1.0], np.float32)
    means = [math.fsum(map(float, row)) / 4 for row in (first, second)]
    moments = [0.0, 0.0, 0.0]
    for one, other in zip(first.tolist(), second.tolist(), strict=True):
        apart = one - means[0], other - means[1]
        moments = [moments[0] + apart[0] * apart[1], moments[1] + apart[0] ** 2, moments[2] + apart[1] ** 2]
    assert correlation(first, second) == pytest.approx(moments[0] / math.sqrt(moments[1] * moments[2]), abs=1e-12)
    for constant in (np.full(4, -0.1, np.float32), np.zeros(4, np.float32)):
        assert correlation(first, constant) == correlation(constant, first) == 0
    assert correlation(first[:1], second[:1]) == 0


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_candidates_go_with_reversed_tokens_and_not_with_scores() -> None:
    own = [Candidates(np.array([4, 9, 5, 6, 9]), np.array([2, 1, 2])), Candidates(np.array([7, 8, 9]), np.array([1, 2]))]
    batch = batch_from_sequences(
        prompts=[[1, 2], [3]], responses=[[4, 5, 6], [7, 8]], rollout_log_probs=[[-1.0] * 3, [-1.0] * 2], candidates=own
    )
    batch = dataclasses.replace(batch, weight_versions=np.where(batch.loss_mask, 4, -1))
    asked = list[tuple[TrainBatch, float]]()

    def log_probs(batch: TrainBatch, *, temperature: float) -> Floats:
        asked.append((batch, temperature))
        # Above and below those of the engine in turn, at any temperature.
        return np.where(np.arange(len(batch.tokens)) % 2, -0.5, -1.5).astype(np.float32)

    assert "not measured, since all 5 are -1" in changed_samples(batch, log_probs, version=4, temperature=0.8, limits=FLOAT32)
    (turned,) = [each for each, _ in asked if each.tokens.tolist() == [1, 2, 6, 5, 4, 3, 8, 7]]
    assert turned.candidates is not None
    assert (turned.candidates.ids.tolist(), turned.candidates.counts.tolist()) == ([6, 9, 5, 4, 9, 8, 9, 7], [0, 0, 2, 1, 2, 0, 2, 1])
    asked.clear()
    probe = SampledProbe(batch, batch, ["a", "a"], 0.8, np.zeros(len(batch.tokens), np.float32))
    options: dict[str, Any] = {"replays": False, "mixture": False, "weights": lambda urls: None}
    assert likeliest(probe, log_probs, limits=FLOAT32, scoring=FLOAT32, **options) is not None
    assert [temperature for each, temperature in asked if each.candidates is None] == [1.0], "scores are over the whole vocabulary"


def test_checksums_tell_stale_weights_and_tied_embeddings() -> None:
    embedding, head = "model.embed_tokens.weight (tp rank 0)", "lm_head.weight (tp rank 0)"
    sound = {embedding: "a", head: "b", "layer": "c"}
    assert weights_apart(sound, sound, tied=False) is None
    assert weights_apart({**sound, "layer": "old"}, sound, tied=False) == (
        "half-applied weights, since another sync of the same version changed 1 of 3 weights: layer"
    )
    assert "stale weights" in (weights_apart(dict.fromkeys(sound, "old"), sound, tied=False) or "")
    assert "embedding of the engine are unequal" in (weights_apart(sound, sound, tied=True) or "")
    equal = {**sound, head: "a"}
    assert "embedding of the engine are equal" in (weights_apart(equal, equal, tied=False) or "")
    assert weights_apart(equal, equal, tied=True) is None and weights_apart({embedding: "a"}, {embedding: "a"}, tied=True) is None
    assert "has no head beside its embedding" in (weights_apart({embedding: "a"}, {embedding: "a"}, tied=False) or "")
    assert weights_apart({"layer": "c"}, {"layer": "c"}, tied=False) is None, "an engine of another pipeline stage"
