"""Stand-ins for Ray's actors and the servers of a whole run."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_rl.algorithms.rounding_limits import Expected
from megatron_rl.config.settings import Settings
from megatron_rl.data.token_values import NOTHING_RECORDED
from megatron_rl.engines.answers import Generation
from megatron_rl.engines.engine import EngineAddress
from megatron_rl.engines.engine_pool import EnginePool
from megatron_rl.engines.sampling import Sampling
from megatron_rl.observe.metrics import Last, Metric, Sum
from megatron_rl.observe.spans import Spans
from megatron_rl.types import Floats, Ints, StopReason, TrainBatch
from megatron_rl.weights.sync import Prove

ADDRESS = EngineAddress("url", "key", vocab_size=32, context_length=64, max_total_tokens=64, has_tokenizer=False)


class Ranks:
    """Ranks whose weights do not change: one token has log-prob -1."""

    gpus = ()
    has_died = False
    recorded = NOTHING_RECORDED

    def __init__(self, settings: Settings, **_: object) -> None:
        self.batches: list[TrainBatch] = []
        self.spans = Spans()

    def check(self, checkpoint: Path) -> None:
        assert (checkpoint / "manifest.json").is_file()

    def start(self) -> None:
        return None

    def train(self, batch: TrainBatch, *, step: int, expected: Expected | None, rows: Any = ()) -> list[dict[str, Metric]]:
        return [{"train/num_tokens": Sum(float(batch.loss_mask.sum()))}]

    def log_probs(self, batch: TrainBatch, *, temperature: float) -> Floats:
        return np.full(len(batch.tokens), -1.0, np.float32)

    def call(self, method: str, *args: Any, **keywords: Any) -> list[Any]:
        return [getattr(self, method)(*args, **keywords)]

    def begin_save(self, directory: Path, *, hf: Path) -> None:
        hf.mkdir()
        directory.mkdir()
        (directory / "manifest.json").touch()

    def finish_save(self) -> None:
        return None

    def save_is_written(self) -> bool:
        return True


class Engines:
    """A group of one server."""

    stopped = 0

    def __init__(self, settings: Settings, **_: object) -> None:
        pass

    def begin_start(self) -> list[Any]:
        return []

    def finish_start(self, starting: list[Any]) -> list[EngineAddress]:
        return [ADDRESS]

    def watch(self, number: int, *, goes_on: object) -> None:
        assert number == 0

    def stop(self) -> None:
        Engines.stopped += 1


class Client:
    """An engine that gives token 2 + k as the k-th response, and log-prob -1 to everything."""

    version, weights = 0, ""

    def __init__(self, address: EngineAddress, **_: object) -> None:
        self.address = address
        self.served: Counter[str] = Counter()
        self.is_paused, self.pending, self.num_ended, self.stepped_s = False, Counter[bool](), 0, 0.0
        Client.weights = "made up"

    async def __aenter__(self) -> "Client":
        return self

    async def __aexit__(self, *_: object) -> None:
        return None

    async def generate(self, token_ids: Ints, *, sampling: Sampling, num_samples: int = 1) -> tuple[Generation, ...]:
        made = np.array([Client.version])
        return tuple(Generation(np.array([2 + k]), np.full(1, -1.0, np.float32), made, StopReason.STOP) for k in range(num_samples))

    async def score(self, sequences: Sequence[Ints]) -> list[Floats]:
        return [np.full(len(ids), -1.0, np.float32) for ids in sequences]

    async def load(self) -> None:
        """Nothing is known; a test on a busy machine is long enough to be asked."""

    async def checksums(self) -> dict[str, str]:
        return {"head": Client.weights}

    async def load_weights(self, path: Path, *, version: int, timeout_s: float) -> None:
        assert path.name == "model"


class Sync:
    """The way of the weights."""

    def __init__(self, make_transport: object, *, pool: EnginePool, **_: object) -> None:
        self._pool = pool

    async def connect(self) -> None:
        return None

    async def run(self, *, version: int, prove: Prove | None) -> dict[str, Metric]:
        Client.version, Client.weights = version, "synced"
        self._pool.admit(self._pool.membership.members)
        return {"weights/version": Last(version)}
