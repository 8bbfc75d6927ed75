"""A watch over a run's engines: their own metrics, and limits of requests in flight that follow from them."""

import asyncio
from collections import Counter, defaultdict

from megatron_rl.config.derived import FEWEST_REQUESTS
from megatron_rl.config.settings import RolloutSettings
from megatron_rl.engines.answers import EngineLoad
from megatron_rl.engines.client import EngineClient
from megatron_rl.engines.engine_pool import EnginePool
from megatron_rl.observe.live_state import EngineState
from megatron_rl.observe.metrics import Max, Mean, Metric, Min, Sum
from megatron_rl.system.deadlines import SILENT_S

POLL_S = 1.0
"""Time between two looks. A look reads shared memory of the server and costs an HTTP call of 1 ms, never a turn of its scheduler."""
LOW_USE, SOFT_USE, HARD_USE = 0.6, 0.8, 0.9  # shares of the key-value pool held by running requests
SOFT_CUT, HARD_CUT = 0.9, 0.7


def first_limit(pool_tokens: int, *, longest_sequence: int) -> int:
    """Return a number of requests that fits into `pool_tokens` at the longest length: the start and the floor of a limit."""
    return max(FEWEST_REQUESTS, pool_tokens // longest_sequence)


def next_limit(limit: int, load: EngineLoad, *, floor: int, num_running: int, num_answers: int, num_retracted: int, wanted: bool) -> int:
    """Return an engine's limit of requests in flight after a look.

    Answers, and retracted requests among them, count since the limit's last change or turnover, which
    is an answer for each place of the limit. `wanted`: requests wait for a slot. The use follows the
    limit only as requests run, and a retraction is known from the late answer: so the limit grows, by
    a quarter of `floor`, and falls for retractions at turnovers alone, and a fall awaits that as few
    run. A steady engine below LOW_USE stays below SOFT_USE by one growth, so that the limit settles.
    Below half of LOW_USE it doubles, to be there within a first step.
    """
    turnover = num_answers >= limit
    if load.kv_use > SOFT_USE or (turnover and num_retracted):
        fallen = limit * (HARD_CUT if load.kv_use > HARD_USE or (turnover and num_retracted) else SOFT_CUT)
        # Few requests, as in a step's tail, say nothing about the limit.
        return max(floor, int(fallen)) if fallen <= num_running <= limit else limit
    grows = turnover and wanted and load.kv_use < LOW_USE and not load.num_waiting
    growth = limit if load.kv_use < LOW_USE / 2 else max(1, floor // 4)
    return limit + growth if grows else limit


class EngineWatch:
    """Looks at the engines of a pool while they work; use in an `async with` block.

    With `longest_sequence`, tokens, each engine's limit follows its key-value pool; without, limits
    are the pool's.
    """

    def __init__(self, pool: EnginePool, *, longest_sequence: int | None) -> None:
        self._pool, self._longest = pool, longest_sequence
        self._loads: defaultdict[EngineClient, list[tuple[EngineLoad, int]]] = defaultdict(list)  # with requests in flight, of this step
        self._newest: dict[EngineClient, EngineLoad] = {}
        self._served: dict[EngineClient, Counter[str]] = {}  # until the end of the last step
        self._turned: dict[EngineClient, Counter[str]] = {}  # until the limit's last change or turnover
        self._seen: dict[EngineClient, tuple[float | None, int, float]] = {}  # report, ended calls, when one was new
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "EngineWatch":
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None, "entered before"
        self._task.cancel()
        await asyncio.wait([self._task])
        if not self._task.cancelled():
            self._task.result()

    def begin(self, client: EngineClient) -> None:
        """Give an engine its first limit, where limits follow the engines."""
        if self._longest is not None:
            self._pool.set_limit(client, first_limit(client.address.max_total_tokens, longest_sequence=self._longest))

    def states(self) -> tuple[EngineState, ...]:
        """Return the state of every member, with the queue and memory of the last look. Safe in any thread."""
        return tuple(
            EngineState(
                url=client.address.url,
                requests=self._pool.running(client),
                limit=self._pool.limit(client),
                answers=client.served["answers"],
                queue=None if (load := self._newest.get(client)) is None else load.num_waiting,
                kv_use=None if load is None else load.kv_use,
            )
            for client in self._pool.membership.members
        )

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(POLL_S)
            if self._pool.num_running or any(client.pending.total() for client in self._pool.membership.members):
                await self.look()
            else:
                # Silence counts from the beginning of work.
                now_s = asyncio.get_running_loop().time()
                self._seen = {client: (report, ended, now_s) for client, (report, ended, _) in self._seen.items()}

    async def look(self) -> None:
        """Ask every engine for its load, and move its limit; have one that makes no progress looked at."""
        clients, router = self._pool.membership.members, self._pool.router
        if router is not None:
            await router.load()
        for client, load in zip(clients, await asyncio.gather(*(client.load() for client in clients)), strict=True):
            self._suspect(client, load)
            if load is None:
                continue
            self._newest[client] = load
            if self._pool.num_running:
                self._loads[client].append((load, self._pool.running(client)))
                if self._longest is not None:
                    self._move(client, load, longest_sequence=self._longest)

    def _suspect(self, client: EngineClient, load: EngineLoad | None) -> None:
        """Have an engine looked at that has requests, or calls of a sync, and for SILENT_S seconds neither made a step nor ended a call."""
        now_s, report = asyncio.get_running_loop().time(), None if load is None else load.told_at
        seen, ended, since_s = self._seen.get(client, (None, client.num_ended, now_s))
        is_asked = client.pending.total() or (self._pool.running(client) and not client.is_paused)
        if report is not None and report != seen:
            client.stepped_s = now_s
        if (report is not None and report != seen) or client.num_ended != ended or not is_asked:
            self._seen[client] = report, client.num_ended, now_s
        elif now_s - since_s > SILENT_S:
            self._seen[client] = seen, ended, now_s
            self._pool.end_hanging(client, report is not None, client.pending[True] > 0)
        else:
            self._seen[client] = seen, ended, since_s

    def _move(self, client: EngineClient, load: EngineLoad, *, longest_sequence: int) -> None:
        new = client.served - self._turned.get(client, Counter())
        limit = self._pool.limit(client)
        moved = next_limit(
            limit,
            load,
            floor=first_limit(client.address.max_total_tokens, longest_sequence=longest_sequence),
            num_running=self._pool.running(client),
            num_answers=new["answers"],
            num_retracted=new["retractions"],
            wanted=self._pool.has_waiting,
        )
        if moved != limit or new["answers"] >= limit:
            self._turned[client] = Counter(client.served)
            self._pool.set_limit(client, moved)

    def metrics(self) -> dict[str, Metric]:
        """Return metrics `engine/*` since the last call; nothing of what no engine told."""
        loads, self._loads = list(self._loads.values()), defaultdict(list)
        clients, before = self._pool.membership.members, self._served
        self._served = {client: Counter(client.served) for client in clients}
        served = [client.served - before.get(client, Counter()) for client in clients]
        asked = [each for each in served if each["prompt_tokens"]]
        metrics: dict[str, Metric] = {}
        if loads:
            metrics |= _load_metrics(loads)
        if self._longest is not None and clients:
            metrics["engine/request_limit"] = Mean(sum(map(self._pool.limit, clients)), len(clients))
        if asked:
            hits, tokens = [each["cached_tokens"] for each in asked], [each["prompt_tokens"] for each in asked]
            shares = [hit / num for hit, num in zip(hits, tokens, strict=True)]
            metrics["engine/prefix_hits"] = Mean(sum(hits), sum(tokens))
            metrics |= {"engine/prefix_hits_min": Min(min(shares)), "engine/prefix_hits_max": Max(max(shares))}
            retractions = [each["retractions"] for each in asked]
            metrics |= {"engine/retractions": Sum(sum(retractions)), "engine/retractions_max": Max(max(retractions))}
            paces = [each["milliseconds"] / 1000 / each["tokens"] for each in asked if each["tokens"]]
            metrics |= {"engine/token_s_of_fastest": Min(min(paces)), "engine/token_s_of_slowest": Max(max(paces))} if paces else {}
        return metrics


def watched_pool(rollout: RolloutSettings, *, longest_turn: int, max_tokens: int) -> tuple[EnginePool, EngineWatch]:
    """Return an empty pool and its watch. Sequences have at most the tokens of `longest_turn`, of own code `max_tokens`."""
    limit = rollout.max_concurrent_requests
    pool = EnginePool(max_requests=limit or FEWEST_REQUESTS)
    longest = longest_turn if rollout.is_single_turn else max_tokens
    return pool, EngineWatch(pool, longest_sequence=None if limit else longest)


def _load_metrics(loads: list[list[tuple[EngineLoad, int]]]) -> dict[str, Metric]:
    """Return the metrics of looks, a list of at least one for each engine."""
    uses = [[load.kv_use for load, _ in each] for each in loads]
    queues = [load.num_waiting for each in loads for load, _ in each]
    running = [number for each in loads for _, number in each]
    means = [sum(each) / len(each) for each in uses]
    return {
        "engine/kv_use": Mean(sum(map(sum, uses)), len(queues)),
        "engine/kv_use_max": Max(max(map(max, uses))),
        "engine/kv_use_of_idlest": Min(min(means)),
        "engine/kv_use_of_busiest": Max(max(means)),
        "engine/requests": Mean(sum(running), len(running)),
        "engine/queue": Mean(sum(queues), len(queues)),
        "engine/queue_max": Max(max(queues)),
    }
