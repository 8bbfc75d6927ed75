"""Weights that rest in host memory and take their place in a model only while they are asked: a reference's and a teacher's."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor

from megatron_rl.models.hf_weights import expert_biases


class RestingWeights:
    """Host copies of a model's tensors as they are when this is made, page-locked where there is a GPU."""

    def __init__(self, tensors: Callable[[], Iterable[Tensor]], *, replacing: bool) -> None:
        """`tensors` gives the tensors of this rank, the same ones in the same order at each call.

        `replacing`: other weights live in them, which change places with the copies one tensor at a time, so that the device never holds
        two models. Otherwise nothing else does, and the tensors are on no device but while they are asked; they must not be written.
        """
        self._tensors = tensors
        self._replacing = replacing
        # One for each: a rank whose stage is frozen trains no tensor at all.
        self._devices = [tensor.device for tensor in tensors()]
        host = [tensor.detach().to("cpu", copy=True) for tensor in tensors()]
        self._host = [tensor.pin_memory() for tensor in host] if torch.cuda.is_available() else host
        if not replacing:
            self._put_away()

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, the model has these weights; afterwards its own again, bit for bit, or none on the device."""
        self._exchange() if self._replacing else self._bring()
        try:
            yield
        finally:
            self._exchange() if self._replacing else self._put_away()

    @torch.no_grad()
    def _exchange(self) -> None:
        for tensor, host in zip(self._tensors(), self._host, strict=True):
            current = tensor.detach().clone()
            tensor.copy_(host)
            host.copy_(current)

    def _bring(self) -> None:
        for tensor, host, device in zip(self._tensors(), self._host, self._devices, strict=True):
            tensor.data = host.to(device, non_blocking=True)

    def _put_away(self) -> None:
        # They never change, so those on the device are dropped.
        for tensor, host in zip(self._tensors(), self._host, strict=True):
            tensor.data = host


def trained_tensors(chunks: Sequence[DistributedDataParallel]) -> Iterator[Tensor]:
    """What training moves: the parameters that are trained, and biases of routers. The optimizer's own fp32 parameters are no part."""
    for chunk in chunks:
        yield from (parameter for parameter in chunk.parameters() if parameter.requires_grad)
        # A bias decides which experts are taken, and moves where model.megatron.moe_router_bias_update_rate says so.
        yield from (bias for _, bias in expert_biases(chunk))
