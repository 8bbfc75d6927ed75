"""Parts of a plan. Sizes are bytes on one GPU unless stated otherwise."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby

from megatron_rl.config.gpus import GIB, Gpu
from megatron_rl.errors import counted

Table = tuple[tuple[str, ...], ...]
"""Rows of cells; the first row is the header."""


@dataclass(frozen=True, slots=True)
class Collective:
    """The largest message of a training step: its kind and group, and its bytes on one rank."""

    name: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Memory of the first, and fullest, rank of one pipeline stage.

    `gradients` are DDP's buffers, `optimizer` main weights and moments, `activations` of the
    `in_flight` micro-batches, `logits` the peak of the language model head and its statistics (last
    stage), `working` the temporary need of a layer's backward or the optimizer step, `reserved` the
    CUDA context, NCCL's buffers and fragmentation. `teacher` are the weights and the forward pass
    of a teacher, asked before there are activations. `host` is main memory.
    """

    stage: int
    num_layers: int
    num_parameters: int
    in_flight: float
    parameters: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    working: int
    teacher: int
    reserved: int
    host: int
    largest_collective: Collective

    @property
    def state(self) -> int:
        """Memory between steps: parameters, gradients, optimizer."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def total(self) -> int:
        """Peak of this rank; head and backward take turns, and so do a teacher and the training."""
        return self.state + max(self.trained, self.teacher) + self.reserved

    @property
    def trained(self) -> int:
        """Memory of an optimizer step besides the state."""
        return self.activations + max(self.logits, self.working)


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """One of `num_engines` engines of `num_gpus` GPUs: `weights`, `cache`, `reserved` on each GPU.

    The cache has room for `cache_tokens` tokens of all sequences of the engine together,
    `bytes_per_token` each on a GPU.
    """

    num_gpus: int
    num_engines: int
    weights: int
    cache: int
    reserved: int
    bytes_per_token: int
    cache_tokens: int
    longest_sequence: int

    @property
    def fits(self) -> bool:
        """True with room for at least one sequence of the greatest length."""
        return self.cache_tokens >= max(1, self.longest_sequence)


@dataclass(frozen=True, slots=True)
class RunPlan:
    """A run's memory on `gpu`s: `stages` of the trainer in pipeline order, and the `engine`.

    `engine` is None without generation. `layout` and `attention` are in words, `tokens` count a
    micro-batch on a rank. `colocated` engines share the trainer's GPUs: `asleep` is the bytes of
    the one while the other works, `handover` the peak of both while weights go to the engines.
    """

    gpu: Gpu
    layout: str
    attention: str
    tokens: int
    num_nodes: int
    stages: tuple[StageMemory, ...]
    engine: EngineMemory | None
    colocated: bool
    asleep: int
    handover: int
    host_per_node: int

    @property
    def fullest(self) -> StageMemory:
        """The stage with the fullest rank."""
        return max(self.stages, key=lambda stage: stage.total)

    @property
    def peak(self) -> int:
        """Peak bytes on any GPU of the trainer."""
        return max(self.fullest.total + self.asleep, self.handover)

    @property
    def fits(self) -> bool:
        """True where trainer, engine and main memory all fit."""
        engine = self.engine is None or self.engine.fits
        return self.peak <= self.gpu.memory_bytes and engine and self.host_per_node <= self.gpu.host_bytes

    @property
    def verdict(self) -> str:
        """Return one line: fit or not, and the margin on the fullest rank."""
        full, room = self.fullest, self.gpu.memory_bytes
        asks_most = full.teacher > full.trained
        most = f"{gib(full.teacher)} GiB for the teacher" if asks_most else f"{gib(full.activations)} GiB for activations"
        used = f"{gib(self.peak)} of {gib(room)} GiB on the fullest rank (stage {full.stage}), {most}"
        if self.peak > room:
            return f"does not fit: {used}; {gib(self.peak - room)} GiB too much"
        if self.engine is not None and not self.engine.fits:
            return (
                f"does not fit: an engine of {counted(self.engine.num_gpus, 'GPU')} has room for {self.engine.cache_tokens} tokens beside "
                f"{gib(self.engine.weights)} GiB of weights, one sequence has up to {self.engine.longest_sequence}"
            )
        if self.host_per_node > self.gpu.host_bytes:
            return f"does not fit: {gib(self.host_per_node)} of {gib(self.gpu.host_bytes)} GiB of a node's main memory"
        return f"fits: {used}"

    def tables(self) -> dict[str, Table]:
        """Return titled tables of cells, header first: memory by stage, engines, nodes."""
        tables = {
            f"Megatron ranks, GiB per {self.gpu.name} by pipeline stage, {self.tokens} tokens per micro-batch": _stage_table(self.stages)
        }
        if self.engine is not None:
            tables["SGLang engines, GiB per GPU"] = _engine_table(self.engine)
        nodes: list[tuple[str, ...]] = [
            ("nodes", "main memory GiB per node", "of"),
            (str(self.num_nodes), gib(self.host_per_node), gib(self.gpu.host_bytes)),
        ]
        if self.colocated:
            nodes = [(*nodes[0], "asleep GiB per GPU", "weight sync GiB per GPU"), (*nodes[1], gib(self.asleep), gib(self.handover))]
        tables["Nodes"] = tuple(nodes)
        return tables

    def lines(self) -> list[str]:
        """Return the layout, the tables with aligned columns, and the verdict as the last line."""
        lines = [f"{self.layout}, attention {self.attention}"]
        for title, table in self.tables().items():
            widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
            lines += [title, *("  " + "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in table)]
        return [*lines, self.verdict]


def _stage_table(stages: Sequence[StageMemory]) -> Table:
    distilled = any(stage.teacher for stage in stages)
    header = ("stage", "layers", "parameters B", "weights", "gradients", "optimizer", "in flight", "activations", "logits", "working")
    rows: list[tuple[str, ...]] = [(*header, *(["teacher"] if distilled else []), "reserved", "total", "largest collective")]
    for cells, group in groupby(stages, key=partial(_cells, distilled=distilled)):
        numbers = [stage.stage for stage in group]
        rows.append((str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}", *cells))
    return tuple(rows)


def _cells(stage: StageMemory, *, distilled: bool) -> tuple[str, ...]:
    sizes = (stage.activations, stage.logits, stage.working, *([stage.teacher] if distilled else []), stage.reserved, stage.total)
    collective = stage.largest_collective
    return (
        str(stage.num_layers),
        f"{stage.num_parameters / 1e9:.2f}",
        *map(gib, (stage.parameters, stage.gradients, stage.optimizer)),
        f"{stage.in_flight:g}",
        *map(gib, sizes),
        f"{collective.name}, {gib(collective.num_bytes)}" if collective.num_bytes else "none",
    )


def _engine_table(engine: EngineMemory) -> Table:
    header = ("engines", "GPUs each", "weights", "KV cache", "left free", "KiB per token", "tokens in cache", "longest sequences")
    sequences = engine.cache_tokens / max(1, engine.longest_sequence)
    sizes = (gib(engine.weights), gib(engine.cache), gib(engine.reserved), f"{engine.bytes_per_token / 1024:.1f}")
    return (header, (str(engine.num_engines), str(engine.num_gpus), *sizes, str(engine.cache_tokens), f"{sequences:.1f}"))


def gib(num_bytes: float) -> str:
    """Return `num_bytes` in GiB with one digit, without the unit."""
    return f"{num_bytes / GIB:.1f}"
