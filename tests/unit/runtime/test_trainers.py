"""What each rank is given and what its answers become, with actors that answer in this process."""

import concurrent.futures
import sys
import threading
import types
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ray.exceptions import RayActorError

from megatron_rl.algorithms.rounding_limits import FLOAT32, Expected
from megatron_rl.config.load import load_settings
from megatron_rl.data.packing import Shard, make_shards
from megatron_rl.data.token_values import TOKEN_VALUES, TokenValues
from megatron_rl.errors import DeadlineError, EngineDiedError, UserError, WorkerDiedError
from megatron_rl.observe.metrics import Metric, Sum, metric_values
from megatron_rl.observe.spans import Span
from megatron_rl.runtime import trainers as module
from megatron_rl.runtime.trainers import TrainerGroup
from megatron_rl.runtime.watchdog import Watchdog
from megatron_rl.types import TrainBatch

SETTINGS = (
    "run.directory=run",
    "run.seed=5",
    "model.path=model",
    "data.train=train.jsonl",
    "data.max_prompt_tokens=1",
    "rollout.sampling.max_response_tokens=9",
    "training.optimizer_steps_per_batch=2",
    "training.max_tokens_per_micro_batch=6",
    "training.topology.num_ranks=4",
    "training.topology.cp=2",
)
DEALT = (("10",), ("9",), ("5",), ("4",))
"""The GPUs that Ray gives to the actors in the order of their creation, two on each of two nodes."""
DP_RANKS = (1, 0, 0, 1)
"""Of the ranks, in an order that no formula gives."""


class Reference:
    """The reference to a call whose result is there."""

    def __init__(self, result: object) -> None:
        self.result = result

    def future(self) -> concurrent.futures.Future:
        future: concurrent.futures.Future = concurrent.futures.Future()
        future.set_result(self.result)
        return future


class Endless(Reference):
    """The reference to a call that never returns."""

    def __init__(self) -> None:
        super().__init__(None)

    def future(self) -> concurrent.futures.Future:
        return concurrent.futures.Future()


class Later(Reference):
    """The reference to a call that returns a moment later."""

    def future(self) -> concurrent.futures.Future:
        future: concurrent.futures.Future = concurrent.futures.Future()
        threading.Timer(0.1, future.set_result, [self.result]).start()
        return future


EXPECTED = Expected(version=0, limits=FLOAT32)


class Worker:
    """What a `TrainerGroup` sees of the actor of one rank."""

    made: list["Worker"]

    def __init__(self) -> None:
        self.gpus = DEALT[len(Worker.made)]
        self.shards: list[Shard] = []
        Worker.made.append(self)

    def take_place(self, _: Path) -> tuple[str, ...]:
        return self.gpus

    def check(self, checkpoint: Path, *, share: int, num_shares: int) -> None:
        self.checked = (checkpoint, share, num_shares)

    def start(self, _: object, *, rank: int, init_method: str) -> int:
        return DP_RANKS[rank]

    def address(self) -> tuple[str, int]:
        return "127.0.0.1", 1

    def call(self, method: str, *arguments: Any, **keywords: Any) -> Any:
        return getattr(self, method)(*arguments, **keywords)

    def train(
        self, shard: Shard, *, rows: Collection[int], expected: Expected | None
    ) -> tuple[list[dict[str, Metric]], TokenValues, list[Span]]:
        assert expected == EXPECTED
        self.shards.append(shard)
        number = int(self.gpus[0])
        losses = [{"train/loss": Sum(float(number + 10 * step))} for step in range(len(shard.steps))]
        values = TokenValues(np.array(rows), np.array([number]), np.full((len(TOKEN_VALUES), 1), number, np.float32))
        return losses, values, [Span("", "optimizer", float(number), number + 1.0)]


def call(method: Callable[..., Any]) -> types.SimpleNamespace:
    return types.SimpleNamespace(remote=lambda *args, **kwargs: Reference(method(*args, **kwargs)))


def make_actor() -> types.SimpleNamespace:
    worker = Worker()
    methods = {name: call(getattr(worker, name)) for name in ("take_place", "check", "start", "address", "call", "train")}
    return Actor(worker=worker, hold=types.SimpleNamespace(remote=Endless), **methods)


class Actor(types.SimpleNamespace):
    """A handle, which counts as a key by itself."""

    __hash__ = object.__hash__


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[TrainerGroup]:
    """Four ranks on two nodes, data- and context-parallel size 2, two optimizer steps per batch."""
    Worker.made = []
    monkeypatch.setattr(module, "TrainerWorker", types.SimpleNamespace(options=lambda **_: types.SimpleNamespace(remote=make_actor)))
    monkeypatch.setattr(module, "ray", types.SimpleNamespace(put=lambda value: value))
    nodes = [types.SimpleNamespace(ranks=(0, 1)), types.SimpleNamespace(ranks=(2, 3))]
    reservation: Any = types.SimpleNamespace(rank_options=lambda _: {}, placement=types.SimpleNamespace(nodes=nodes))
    with Watchdog() as watchdog:
        made = TrainerGroup(load_settings(None, SETTINGS), reservation=reservation, watchdog=watchdog)
        made.start()
        yield made


def test_a_process_that_never_ran_is_a_death(group: TrainerGroup) -> None:
    """As on a node that is lost: Ray tells the calls in any order."""
    assert not group.has_died
    late: concurrent.futures.Future[None] = concurrent.futures.Future()
    never: concurrent.futures.Future[None] = concurrent.futures.Future()
    never.set_exception(RayActorError())
    for actor in group._nodes[1]:
        actor.hold = types.SimpleNamespace(remote=lambda: types.SimpleNamespace(future=lambda: late))
        actor.take_place = types.SimpleNamespace(remote=lambda _: types.SimpleNamespace(future=lambda: never))
    del group._seated
    threading.Timer(0.1, late.set_exception, (RayActorError(),)).start()
    with pytest.raises(WorkerDiedError, match=r"Megatron rank [23] died"):
        _ = group.workers
    assert group.has_died


def make_batch(lengths: list[int]) -> TrainBatch:
    total, num_sequences = sum(lengths), len(lengths)
    mask = np.concatenate([np.arange(length) >= 1 for length in lengths])
    return TrainBatch(
        tokens=np.arange(total),
        cu_seqlens=np.concatenate([[0], np.cumsum(lengths)]),
        prompt_lengths=np.ones(num_sequences, np.int64),
        loss_mask=mask,
        rollout_log_probs=np.zeros(total),
        weight_versions=np.full(total, -1),
        rewards=np.zeros(num_sequences),
        group_ids=np.arange(num_sequences),
        truncated=np.zeros(num_sequences),
    )


def test_ranks_are_seated_on_each_node_in_the_order_of_its_gpus(group: TrainerGroup) -> None:
    assert group.gpus == [("9",), ("10",), ("4",), ("5",)]
    assert [worker.worker.gpus for worker in group.workers] == group.gpus


def test_each_rank_compares_a_share_of_a_checkpoint_of_its_own(group: TrainerGroup) -> None:
    group.check(Path("checkpoint"))
    assert sorted(worker.checked for worker in Worker.made) == [(Path("checkpoint"), share, 4) for share in range(4)]


def test_ranks_compare_a_checkpoint_only_once(group: TrainerGroup) -> None:
    loaded: list[tuple[Path, bool]] = []
    for worker in Worker.made:
        worker.load = lambda path, *, weights_only, checked: (loaded.append((path, checked)), ())
    group.check(Path("one"))
    group.load(Path("one"), weights_only=False)
    group.load(Path("two"), weights_only=False)
    assert loaded == [(Path("one"), True)] * 4 + [(Path("two"), False)] * 4


def test_an_exit_of_a_plug_in_on_a_rank_is_a_sentence() -> None:
    """Ray would end the rank and name no cause."""
    worker = module.TrainerWorker.__ray_metadata__.modified_class()
    worker._trainer = types.SimpleNamespace(train_step=lambda: sys.exit("enough"))
    with pytest.raises(UserError, match=r"SystemExit\('enough'\) in train_step, needs to return, or to raise an Exception"):
        worker.call("train_step")


def test_a_rank_trains_on_its_data_parallel_sequences(group: TrainerGroup) -> None:
    batch = make_batch([4, 7, 2, 9, 3, 5, 6])
    steps, values = group.train(batch, step=3, expected=EXPECTED, rows=[2]), group.recorded
    assert [(span.who, span.begin) for span in group.spans.take()] == [("rank 0", 9.0), ("rank 1", 10.0), ("rank 2", 4.0), ("rank 3", 5.0)]
    assert values.rows.tolist() == [2] * 4 and values.offsets.tolist() == values.values[0].tolist() == [9.0, 10.0, 4.0, 5.0]
    # The budget of a micro-batch is that of each context-parallel rank.
    expected = make_shards(batch, dp=2, optimizer_steps=2, max_tokens_per_micro_batch=6, seed=8, cp=2)
    shards = [worker.worker.shards[0] for worker in group.workers]
    for shard, dp_rank in zip(shards, DP_RANKS, strict=True):
        np.testing.assert_array_equal(shard.rows, expected[dp_rank].rows)
        np.testing.assert_array_equal(shard.batch.tokens, expected[dp_rank].batch.tokens)
        for step, planned in zip(shard.steps, expected[dp_rank].steps, strict=True):
            assert [rows.tolist() for rows in step] == [rows.tolist() for rows in planned]
    taken = np.concatenate([shards[DP_RANKS.index(dp_rank)].rows for dp_rank in range(2)])
    assert sorted(taken) == list(range(7)), "every sequence is trained by one data-parallel rank"
    assert [metric_values(metrics) for metrics in steps] == [{"train/loss": 28.0}, {"train/loss": 68.0}]


def test_a_rank_that_takes_no_call_is_named_soon(group: TrainerGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RANK_ANSWER_S", 0.05)
    for actor in group.workers:
        actor.call = call(lambda method: False)
    group.check_answers()
    group.workers[2].call = types.SimpleNamespace(remote=lambda method: Endless())
    with pytest.raises(DeadlineError, match="still waiting for: Megatron rank 2"):
        group.check_answers()


def test_stacks_and_ends_of_ranks(group: TrainerGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 2 does not answer, rank 1 has died; the dead one is known by the call that never returns."""
    ended: list[Any] = []

    def get(ref: int) -> list[str]:
        if ref == id(group.workers[1]):
            raise RayActorError
        return references[ref]

    references = {id(actor): [] if rank < 3 else ["train"] for rank, actor in enumerate(group.workers)}
    for actor in group.workers:
        actor.stack = types.SimpleNamespace(remote=lambda actor=actor: id(actor))
    silent = id(group.workers[2])
    monkeypatch.setattr(
        module,
        "ray",
        types.SimpleNamespace(
            wait=lambda refs, num_returns, timeout: ([ref for ref in refs if ref != silent], [silent]),
            get=get,
            kill=ended.append,
        ),
    )
    assert group.stacks() == [[], None, None, ["train"]]
    assert not group.has_died
    group._holds[1].set_exception(RuntimeError("gone"))
    assert group.has_died
    group.end()
    assert ended and set(map(id, ended)) == set(map(id, group.workers))


def test_a_rank_tells_the_stack_of_its_call_alone() -> None:
    worker = module.TrainerWorker.__ray_metadata__.modified_class()
    begun, go_on = threading.Event(), threading.Event()

    def train_step() -> None:
        begun.set()
        go_on.wait()

    worker._trainer = types.SimpleNamespace(train_step=train_step)
    assert worker.stack() == []
    call = threading.Thread(target=worker.call, args=("train_step",))
    call.start()
    begun.wait()
    stack = worker.stack()
    go_on.set()
    call.join()
    assert any(line.startswith("train_step ") for line in stack) and any("trainers.py" in line for line in stack)


def test_a_step_is_trained_to_its_end_without_engines(group: TrainerGroup) -> None:
    lost: concurrent.futures.Future = concurrent.futures.Future()
    lost.set_exception(EngineDiedError("killed by signal 9"))
    group._watchdog.watch("engine 0", lost, goes_on=lambda error: False)
    for rank, actor in enumerate(group.workers):
        actor.call = types.SimpleNamespace(remote=lambda method, rank=rank: Later(rank))
    assert group.call("train") == [0, 1, 2, 3]
    with pytest.raises(EngineDiedError):
        group._watchdog.wait(concurrent.futures.Future(), name="rollout", owner="the engines", timeout_s=30)
