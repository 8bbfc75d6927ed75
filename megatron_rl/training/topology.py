"""The arrangement of Megatron ranks, as a value, and the one call that makes process groups of it."""

import datetime
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from megatron.core import parallel_state, tensor_parallel
from torch import distributed

from megatron_rl.config.checks import topology_contradictions
from megatron_rl.config.settings import TopologySettings
from megatron_rl.errors import UserError, counted
from megatron_rl.models.model_spec import ModelSpec
from megatron_rl.system.device import Device
from megatron_rl.system.rendezvous import join_store, serve_store


@dataclass(frozen=True, slots=True)
class Topology:
    """Sizes of every parallel dimension; num_ranks = tp x pp x cp x dp, arranged by `ep` and `etp` for experts."""

    num_ranks: int
    tp: int
    pp: int
    vpp: int
    cp: int
    dp: int
    ep: int
    etp: int
    sequence_parallel: bool

    @classmethod
    def of(cls, settings: TopologySettings) -> "Topology":
        """Return the topology of `settings`. Raises UserError, with the arithmetic, for sizes that do not fit."""
        for problem in topology_contradictions(settings):
            raise UserError(problem)
        same = ("num_ranks", "tp", "pp", "vpp", "cp", "dp", "ep", "sequence_parallel")
        return cls(**{name: getattr(settings, name) for name in same}, etp=settings.expert_tp)

    def __str__(self) -> str:
        parts = [f"tp {self.tp}", f"pp {self.pp}", f"cp {self.cp}", f"dp {self.dp}"]
        extra = [f"vpp {self.vpp}"] * (self.vpp > 1) + [f"ep {self.ep}"] * (self.ep > 1) + ["sequence parallel"] * self.sequence_parallel
        return f"{counted(self.num_ranks, 'rank')} = {' × '.join(parts)}" + (f" ({', '.join(extra)})" if extra else "")

    @property
    def expert_dp(self) -> int:
        """Return the number of copies of the experts."""
        return self.num_ranks // (self.etp * self.ep * self.pp)

    def first_rank(self, stage: int) -> int:
        """Return the first global rank of a pipeline stage."""
        return stage * self.num_ranks // self.pp

    def gathers_for(self, receivers: Iterable[int], *, rank: int) -> bool:
        """Return True when `rank` takes part in gathering the whole model for the global ranks `receivers`.

        As many consecutive ranks of a stage as experts and dense weights both fill hold its weights
        between them. They gather alone, with the same ranks of other stages; the remaining ranks
        hold copies.
        """
        stage, num_together = self.num_ranks // self.pp, math.lcm(self.tp, self.etp * self.ep)
        return any(receiver % stage // num_together == rank % stage // num_together for receiver in receivers)

    @property
    def stages(self) -> int:
        """Return the number of pipeline stages, virtual ones included."""
        return self.pp * self.vpp

    @property
    def pad_to(self) -> int:
        """Return the number that must divide a rank's token count."""
        return self.tp if self.sequence_parallel else 1

    def check_model(self, spec: ModelSpec, megatron: Mapping[str, Any]) -> None:
        """Raise UserError for a model that cannot be divided: heads, KV groups, FFN by tp, layers by stages.

        The user's fields `megatron` can have numbers of layers for the end stages. KV groups fewer
        than tp are shared by as many ranks each.
        """
        self._check_stages(spec.num_layers, megatron)
        fitting, num_kv_groups = _divisors(math.gcd(spec.num_heads, spec.ffn_hidden_size)), spec.num_kv_heads
        for name, size in (("attention heads", spec.num_heads), ("FFN columns", spec.ffn_hidden_size)):
            if size % self.tp:
                raise UserError(
                    f"training.topology: {self}: the model's {size} {name} are not divisible by tp {self.tp}; choose tp among {fitting}"
                )
        if num_kv_groups % self.tp and self.tp % num_kv_groups:
            sizes = [size for size in fitting if num_kv_groups % size == 0 or size % num_kv_groups == 0]
            raise UserError(
                f"training.topology: {self}: the model's {num_kv_groups} KV groups are neither a multiple nor a divisor of tp {self.tp}; "
                f"choose tp among {sizes}"
            )

    def _check_stages(self, num_layers: int, megatron: Mapping[str, Any]) -> None:
        counted = [name for name in _COUNTED_AS_LAYERS if megatron.get(name)]
        if counted:
            raise UserError(
                f"model.megatron.{counted[0]} is set, which is not supported; give the stages their numbers of layers with {_FIX}"
            )
        if megatron.get("pipeline_model_parallel_layout") is not None:
            # megatron-core holds a layout against the number of layers and of stages itself.
            return
        ends = [(name, _layer_count(name, megatron[name])) for name in (_FIRST, _LAST) if megatron.get(name) is not None]
        if not ends:
            if num_layers % self.stages:
                raise UserError(
                    f"training.topology: {self}: num_layers {num_layers} is not divisible by pp·vpp {self.stages}; choose pp and vpp "
                    f"so that pp·vpp is one of {_divisors(num_layers)}, or set {self._suggested_ends(num_layers)}"
                )
            return
        if self.pp == len(ends) and self.vpp > 1:
            # megatron-core divides offsets of virtual stages by the number of stages between the first and the last.
            raise UserError(
                f"training.topology: {self}: model.megatron.{_FIRST} and {_LAST} are both set, but with pp 2 and vpp {self.vpp} "
                f"megatron-core takes one of them; remove {_FIRST}"
            )
        middle, stages = num_layers - sum(count for _, count in ends), self.pp - len(ends)
        sizes = [count for _, count in ends] + ([middle // stages] if stages > 0 else [])
        if stages < 0 or min(sizes) < 1 or (middle % stages if stages else middle) or any(size % self.vpp for size in sizes):
            given = " - ".join(f"{count} ({name})" for name, count in ends)
            raise UserError(
                f"training.topology: {self}: num_layers {num_layers} - {given} = {middle} layers for the {max(stages, 0)} other pipeline "
                f"stages; each of the {self.pp} stages needs the same multiple of vpp {self.vpp} there, and at least one layer: "
                f"set {self._suggested_ends(num_layers)}"
            )

    def _suggested_ends(self, num_layers: int) -> str:
        """Return fitting numbers of layers for the first and the last stage; those between have a few more."""
        units = num_layers // self.vpp
        between = -(-units // self.pp)
        first, last = -(-(units - between * (self.pp - 2)) // 2), (units - between * (self.pp - 2)) // 2
        if num_layers % self.vpp or self.pp < 2 or last < 1:
            return f"{_FIX} (no numbers fit {num_layers} layers, pp {self.pp} and vpp {self.vpp}) or another pp"
        ends = f"{_LAST} {last * self.vpp}"
        return f"model.megatron.{ends}" if self.pp == 2 and self.vpp > 1 else f"model.megatron.{_FIRST} {first * self.vpp} and {ends}"


_FIRST, _LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"
_FIX = f"model.megatron.{_FIRST} and {_LAST}"
_COUNTED_AS_LAYERS = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")


def _layer_count(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise UserError(f"model.megatron.{name} is {value!r}, needs a number of layers; give a whole number")
    return value


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def initialize(topology: Topology, *, rank: int, init_method: str | None, device: Device, timeout_s: float, seed: int = 0) -> None:
    """Join the process group at `init_method` as `rank`, once per process, and build Megatron's groups.

    Collectives time out after `timeout_s`. At tcp://ADDRESS:PORT rank 0 serves the others on this
    address alone; None is a process alone; all else goes to torch. `seed` is of random generators.
    Collective over all ranks.
    """
    place, size = urlsplit(init_method or ""), topology.num_ranks
    store: distributed.Store | None = distributed.HashStore() if init_method is None else None
    if place.scheme == "tcp":
        assert place.hostname is not None and place.port is not None, f"{init_method} lacks an address or a port"
        meet = partial(serve_store if rank == 0 else join_store, place.hostname, port=place.port)
        store = meet(num_clients=size, timeout_s=timeout_s)
    distributed.init_process_group(
        backend=device.backend,
        init_method=init_method if store is None else None,
        store=store,
        rank=rank,
        world_size=size,
        # Without device_id, which makes the communicators of all 21 groups of a rank at once. NCCL gives one of a single rank 512 MiB for
        # peers that it has not (NVIDIA/nccl#2363). So the first collective of a group makes its communicator: 4 in a data parallel run.
        timeout=datetime.timedelta(seconds=timeout_s),
    )
    initialize_groups(topology, timeout_s=timeout_s, seed=seed)


def initialize_groups(topology: Topology, *, timeout_s: float, seed: int) -> None:
    """Build Megatron's groups and random generators inside a process group of all ranks. Collective."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=topology.tp,
        pipeline_model_parallel_size=topology.pp,
        virtual_pipeline_model_parallel_size=topology.vpp if topology.vpp > 1 else None,
        context_parallel_size=topology.cp,
        expert_model_parallel_size=topology.ep,
        expert_tensor_parallel_size=topology.etp,
        distributed_timeout_minutes=max(1, math.ceil(timeout_s / 60)),
        create_gloo_process_groups=False,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def shutdown() -> None:
    """Leave the process groups. The process must not use a collective afterwards."""
    parallel_state.destroy_model_parallel()
    distributed.destroy_process_group()


@dataclass(frozen=True, slots=True)
class Place:
    """The place of this process in the topology, ranks counted within their dimension, and the process's groups."""

    dp_rank: int
    cp_rank: int
    tp_rank: int
    last_stage: bool
    tp_group: distributed.ProcessGroup
    cp_group: distributed.ProcessGroup
    pp_group: distributed.ProcessGroup

    @classmethod
    def here(cls) -> "Place":
        """Return the place of the calling process. `initialize` must have run."""
        return cls(
            dp_rank=parallel_state.get_data_parallel_rank(),
            cp_rank=parallel_state.get_context_parallel_rank(),
            tp_rank=parallel_state.get_tensor_model_parallel_rank(),
            last_stage=parallel_state.is_pipeline_last_stage(ignore_virtual=True),
            tp_group=parallel_state.get_tensor_model_parallel_group(),
            cp_group=parallel_state.get_context_parallel_group(),
            pp_group=parallel_state.get_pipeline_model_parallel_group(),
        )

    @property
    def reports(self) -> bool:
        """Return True on the one tensor-parallel rank of the last stage, for each cp and dp rank, that reports metrics."""
        return self.last_stage and self.tp_rank == 0

    @property
    def reports_alone(self) -> bool:
        """Return True on one of the reporting ranks, for values equal on all ranks."""
        return self.reports and self.dp_rank == 0 and self.cp_rank == 0
