"""The likeliest cause of a difference between engine and trainer, by experiments on the tokens that differ.

Each cause comes with its evidence, as the end of a sentence; None is one that the evidence speaks against.
PARITY.md lists the causes, and those that cannot be told apart. Legend: T tokens of the looked-at sequences.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from megatron_rl.algorithms.rounding_limits import DENSE, Limits
from megatron_rl.errors import counted
from megatron_rl.types import Bools, Floats, Ints, TrainBatch
from megatron_rl.weights.parity import NAMED_WEIGHTS, ParityReport, SampledProbe, scored

LogProbs = Callable[..., Floats]
"""`log_probs(batch, temperature=…)` of the trainer, [T]."""
LOOKED_AT = 32
"""Sequences of a training batch that are looked at."""
ALIKE = "a weight that was converted otherwise, a norm, an activation or a scale that the sides read differently, or faulty kernels"
"""Causes that differ from the first token on, with weights that another sync leaves as they are."""
MOST_AT_THE_START = 4
"""Tokens with so few before them speak for positions rather than for a window or a token."""
FAR_APART = 8.0
"""The places of one token differ by this factor more than the others where it decides the diagnosis."""


def likeliest(
    probe: SampledProbe,
    log_probs: LogProbs,
    *,
    limits: Limits,
    scoring: Limits,
    replays: bool,
    mixture: bool,
    weights: Callable[[Sequence[str]], str | None],
) -> str | None:
    """Return the likeliest cause for the engines that disagree in a fresh `probe`, None where every engine agrees.

    `limits` are those of sampled tokens, `scoring` those at temperature 1 without replay. `weights` compares the
    checksums of the engines at these URLs.
    """
    batch, engine_T, masks = (probe.recorded if replays else probe.batch), probe.engine_log_probs, probe.of_engines()
    trainer_T = log_probs(batch, temperature=probe.temperature)
    reports = {url: ParityReport.of(engine_T[mask], trainer_T[mask], outlier=limits.outlier) for url, mask in masks.items()}
    failed = [url for url, report in reports.items() if not report.within(limits)]
    if not failed:
        return None
    mask = np.logical_or.reduce([masks[url] for url in failed])

    def trainer_at(temperature: float) -> Floats:
        return log_probs(batch, temperature=temperature)[mask]

    cause = weights(failed) or other_support(engine_T[mask], trainer_T[mask], limits=limits)
    cause = cause or other_temperature(engine_T[mask], trainer_at, temperature=probe.temperature, limits=limits)
    if cause is None:
        of_failed = scored(batch) & np.repeat(np.isin(probe.engines, failed), batch.lengths)
        # Engines score over the whole vocabulary.
        plain_T = log_probs(replace(probe.batch, candidates=None), temperature=1.0)
        cause = other_model(probe.scores, plain_T, batch, mask_T=of_failed, limits=scoring, mixture=mixture)
    others = len(masks) - len(failed)
    alone = f" alone ({counted(others, 'other engine')} agreed)" if others else ""
    return f"likeliest cause on {', '.join(failed)}{alone}: {cause}"


def changed_samples(batch: TrainBatch, log_probs: LogProbs, *, version: int, temperature: float, limits: Limits) -> str:
    """Return the change of `batch` between engine and trainer, for engines that agree on fresh tokens."""
    of_version = np.add.reduceat(batch.loss_mask & (batch.weight_versions == version), batch.cu_seqlens[:-1])
    part = batch.select(np.flatnonzero(of_version)[:LOOKED_AT], may_cut=True)
    engine_T, mask = part.rollout_log_probs, part.loss_mask & (part.weight_versions == version)
    assert engine_T is not None, "engines return log-probs"
    trainer_T = log_probs(part, temperature=temperature)

    def agree(engine: Floats, trainer: Floats) -> bool:
        return ParityReport.of(engine, trainer, outlier=limits.outlier).within(limits)

    if (zeros := float(np.mean(engine_T[mask] == 0))) > limits.share + np.mean(np.abs(trainer_T[mask]) < limits.outlier):
        return f"log-probs that are missing, since {zeros:.0%} of them are 0"
    if agree(engine_T[mask], log_probs(_reversed(part), temperature=temperature)[mask]):
        return "tokens in reversed order, since the log-probs are those of the reversed responses"
    for shift in (1, -1):
        both = mask & np.roll(mask, shift)
        if agree(engine_T[both], np.roll(trainer_T, shift)[both]):
            return f"log-probs beside their tokens, since they agree with those of the token {'before' if shift > 0 else 'after'}"
    if mask.sum() > 1 and np.ptp(engine_T[mask]) == 0:
        return f"log-probs that were not measured, since all {mask.sum()} are {engine_T[mask][0]:.3g}"
    alike = correlation(engine_T[mask], trainer_T[mask])
    if alike > 0.9:
        return f"log-probs that were changed a little, since those of engine and trainer have a correlation of {alike:.3f}"
    return f"other tokens than those that were scored (shuffled, replaced), since log-probs have a correlation of {alike:.2f} alone"


def correlation(first_T: Floats, second_T: Floats) -> float:
    """Return Pearson's correlation of two arrays [T], 0 where one of them is constant."""
    if not (np.ptp(first_T) and np.ptp(second_T)):
        return 0.0
    return float(np.corrcoef(first_T, second_T)[0, 1])


def _reversed(batch: TrainBatch) -> TrainBatch:
    order = np.arange(len(batch.tokens))
    for end, length, prompt in zip(batch.cu_seqlens[1:], batch.lengths, batch.prompt_lengths, strict=True):
        begin = end - length + prompt
        order[begin:end] = order[begin:end][::-1]
    candidates = None if batch.candidates is None else batch.candidates.take(order)
    return replace(batch, tokens=batch.tokens[order], candidates=candidates)


def other_temperature(engine_T: Floats, trainer_at: Callable[[float], Floats], *, temperature: float, limits: Limits) -> str | None:
    """Fit the temperature at which log-probs [T] of the trainer come closest to those of the engine."""

    def difference(tried: float) -> float:
        return float(np.abs(trainer_at(tried) - engine_T).mean())

    before, found = difference(temperature), temperature
    for octaves in (2.0, 0.5, 0.125, 0.03, 0.008, 0.002):
        found = min((found * 2 ** np.linspace(-octaves, octaves, 9)).tolist(), key=difference)
    report = ParityReport.of(engine_T, trainer_at(found), outlier=limits.outlier)
    fits = report.mean < 0.1 * before or (report.within(limits) and report.mean < 0.5 * before)
    if not fits or abs(found / temperature - 1) < 0.02:
        return None
    return (
        f"a temperature on one side alone, since log-probs of the engines are those of temperature {found:.3g} (mean |Δ| {report.mean:.1e} "
        f"instead of {before:.1e} nats), and rollout.sampling.temperature is {temperature:g}"
    )


def other_support(engine_T: Floats, trainer_T: Floats, *, limits: Limits) -> str | None:
    """Look for log-probs [T] of one side that are normalised over a part of the vocabulary: never lower than the other side's."""
    for sign, side in ((1, "engine"), (-1, "trainer")):
        above = sign * (engine_T - trainer_T)
        if above.mean() > limits.median and above.min() >= -limits.outlier and above.clip(min=0).sum() > 20 * -above.clip(max=0).sum():
            kept = math.exp(-float(above.max()))
            return (
                f"a top_p, top_k or min_p on the {side} alone, since its log-probs are nowhere lower, and the tokens that it keeps have "
                f"{kept:.2f} or more of the other side's probability"
            )
    return None


def weights_apart(before: Mapping[str, str], after: Mapping[str, str], *, tied: bool) -> str | None:
    """Compare an engine's checksums before and after another sync of the same weights, and those of embedding and head."""
    if moved := [name for name in after if before.get(name) != after[name]]:
        named = ", ".join([*moved[:NAMED_WEIGHTS], *(["…"] if len(moved) > NAMED_WEIGHTS else [])])
        kind = "stale" if len(moved) == len(after) else "half-applied"
        return f"{kind} weights, since another sync of the same version changed {len(moved)} of {counted(len(after), 'weight')}: {named}"
    head, embedding = (next((after[name] for name in after if part in name), None) for part in ("lm_head.", "embed_tokens."))
    if embedding is None or (head in (None, embedding)) is tied:
        return None
    seen = "the engine has no head beside its embedding" if head is None else f"head and embedding of the engine are {'un' * tied}equal"
    return f"tied embeddings on one side alone, since {seen}"


def other_model(scores_T: Floats, trainer_T: Floats, batch: TrainBatch, *, mask_T: Bools, limits: Limits, mixture: bool) -> str:
    """Return where the scores [T] of the engine differ from the trainer's: by token, by position, or everywhere a little."""
    apart, position = np.abs(scores_T.astype(np.float64) - trainer_T), np.concatenate([np.arange(length) for length in batch.lengths])
    report = ParityReport.of(scores_T[mask_T], trainer_T[mask_T], outlier=limits.outlier)
    if report.within(limits):
        return (
            "sampling or decoding of the engine (a logit processor, the key-value cache, kernels of decoding), since it scores the same "
            f"tokens as the trainer does: {report}"
        )
    if mixture and report.median <= limits.median:
        return f"routing, since few tokens differ much: {report}; training.routing_replay takes the engine's experts"
    if (token := _one_token(apart, batch, position, mask_T=mask_T, limits=limits)) is not None:
        return token
    of_position = [apart[mask_T & (position == number)] for number in range(1, int(position.max()) + 1)]
    means = np.array([each.mean() if len(each) else 0.0 for each in of_position])
    onset = int(np.argmax(means > limits.median)) + 1
    if onset > 1 and (means[: onset - 1] <= limits.median).all():
        start = f"tokens with fewer than {onset} before them agree, and later ones differ by a mean of {means[onset - 1 :].mean():.1e} nats"
        if onset <= MOST_AT_THE_START:
            return f"positions or rope, since {start}: weights alone decide on the first, whose context is a single token"
        return f"an attention window or a scaled rope from about {onset} tokens on, since {start}"
    if limits.median < DENSE.median and ParityReport.of(scores_T[mask_T], trainer_T[mask_T], outlier=DENSE.outlier).within(DENSE):
        return f"another dtype on one side, since ranks have float32 and differences are those of bfloat16's rounding: {report}"
    return f"one of {ALIKE}, which cannot be told apart: the first tokens differ, too, and no weight was stale: {report}"


def _one_token(apart_T: Floats, batch: TrainBatch, position_T: Ints, *, mask_T: Bools, limits: Limits) -> str | None:
    """Name the token id at which, or after whose first place in a sequence, alone the sides differ by `apart_T` [T]."""
    row_T, found = np.repeat(np.arange(batch.num_sequences), batch.lengths), []
    for token in np.unique(batch.tokens):
        first = np.full(batch.num_sequences, len(batch.tokens))
        np.minimum.at(first, row_T[batch.tokens == token], position_T[batch.tokens == token])
        for where, places_T in (("at", batch.tokens == token), ("after", position_T > first[row_T])):
            inside, outside = apart_T[mask_T & places_T], apart_T[mask_T & ~places_T & (position_T > MOST_AT_THE_START)]
            # The first tokens of a sequence speak for positions as well.
            if len(inside) >= 3 and len(outside) >= len(apart_T) / 10:
                means = float(np.median(inside)), float(outside.mean())
                found.append((means[0] / max(means[1], limits.median / 2), int(token), where, *means))
    ratio, token, where, typical, others = max(found, default=(0.0, 0, "", 0.0, 0.0))
    if ratio < FAR_APART:
        return None
    return (
        f"the token {token} (a special token, or its row of embedding or head), since tokens {where} it differ by a median of "
        f"{typical:.1e} nats and others by a mean of {others:.1e}"
    )
