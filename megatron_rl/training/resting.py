"""Weights of a reference or a teacher: at rest in host memory, in a model only during a pass."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor

from megatron_rl.checkpoints import manifest
from megatron_rl.checkpoints.training_state import check_on_ranks
from megatron_rl.errors import UserError
from megatron_rl.models.freezing import frozen_rules
from megatron_rl.models.hf_weights import expert_biases
from megatron_rl.models.model_spec import ModelSpec
from megatron_rl.training.offload import piece_sizes


class RestingWeights:
    """Host copies of a model's tensors, page-locked in pieces for a GPU: copies follow its order without waiting."""

    def __init__(self, tensors: Callable[[], Iterable[Tensor]], *, replacing: bool) -> None:
        """Copy the tensors of this rank, given by `tensors` in the same order at each call.

        `replacing`: they hold other weights, swapped piece by piece, so the device never holds two
        models. Otherwise they are empty except during a pass; nobody may write to them.
        """
        self._tensors, self._replacing = tensors, replacing
        self._shapes = [tensor.shape for tensor in tensors()]
        pieces = [
            torch.empty(size, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
            for size in piece_sizes(sum(tensor.nbytes for tensor in tensors()))
        ]
        self._host = _cut(pieces, [tensor.nbytes for tensor in tensors()])
        for host, here in self._pairs():
            host.copy_(here, non_blocking=True)
        if not replacing:
            self._put_away()

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Lend the model these weights inside; restore its own, or none, afterwards, bit for bit."""
        self._exchange() if self._replacing else self._bring()
        try:
            yield
        finally:
            self._exchange() if self._replacing else self._put_away()

    def _exchange(self) -> None:
        for host, here in self._pairs():
            current = here.clone()
            here.copy_(host, non_blocking=True)
            host.copy_(current, non_blocking=True)

    def _bring(self) -> None:
        for tensor, shape in zip(self._tensors(), self._shapes, strict=True):
            tensor.data = tensor.data.new_empty(shape)
        for host, here in self._pairs():
            here.copy_(host, non_blocking=True)

    def _put_away(self) -> None:
        # The copies never change, so the weights on the device are dropped. An empty tensor keeps dtype and device, and fits nowhere.
        for tensor in self._tensors():
            tensor.data = tensor.data.new_empty(0)

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield every tensor in parts, uint8 [bytes] each: in host memory and in the tensor itself."""
        for tensor, host in zip(self._tensors(), self._host, strict=True):
            here = tensor.detach().view(-1).view(torch.uint8)
            yield from zip(host, here.split([len(part) for part in host]), strict=True)


class Reference(RestingWeights):
    """The initial weights, named in a checkpoint by the hashes of their files: the KL must not change its target at a resume."""

    def __init__(self, path: Path, chunks: Sequence[DistributedDataParallel]) -> None:
        """Copy the trained tensors of this rank, read from the directory `path`. Collective over all ranks."""
        super().__init__(partial(trained_tensors, chunks), replacing=True)
        hashes = itertools.chain(*check_on_ranks(partial(manifest.weight_hashes, path)))
        self._path, self.identity = path, blake3("".join(sorted(hashes)).encode()).hexdigest()

    def check(self, counters: Mapping[str, Any], *, spec: ModelSpec, frozen: Sequence[str]) -> None:
        """Refuse the `counters` of a checkpoint with another reference, or of weights trained there and `frozen` now.

        Frozen weights are not copied. Raises UserError.
        """
        identity = counters.get("reference") or self.identity
        if identity != self.identity:
            raise UserError(
                f"cannot resume: the weights of model.path {self._path} have the BLAKE3 {self.identity[:16]}, those of the checkpoint's "
                f"reference {identity[:16]}, so that the KL would pull to another policy; give the weights that the run began with, or "
                "start a new run"
            )
        then = {rule.megatron for rule in frozen_rules(spec, counters.get("frozen", frozen))}
        moved = [rule for rule in frozen_rules(spec, frozen) if rule.megatron not in then]
        if moved:
            raise UserError(
                f"cannot resume: training.frozen {list(frozen)} freezes {moved[0].hugging_face[0]}, which was trained until the "
                "checkpoint, so that the KL's reference would have its trained values; restore training.frozen, or start a new run from "
                "the exported policy"
            )


def _cut(pieces: Sequence[Tensor], sizes: Sequence[int]) -> list[list[Tensor]]:
    """Return the parts of `pieces`, of equal length, for each of `sizes` bytes, one after the other."""
    parts: list[list[Tensor]] = []
    stop, length = 0, len(pieces[0]) if pieces else 1
    for size in sizes:
        start, stop = stop, stop + size
        numbers = range(start // length, -(-stop // length)) if size else ()
        parts.append([pieces[n][max(0, start - n * length) : stop - n * length] for n in numbers])
    return parts


def trained_tensors(chunks: Sequence[DistributedDataParallel]) -> Iterator[Tensor]:
    """Yield the tensors moved by training: trained parameters, not the optimizer's fp32 ones, and biases of routers."""
    for chunk in chunks:
        yield from (parameter for parameter in chunk.parameters() if parameter.requires_grad)
        # A bias decides the choice of experts, and moves where model.megatron.moe_router_bias_update_rate says so.
        yield from (bias for _, bias in expert_biases(chunk))
