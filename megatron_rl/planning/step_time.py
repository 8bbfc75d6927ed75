"""Seconds of an optimizer step by arithmetic: work, traffic and messages over a device's rates.

The parts are added: nothing overlaps. Kernels start without a pause, ranks and experts are evenly
loaded. A real step takes longer, by an unknown amount without the device. Other passes over a
batch, for old log-probs or a reference, are not in the step.
"""

from dataclasses import dataclass
from math import prod

import numpy as np

from megatron_rl.config.settings import TrainingSettings
from megatron_rl.models.model_spec import ModelSpec
from megatron_rl.models.weight_table import Sharding, rules
from megatron_rl.planning.run_plan import count_micro_batches
from megatron_rl.training.topology import Topology
from megatron_rl.types import Ints


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Sizes of a model in numbers.

    `dense` parameters are on every expert parallel rank; `experts` counts all experts. `multiplied`
    counts a token's weights in the layers: matrices, and the chosen experts' matrices.
    """

    spec: ModelSpec
    dense: int
    experts: int
    multiplied: float

    @classmethod
    def of(cls, spec: ModelSpec) -> "ModelSize":
        """Return the size of `spec`, by the weight table."""
        sizes = {False: 0, True: 0}
        matrices = {False: 0, True: 0}
        for rule in rules(spec):
            size = sum(prod(tensor.shape) for tensor in rule.tensors) if rule.exported else 0
            sizes[rule.of_expert] += size
            if rule.sharding is not Sharding.VOCABULARY and len(rule.tensors[0].shape) > 1:
                matrices[rule.of_expert] += size
        taken = spec.moe.num_experts_per_token / spec.moe.num_experts if spec.moe is not None else 0.0
        return cls(spec, sizes[False], sizes[True], matrices[False] + matrices[True] * taken)

    @property
    def kept(self) -> int:
        """Numbers of a token kept in a layer for backward, over all tensor parallel ranks."""
        spec, moe = self.spec, self.spec.moe
        attention = (
            4 * spec.hidden_size + 2 * (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim + 2 * spec.num_heads * spec.value_dim
        )
        if moe is None:
            return attention + 3 * spec.ffn_hidden_size
        return attention + moe.num_experts_per_token * (5 * spec.hidden_size + 3 * moe.ffn_hidden_size) + 3 * moe.shared_ffn_hidden_size


def causal_pairs(lengths: Ints, *, window: int | None = None) -> float:
    """Count pairs of query and key in sequences of `lengths` [S] tokens, of the last `window` keys if given."""
    seen = lengths.astype(np.float64) if window is None else np.minimum(lengths, window).astype(np.float64)
    return float((seen * (seen + 1) / 2 + (lengths - seen) * seen).sum())


@dataclass(frozen=True, slots=True)
class Flops:
    """Operations of a forward pass on all ranks: weights of `layers` and `head`, products of causal `attention`."""

    layers: float
    attention: float
    head: float

    @classmethod
    def of(cls, size: ModelSize, lengths: Ints, *, num_targets: int | None = None) -> "Flops":
        """Return the operations of sequences of `lengths` [S] tokens, 2 for every weight and token.

        As many count for every pair and channel. The head runs at `num_targets`, or at all tokens.
        """
        spec, windows = size.spec, len(size.spec.sliding_layers)
        pairs = (spec.num_layers - windows) * causal_pairs(lengths) + windows * causal_pairs(lengths, window=spec.sliding_window)
        return cls(
            layers=2.0 * size.multiplied * float(lengths.sum()),
            attention=2.0 * pairs * spec.num_heads * (spec.head_dim + spec.value_dim),
            head=2.0 * (float(lengths.sum()) if num_targets is None else num_targets) * spec.vocab_size * spec.hidden_size,
        )

    def products(self, *, recompute: str | None) -> float:
        """Return operations with weights: the head's logits are made twice, all layers' with `recompute` "full"."""
        return (3 + (recompute == "full")) * self.layers + 4 * self.head

    def scores(self, *, recompute: str | None) -> float:
        """Return operations of attention, whose backward makes scores again (FlashAttention-2, section 4.1)."""
        return (3.5 + (recompute is not None)) * self.attention


@dataclass(frozen=True, slots=True)
class Rates:
    """A device's operations a second in bare `products` and `attention`, and bytes a second.

    A copy in `memory` counts bytes read and written, a collective within a `node` and over the
    `network` bytes sent by a rank.
    """

    products: float
    attention: float
    memory: float
    node: float
    network: float


@dataclass(frozen=True, slots=True)
class Step:
    """An optimizer step of `num_tokens` tokens and `flops` on the ranks of `topology`.

    `per_node` ranks share a node. Each data parallel rank has `num_micro_batches`. Numbers of
    parameters and activations have `itemsize` bytes, numbers of gradients and of the optimizer 4.
    `recompute` is megatron-core's granularity; "selective" counts as attention's.
    """

    size: ModelSize
    flops: Flops
    topology: Topology
    num_tokens: int
    num_micro_batches: int
    itemsize: int = 2
    recompute: str | None = None
    distributed_optimizer: bool = False
    per_node: int = 8

    @classmethod
    def of(
        cls,
        training: TrainingSettings,
        size: ModelSize,
        *,
        recompute: str | None,
        longest: int,
        num_sequences: int,
        per_node: int,
        itemsize: int = 2,
    ) -> "Step":
        """Return the step of `training` on `num_sequences` sequences of `longest` tokens."""
        return cls(
            size,
            Flops.of(size, np.full(num_sequences, longest)),
            Topology.of(training.topology),
            num_tokens=num_sequences * longest,
            num_micro_batches=count_micro_batches(training, longest=longest, num_sequences=num_sequences),
            itemsize=itemsize,
            recompute=recompute,
            distributed_optimizer=any(fields.get("use_distributed_optimizer") for fields in (training.optimizer, training.ddp)),
            per_node=per_node,
        )

    def parts(self, rates: Rates) -> dict[str, float]:
        """Return a rank's seconds by part; stages wait for each other's first and last micro-batches.

        Source: Narayanan et al. 2021.
        """
        ranks, stretched = self.topology.num_ranks, 1 + (self.topology.pp - 1) / self.num_micro_batches
        return {
            "products": self.flops.products(recompute=self.recompute) / ranks / rates.products * stretched,
            "attention": self.flops.scores(recompute=self.recompute) / ranks / rates.attention * stretched,
            "activations": self.activation_bytes() / rates.memory * stretched,
            "optimizer": self.state_bytes() / rates.memory,
            "messages": sum(sent / (rates.node if near else rates.network) for sent, near in self.messages()),
        }

    def activation_bytes(self) -> float:
        """Return the bytes read and written by a rank between products.

        Forward writes and reads the kept numbers. Backward reads the numbers again, and writes and
        reads a gradient. Recomputed numbers are written and read once more. Logits are read twice,
        and their gradient is written.
        """
        spec, ranks = self.size.spec, self.topology.num_ranks
        layers = (7 if self.recompute == "full" else 5) * self.num_tokens * spec.num_layers * self.size.kept
        logits = 3 * self.flops.head / (2 * spec.hidden_size)
        return self.itemsize * (layers + logits) / ranks

    def state_bytes(self) -> float:
        """Return the bytes of gradients and optimizer state read and written by a rank.

        Each micro-batch adds a gradient to a sum, starting at zeros. The step reads the sum for the
        norm, scales the sum, and reads it with the weight and two moments, then writes weight and
        moments. A weight of other than 4 bytes is a copy, written too.
        """
        held = self.held()
        sums = sum(count for count, _ in held) * (4 + self.num_micro_batches * (8 + self.itemsize))
        updated = sum(count / (copies if self.distributed_optimizer else 1) for count, copies in held)
        return sums + updated * (4 + 8 + 4 + 8 + 16 + (self.itemsize if self.itemsize != 4 else 0))

    def held(self) -> list[tuple[float, int]]:
        """Return the parameters of a rank, dense and experts, with the number of ranks for each."""
        one = self.topology
        return [
            (self.size.dense / (one.tp * one.pp), one.dp * one.cp),
            (self.size.experts / (one.etp * one.ep * one.pp), one.expert_dp),
        ]

    def messages(self) -> list[tuple[float, bool]]:
        """Return bytes sent by a rank per kind of parallelism, and True for bytes in a node.

        Tensor parallel passes gather and scatter twice in a layer. Context parallel passes send
        keys and values on, backward with gradients. Expert parallel passes send tokens there and
        back. Gradients are summed over copies: once around and once back, the distributed
        optimizer's way back with weights.
        """
        one, spec = self.topology, self.size.spec
        passes = 3 if self.recompute == "full" else 2
        here = self.itemsize * self.num_tokens / (one.dp * one.cp) * spec.num_layers / one.pp
        keys = spec.num_kv_heads * (spec.head_dim + spec.value_dim) / one.tp
        found = [
            (passes * here * 4 * spec.hidden_size * (one.tp - 1) / one.tp, one.tp),
            ((passes + 1) * here * keys * (one.cp - 1), one.tp * one.cp),
        ]
        if spec.moe is not None:
            sent = 2 * spec.moe.num_experts_per_token * spec.hidden_size / one.tp
            found.append((passes * here * sent * (one.ep - 1) / one.ep, one.etp * one.ep))
        back = self.itemsize if self.distributed_optimizer else 4
        widths = (one.tp * one.cp * one.dp, one.etp * one.ep * one.expert_dp)
        for (count, copies), width in zip(self.held(), widths, strict=True):
            found.append((count * (4 + back) * (copies - 1) / copies, width))
        return [(sent, width <= self.per_node) for sent, width in found]
