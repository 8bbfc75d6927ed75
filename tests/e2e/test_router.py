"""SGLang's own router between a pool and two real servers."""

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from engine_parts import make_model
from small_run import beyond_loopback, exposures, listeners, rl_arguments
from test_exact_resume import assert_same_run

from megatron_rl.engines.client import EngineClient
from megatron_rl.engines.engine import Engine, EngineAddress
from megatron_rl.engines.engine_pool import EnginePool
from megatron_rl.engines.sampling import Sampling
from megatron_rl.engines.server_args import server_arguments
from megatron_rl.engines.sglang_router import Router
from megatron_rl.errors import EngineError, EngineRefusal

pytestmark = pytest.mark.slow
Engines = list[tuple[Engine, EngineAddress]]
GREEDY = Sampling(temperature=0.0, max_tokens=8)


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    directory = tmp_path_factory.mktemp("engines")
    make_model(directory / "model", seed=0)
    arguments = server_arguments({"router": {}}, model_path=directory / "model", device_kind="cpu", dtype="float32", seed=0)
    made = [Engine(arguments, log_path=directory / f"engine-{number}.log") for number in range(2)]
    with ThreadPoolExecutor(2) as threads:
        try:
            yield list(zip(made, threads.map(Engine.start, made), strict=True))
        finally:
            list(threads.map(Engine.stop, made))


@asynccontextmanager
async def routed(engines: Engines, log: Path) -> AsyncIterator[tuple[EnginePool, Router, list[EngineClient]]]:
    clients = [EngineClient(address, request_timeout_s=60) for _, address in engines]
    pool = EnginePool(clients, max_requests=8)
    fields = {"balance_abs_threshold": 0, "balance_rel_threshold": 1.0}
    async with clients[0], clients[1], Router(fields, pool=pool, log_path=log, request_timeout_s=60) as pool.router:
        yield pool, pool.router, clients


def prompt(number: int) -> np.ndarray:
    return np.arange(5) + number


def test_answers_are_those_of_engines_and_name_them(engines: Engines, tmp_path: Path) -> None:
    async def work() -> None:
        async with routed(engines, tmp_path / "router.log") as (_, router, clients):
            # Routed requests begin together, so that the router shares them out.
            routed_answers = await asyncio.gather(*(router.generate(prompt(n), sampling=GREEDY, num_samples=2) for n in range(8)))
            served = [client.served["answers"] for client in clients]
            assert sum(served) == 16 and min(served) > 0
            for number, answers in enumerate(routed_answers):
                (direct,) = await clients[0].generate(prompt(number), sampling=GREEDY)
                assert all(answer.token_ids.tolist() == direct.token_ids.tolist() for answer in answers)
                assert all(np.allclose(answer.log_probs, direct.log_probs, atol=1e-5) for answer in answers)
            for key in (router.address.api_key, *(client.address.api_key for client in clients)):
                assert exposures(key, tmp_path) == []
            listening = psutil.Process(router._process.pid).net_connections()
            assert {link.laddr.ip for link in listening if link.status == psutil.CONN_LISTEN} == {"127.0.0.1"}

    asyncio.run(work())


def test_the_router_follows_the_pool_and_its_own_end(engines: Engines, tmp_path: Path) -> None:
    """A refused request is nobody's fault, however often; an engine that fails is retired, and gets no more."""

    async def work() -> None:
        async with routed(engines, tmp_path / "router.log") as (pool, router, (_, second)):
            for _ in range(30):
                with pytest.raises(EngineRefusal, match="HTTP 400"):
                    await router._call("POST", "/generate", {"input_ids": [10**6]}, timeout_s=20)
            assert len(pool.usable) == 2
            pool.retire(second, EngineError("it failed"))
            before = second.served["answers"]
            await asyncio.gather(*(router.generate(prompt(n), sampling=GREEDY) for n in range(6)))
            assert second.served["answers"] == before
            pool.readmit()
            router._process.kill()
            await asyncio.gather(*(router.generate(prompt(n), sampling=GREEDY) for n in range(6)))
            await router.load()
            assert router.loads.keys() == pool.usable.keys()

    asyncio.run(work())


def test_a_cancelled_request_ends_on_its_engine(engines: Engines, tmp_path: Path) -> None:
    async def work() -> None:
        async with routed(engines, tmp_path / "router.log") as (pool, router, clients):
            asking = asyncio.create_task(router.generate(prompt(0), sampling=Sampling(temperature=1.0, max_tokens=480), num_samples=4))
            while sum(router.loads.values()) < 4:
                await asyncio.sleep(0.02)
                await router.load()
            assert [pool.running(client) for client in clients] == [2, 2]
            asking.cancel()
            await asyncio.wait([asking])
            for client in clients:
                # A server with a running request refuses it.
                await client.flush_cache()
            await router.load()
            assert [pool.running(client) for client in clients] == [0, 0]

    asyncio.run(work())


def test_an_engine_that_lies_is_retired_and_not_the_other(engines: Engines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        async with routed(engines, tmp_path / "router.log") as (pool, router, (first, second)):
            monkeypatch.setattr(second, "address", second.address.__class__(second.address.url, second.address.api_key, 1, 512, 512, True))
            asked = [router.generate(prompt(n), sampling=GREEDY) for n in range(4)]
            answers = await asyncio.gather(*asked, return_exceptions=True)
            assert {type(answer) for answer in answers} == {tuple, EngineError}
            assert pool.usable.keys() == {first.address.url}

    asyncio.run(work())


@pytest.mark.timeout(900)
def test_a_run_through_the_router_is_the_run_without(task: Path, tmp_path: Path, start: Callable[..., Any]) -> None:
    """Engines are deterministic: also after the deaths of an engine and of the router, training is the same."""
    exact = ("rollout.sglang.enable_deterministic_inference=true", "rollout.sampling.max_response_tokens=8", "rollout.num_engines=2")
    exact += ("run.num_steps=6", "run.save_interval=1", "run.keep_checkpoints=100", "reward.function=tests.e2e.one_by_one:slow_score")
    exact += ("reward.args={seconds: 0.02}", "eval.interval=3")
    whole = start(*rl_arguments(task, tmp_path / "whole", *exact))
    assert whole.wait() == 0, whole.output
    run = start(*rl_arguments(task, tmp_path / "run", *exact, "rollout.sglang.router={cache_threshold: 0.5}"))
    for step, words in ((1, "engines.sglang_server"), (3, "engines.sglang_router")):
        run.wait_for(f"\n{step}/6 ")
        assert beyond_loopback(listeners(run)) == {}
        run.members(words)[0].kill()
    assert run.wait() == 0, run.output
    assert run.survivors() == []
    assert len(re.findall(r"engine \d is back after \d+ s", " ".join(run.output.split()))) == 1, run.output
    assert_same_run(tmp_path / "run", tmp_path / "whole")
    for path in (tmp_path / "whole" / "evaluation").rglob("*.jsonl"):
        assert (tmp_path / "run" / path.relative_to(tmp_path / "whole")).read_text() == path.read_text()
