"""All Megatron ranks as one object for the driver, and the Ray actor of one rank."""

import atexit
import gc
import itertools
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from megatron_rl.algorithms.rounding_limits import Expected
from megatron_rl.checkpoints import training_state
from megatron_rl.config.derived import DEADLINE, start_deadline_s, step_deadline_s
from megatron_rl.config.settings import Settings
from megatron_rl.data.token_values import NOTHING_RECORDED, TokenValues
from megatron_rl.engines.engine import free_port
from megatron_rl.errors import UserError
from megatron_rl.observe.metrics import Metric, merge_metrics
from megatron_rl.observe.spans import Span, Spans
from megatron_rl.runtime.cluster import Reservation, enter_directory, gpu_order, own_gpus
from megatron_rl.runtime.watchdog import Watchdog
from megatron_rl.system.deadlines import RANK_ANSWER_S, RANKS_START_S
from megatron_rl.system.stacks import answer_stack_requests
from megatron_rl.training.token_record import TokenRecord
from megatron_rl.training.trainer import Trainer
from megatron_rl.training.whole_batch import divide
from megatron_rl.types import Floats, Shard, TrainBatch
from megatron_rl.weights.transport import SenderPlan, Sent, WeightSender

OWNER = "Megatron rank"
"""What a rank is called in messages, before its number."""


@ray.remote(concurrency_groups={"watch": 2})
class TrainerWorker:
    """The process of one Megatron rank, with a `Trainer` from `start` on."""

    def __init__(self) -> None:
        answer_stack_requests()
        self._trainer: Trainer | None = None
        self._sender: WeightSender | None = None
        self._claims: list[socket.socket] = []  # of ports at which this process listens

    @ray.method(concurrency_group="watch")
    def hold(self) -> None:
        """Never return, beside the other calls: the caller learns of this actor's death."""
        threading.Event().wait()

    @ray.method(concurrency_group="watch")
    def stack(self) -> list[str]:
        """Return the Python stack of the call in progress, the innermost frame last; empty without a call."""
        threads = [traceback.extract_stack(frame) for frame in sys._current_frames().values()]
        own = [stack for stack in threads for frame in stack if frame.filename == __file__ and frame.name not in ("hold", "stack")][:1]
        return [f"{frame.name} ({frame.filename}:{frame.lineno})" for stack in own for frame in stack]

    def take_place(self, directory: Path) -> tuple[str, ...]:
        """Work in `directory` from now on; return the GPUs that Ray gave this process, by node-local name."""
        enter_directory(directory)
        return own_gpus()

    def address(self) -> tuple[str, int]:
        """Return an address of this node and a free port, for a rendezvous served by this rank."""
        address = ray.util.get_node_ip_address()
        self._claims.append(socket.socket(socket.AF_UNIX))
        return address, free_port(address, claim=self._claims[-1])

    def check(self, checkpoint: Path, *, share: int, num_shares: int) -> None:
        """Compare this share of a checkpoint's files with the manifest."""
        training_state.check_files(checkpoint, share=(share, num_shares))

    def start(self, make_trainer: Callable[..., Trainer], *, rank: int, init_method: str) -> int:
        """Build the model and the optimizer as this rank; return the data-parallel rank.

        The rank follows from the GPUs that Ray gives to all ranks, known once all processes run.
        """
        self._trainer = make_trainer(rank=rank, init_method=init_method)
        spare_what_is_loaded()
        return self._trainer.dp_rank

    def apply(self, function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        """Call `function` with the trainer and these arguments."""
        return function(self._trainer, **arguments)

    def call(self, method: str, *args: Any, **keywords: Any) -> Any:
        """Return the result of a method of this rank's Trainer, or the value of a property.

        Raises UserError for an exit, with which Ray would end the rank without naming the cause.
        """
        found = getattr(self._trainer, method)
        try:
            return found(*args, **keywords) if callable(found) else found
        except SystemExit as error:
            raise UserError(
                f"a plug-in of the objective raised SystemExit({error.code!r}) in {method}, needs to return, or to raise an Exception"
            ) from error

    def train(
        self, shard: Shard, *, rows: Collection[int], expected: Expected | None
    ) -> tuple[list[dict[str, Metric]], TokenValues, list[Span]]:
        """Train on this rank's shard; return its shares of metrics and of values of `rows`, and spans."""
        assert self._trainer is not None, "started before"
        record = TokenRecord(shard, rows)
        return self.call("train_shard", shard, expected=expected, record=record), record.values(), self._trainer.spans.take()

    def open_sender(self, plan: SenderPlan, *, rank: int) -> None:
        """Open this rank's end of the transport to the engines."""
        assert self._trainer is not None, "started before"
        self._sender = plan.open(self._trainer, rank=rank)

    def call_sender(self, method: str, **keywords: Any) -> Any:
        """Call a method of the open end."""
        return getattr(self._sender, method)(**keywords)


class TrainerGroup:
    """One actor per rank, called together; the first failure ends the call."""

    def __init__(self, settings: Settings, *, reservation: Reservation, watchdog: Watchdog) -> None:
        self._settings = settings
        self._step_deadline_s = step_deadline_s(settings.model)
        self._watchdog = watchdog
        # Of every rank, once all have started.
        self._dp_ranks: list[int] = []
        self.recorded, self.spans = NOTHING_RECORDED, Spans()
        self._checked: Path | None = None
        self._deaths: list[Future[None]] = []  # of every process, also one that never ran on a node that is lost
        self._holds: list[Future[None]] = []  # the same by rank, once all processes run
        self._nodes = [
            [TrainerWorker.options(**reservation.rank_options(node)).remote() for _ in share.ranks]  # type: ignore[attr-defined]
            for node, share in enumerate(reservation.placement.nodes)
        ]

    @cached_property
    def _seated(self) -> list[tuple[Any, tuple[str, ...]]]:
        """The actor of every rank and its GPUs; on each node in the order of these, which Ray deals out in any."""
        workers = [worker for node in self._nodes for worker in node]
        deaths = {worker: worker.hold.remote().future() for worker in workers}
        self._deaths = list(deaths.values())
        refs = [worker.take_place.remote(Path.cwd()) for worker in workers]
        answers = self._watchdog.wait_for_all(refs, name="starting the processes of the ranks", owner=OWNER, timeout_s=RANKS_START_S)
        gpus = dict(zip(workers, answers, strict=True))
        seated = [(worker, gpus[worker]) for node in self._nodes for worker in sorted(node, key=lambda one: gpu_order(gpus[one]))]
        self._holds = [deaths[worker] for worker, _ in seated]
        for rank, hold in enumerate(self._holds):
            self._watchdog.watch(f"{OWNER} {rank}", hold)
        return seated

    @property
    def workers(self) -> list[Any]:
        """The actors by rank."""
        return [worker for worker, _ in self._seated]

    @property
    def gpus(self) -> list[tuple[str, ...]]:
        """Return the GPUs of every rank, by node-local name: one, or none on the CPU."""
        return [gpus for _, gpus in self._seated]

    def check(self, checkpoint: Path) -> None:
        """Compare the files of a checkpoint with the manifest before `start`, a share on each rank's own node.

        Raises DamagedCheckpointError.
        """
        num_shares = len(self.workers)
        refs = [worker.check.remote(checkpoint, share=share, num_shares=num_shares) for share, worker in enumerate(self.workers)]
        self._wait(refs, name="comparing the checkpoint with its manifest")
        self._checked = checkpoint

    def start(self) -> None:
        """Let every rank build the model, and wait. Engines may read the same files meanwhile."""
        (address, port), make = self.free_address(), partial(Trainer.of, self._settings)
        init_method = f"tcp://{address}:{port}"
        refs = [worker.start.remote(make, rank=rank, init_method=init_method) for rank, worker in enumerate(self.workers)]
        limits: dict[str, Any] = {"timeout_s": start_deadline_s(self._settings.model), "see": DEADLINE}
        self._dp_ranks = self._watchdog.wait_for_all(refs, name="starting the Megatron ranks", owner=OWNER, **limits)

    @property
    def has_died(self) -> bool:
        """Return True when the process of a rank has ended."""
        return any(death.done() for death in self._deaths)

    def stacks(self, *, timeout_s: float = RANK_ANSWER_S) -> list[list[str] | None]:
        """Return the stack of every rank's call, as `TrainerWorker.stack`; None for a rank that does not answer or has died."""
        # Without holds not all processes run, and their places are not known.
        refs = [worker.stack.remote() for worker in self.workers] if self._holds else []
        answered, _ = ray.wait(refs, num_returns=len(refs), timeout=timeout_s)
        return [_answer(ref) if ref in answered else None for ref in refs]

    def end(self) -> None:
        """Kill every rank; what is in its memory is lost."""
        for worker in itertools.chain(*self._nodes):
            ray.kill(worker)

    def check_answers(self) -> None:
        """Raise DeadlineError when a rank takes no call within RANK_ANSWER_S, to avoid a second long wait."""
        refs = [worker.call.remote("save_is_written") for worker in self.workers]
        self._watchdog.wait_for_all(refs, name="asking whether the ranks still answer", owner=OWNER, timeout_s=RANK_ANSWER_S)

    def call(self, method: str, *args: Any, **keywords: Any) -> list[Any]:
        """Return the results of a method or property of `Trainer`, by rank, within the deadline of a step."""
        return self._wait([worker.call.remote(method, *args, **keywords) for worker in self.workers], name=method)

    def _wait(self, refs: list[ray.ObjectRef], *, name: str) -> list[Any]:
        # The loss of engines must not cost a step that is being trained.
        return self._watchdog.wait_for_all(refs, name=name, owner=OWNER, timeout_s=self._step_deadline_s, see=DEADLINE, outlasts=True)

    def train(
        self, batch: TrainBatch, *, step: int, expected: Expected | None = None, rows: Collection[int] = ()
    ) -> list[dict[str, Metric]]:
        """Train on one rollout batch; return each optimizer step's merged metrics, `recorded` are values of the sequences `rows`.

        Raises ParityError as `Trainer.train_shard`.
        """
        training = self._settings.training
        shards = divide(batch, training, seed=self._settings.run.seed + step)
        stored = [ray.put(shard) for shard in shards]
        ranks = zip(self.workers, self._dp_ranks, strict=True)
        refs = [worker.train.remote(stored[dp_rank], rows=rows, expected=expected) for worker, dp_rank in ranks]
        metrics, values, spans = zip(*self._wait(refs, name=f"training of step {step + 1}"), strict=True)
        self.recorded = TokenValues.joined(values)
        for rank, each in enumerate(spans):
            self.spans.extend(each, who=f"rank {rank}")
        return [merge_metrics(shares) for shares in zip(*metrics, strict=True)]

    def apply(self, function: Callable[..., Any], /, **arguments: Any) -> list[Any]:
        """Call `function(trainer, **arguments)` in the process of each rank; return the answers in order."""
        return self._wait([worker.apply.remote(function, arguments) for worker in self.workers], name="apply")

    def log_probs(self, batch: TrainBatch, **distribution: Any) -> Floats:
        """Return log-probs [T] of the batch's tokens under the current weights, as `Trainer.own_log_probs`."""
        log_probs: Floats = self.call("own_log_probs", batch, **distribution)[0]
        return log_probs

    def load(self, directory: Path, *, weights_only: bool) -> tuple[str, ...]:
        """Continue from a checkpoint, as `Trainer.load`; files compared by `check` are not compared again."""
        return self.call("load", directory, weights_only=weights_only, checked=directory == self._checked)[0]

    def free_address(self) -> tuple[str, int]:
        """Return an address of rank 0's node and a free port."""
        asked = [self.workers[0].address.remote()]
        return self._watchdog.wait_for_all(asked, name="finding a free port", owner=OWNER, timeout_s=RANKS_START_S)[0]

    def begin_open_sender(self, plan: SenderPlan) -> list[Future[None]]:
        """Let every rank open the sending end of the transport to the engines."""
        stored = ray.put(plan)
        return [worker.open_sender.remote(stored, rank=rank).future() for rank, worker in enumerate(self.workers)]

    def begin_close_sender(self) -> list[Future[None]]:
        """Let every rank close the sending end of the transport to the engines."""
        return [worker.call_sender.remote("close").future() for worker in self.workers]

    def begin_send(self, *, version: int, checked: bool) -> list[Future[Sent]]:
        """Let every rank send the current weights to the engines, `checked` with checksums."""
        return [worker.call_sender.remote("send", version=version, checked=checked).future() for worker in self.workers]


def _answer(ref: ray.ObjectRef) -> list[str] | None:
    """Return what a rank has answered, None from a dead one."""
    try:
        return ray.get(ref)
    except RayError:
        return None


def printed_stacks(stacks: Sequence[list[str] | None]) -> list[str]:
    """Return the result of `TrainerGroup.stacks` as text, one for each rank."""
    return [f"{OWNER} {rank}\n" + "\n".join(["does not answer"] if stack is None else stack) for rank, stack in enumerate(stacks)]


def spare_what_is_loaded() -> None:
    """Exclude all existing objects from later collections; call after all imports and construction.

    Torch, transformers and Ray have 250,000 objects. A full collection walks all of them in 0.15 s,
    in every second or third step; SGLang does the same in its own processes.
    """
    gc.collect()
    gc.freeze()
    # Triton's binding prints pages of "leaked" functions when the last collection, at the end of
    # Python, skips them.
    atexit.register(gc.unfreeze)
