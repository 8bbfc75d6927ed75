"""The initial weights, kept in host memory and exchanged with the model's when the reference policy is asked."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor

from megatron_rl.models.hf_weights import expert_biases


class ReferenceWeights:
    """A host copy of every parameter of `model` that is trained, as it is now, on this rank.

    The parameters of the model change places with the copy, one at a time, so that the device never holds two models. The
    optimizer's own fp32 parameters are not touched.
    """

    def __init__(self, model: Sequence[DistributedDataParallel]) -> None:
        self._model = list(model)
        pin = torch.cuda.is_available()
        self._host = [parameter.detach().to("cpu", copy=True) for parameter in self._parameters()]
        if pin:
            self._host = [tensor.pin_memory() for tensor in self._host]

    def _parameters(self) -> Iterator[Tensor]:
        for chunk in self._model:
            yield from (parameter for parameter in chunk.parameters() if parameter.requires_grad)
            # A bias decides which experts are taken, and moves where model.megatron.moe_router_bias_update_rate says so.
            yield from (bias for _, bias in expert_biases(chunk))

    @torch.no_grad()
    def _exchange(self) -> None:
        for parameter, host in zip(self._parameters(), self._host, strict=True):
            current = parameter.detach().clone()
            parameter.copy_(host)
            host.copy_(current)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, the model has the reference weights; afterwards its own again, bit for bit."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()
