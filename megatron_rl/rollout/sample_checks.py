"""Check the samples of one prompt's rollout. An error names the field, what it got and needs."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from megatron_rl.errors import UserError, counted
from megatron_rl.types import Group, Prompt, Sample, trajectories

MAX_LOG_PROB = 1e-3  # nats above 0 that rounding explains: a softmax in bfloat16 need not sum to 1


def check_samples(
    samples: object,
    *,
    prompt: Prompt,
    num_samples: int,
    vocab_size: int,
    max_tokens: int,
    need_experts: bool = False,
    need_candidates: bool = False,
) -> tuple[Sample, ...]:
    """Return the samples of a rollout. Raises UserError for the first breach of the contract.

    Needed are `num_samples` trajectories, of each role where there are roles; `max_tokens` bounds
    prompt and response of each sample.
    """
    if not isinstance(samples, Sequence):
        raise UserError(f"it returned {samples!r:.60} of type {type(samples).__name__}, needs a list of Sample")
    strays = [item for item in samples if not isinstance(item, Sample)]
    if strays:
        raise UserError(f"it returned a list with {strays[0]!r:.60} of type {type(strays[0]).__name__}, needs Sample")
    _check_trajectories(samples, num_samples)
    indices = [sample.index for sample in samples]
    if sorted(indices) != list(range(len(samples))):
        raise UserError(f"it returned samples with the index {indices}, needs each of 0 to {len(samples) - 1} once")
    for sample in samples:
        problem = _problem(sample, prompt=prompt, vocab_size=vocab_size, max_tokens=max_tokens) or _lacking(
            sample, experts=need_experts, candidates=need_candidates
        )
        if problem is not None:
            raise UserError(f"it returned sample {sample.index} with {problem}")
    if not any(sample.loss_mask.any() for sample in samples):
        raise UserError(
            f"it returned {counted(len(samples), 'sample')} without any trainable token, needs one at least; loss_mask is True on tokens "
            "that the policy chose"
        )
    return tuple(samples)


def _check_trajectories(samples: Sequence[Sample], num_samples: int) -> None:
    """Raise UserError for another number of trajectories than `num_samples` of each role, and for one of several roles."""
    parts = trajectories(samples)
    counts = Counter(part[-1].role for part in parts) or {None: 0}
    if set(counts.values()) != {num_samples}:
        of_roles = "" if set(counts) == {None} else f" ({', '.join(f'{count} of role {role!r}' for role, count in counts.items())})"
        raise UserError(
            f"it returned {len(samples)} samples of {len(parts)} trajectories{of_roles}, needs {num_samples} trajectories"
            f"{' of each role' if of_roles else ''}; samples that belong together have the same number in Sample.trajectory"
        )
    for part in parts:
        if len(roles := {sample.role for sample in part}) > 1:
            raise UserError(
                f"it returned trajectory {part[0].trajectory} with samples of the roles {sorted(map(str, roles))}, needs one role"
            )


def _problem(sample: Sample, *, prompt: Prompt, vocab_size: int, max_tokens: int) -> str | None:
    """Return the reason why a sample of `prompt` cannot be trained on, with the fix."""
    if sample.group_id != prompt.id:
        return f"group_id {sample.group_id!r}, needs {prompt.id!r}, the prompt's id"
    # Trajectories of one group are compared by one label, and the buffer keeps these once for the group.
    for name in ("id", "label", "metadata") if sample.prompt is not prompt else ():
        got, needed = getattr(sample.prompt, name), getattr(prompt, name)
        if got != needed:
            return (
                f"a prompt whose {name} is {got!r:.60}, needs {needed!r:.60}, that of the prompt which it was given; make one of its own "
                "with dataclasses.replace(prompt, token_ids=.., text=..), and put notes into Sample.metadata"
            )
    length = len(sample.prompt.token_ids) + len(sample.response_ids)
    if length > max_tokens:
        return (
            f"{length} tokens, prompt and response together, needs at most {max_tokens} (generator.context: the engines' context and "
            "training.max_tokens_per_micro_batch × cp); end it before, cut what tools answer, or raise these"
        )
    for name, ids in (("prompt.token_ids", sample.prompt.token_ids), ("response_ids", sample.response_ids)):
        if len(ids) and not 0 <= ids.min() <= ids.max() < vocab_size:
            return f"token ids {ids.min()} to {ids.max()} in {name}, needs 0 to {vocab_size - 1}"
    strays = np.flatnonzero(sample.loss_mask & (sample.weight_versions < 0))
    if len(strays):
        return (
            f"weight_versions {sample.weight_versions[strays[0]]} at token {strays[0]}, which loss_mask trains on, needs the version and "
            "the log-prob from the Generation that made it; set loss_mask False on tokens that no engine made"
        )
    above = np.flatnonzero(sample.loss_mask & (sample.rollout_log_probs > MAX_LOG_PROB))
    if len(above):
        return f"the rollout log-prob {sample.rollout_log_probs[above[0]]:g} at token {above[0]}, needs at most 0, the log of a probability"
    return None


def _lacking(sample: Sample, *, experts: bool, candidates: bool) -> str | None:
    """Return the needed record of an engine that the sample is without, with the fix."""
    if candidates and sample.candidates is None and sample.loss_mask.any():
        return (
            "no candidates, which rollout.sampling.top_p, top_k or min_p need: without them its log-probs would be trained as another "
            "distribution's; give it those of each Generation, and Candidates.none(n) for n other tokens"
        )
    if experts and sample.routed_experts is None and (sample.weight_versions >= 0).any():
        return (
            "no routed_experts, which training.routing_replay needs; give it those of the last Generation, which cover all tokens before "
            "it, or turn training.routing_replay off"
        )
    return None


def without_outdated_experts(sample: Sample) -> Sample:
    """Return the sample, without a record of experts when its tokens have several versions.

    A weight update sends running requests back to the prompt phase, as a later turn does. So the
    record shows the routing of the last weights for all tokens; the trainer routes such a sample.
    """
    versions = sample.weight_versions[sample.weight_versions >= 0]
    if sample.routed_experts is None or len(np.unique(versions)) <= 1:
        return sample
    return replace(sample, routed_experts=sample.routed_experts[:0])


def without_stale_tokens(group: Group, *, oldest_version: int) -> Group:
    """Return the group with tokens of versions before `oldest_version` as context, outside of the loss mask."""
    masks = [sample.loss_mask & (sample.weight_versions >= oldest_version) for sample in group.samples]
    return replace(group, samples=tuple(replace(sample, loss_mask=mask) for sample, mask in zip(group.samples, masks, strict=True)))
