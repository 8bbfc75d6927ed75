"""Weights of a reference or a teacher: at rest in host memory, in a model only during a pass."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor

from megatron_rl.models.hf_weights import expert_biases
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
