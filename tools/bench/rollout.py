"""The rollout side of a run, without a trainer: what it adds to the engines' own time, and what it bears.

    python tools/bench/rollout.py [--only single tools control tails] [--turns 3] [--small]

- `single`: tokens/s of the manager, with client, rewards, buffer and batch, against a bare flood of the same requests, an HTTP call each,
  on the same real server; goals 1.0 with 64 in flight and 0.95 with 256.
- `tools`: the same for environments on the driver's event loop and in processes, against a flood whose requests wait for the one before
  in their trajectory; goal 0.95. Prefixes broken between turns; goal 0. Agents that ask the endpoint, against the loop; goal 0.95.
- `control`: samples/s of one driver with stub engines, 64 in flight at each, and the cores that driver, reward workers and stub take.
- `tails`: seconds for the same steps by each order of training, with stub engines whose answers have long-tailed lengths and real waits,
  1 ms a token. No policy learns here: this is speed alone.

The policy is that of `shop_task.py`. Figures of a pair are taken in turns; a flood's requests are recorded from ours.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import aiohttp
import psutil
from shop_task import TURNS, write_task

from megatron_rl.config.load import load_settings
from megatron_rl.config.settings import Settings
from megatron_rl.data.source import RunPrompts
from megatron_rl.engines.client import EngineClient
from megatron_rl.engines.engine import Engine, EngineAddress
from megatron_rl.engines.server_args import server_arguments
from megatron_rl.observe.console import PhaseProgress
from megatron_rl.rollout.manager import RolloutManager

STUB = Path(__file__).with_name("stub_engine.py")
SAMPLES, ANSWER_TOKENS, QUIET = 8, 18, PhaseProgress("rollout", total=None, unit="")
Asked = tuple[dict[str, Any], dict[str, Any]]  # a request for one sample, and its answer


def settings_for(task: Path, *, samples: int, in_flight: int, answer: int = 128, overrides: Sequence[str] = ()) -> Settings:
    """Return settings of a run with `samples` in each step, of `answer` tokens at most."""
    paths = (f"run.directory={task}/run", f"model.path={task}/model", f"data.train={task}/rows.jsonl", "run.num_steps=1")
    sizes = (f"data.prompts_per_step={samples // SAMPLES}", f"data.samples_per_prompt={SAMPLES}", f"rollout.max_turns={TURNS}")
    limits = (f"rollout.sampling.max_response_tokens={answer}", f"rollout.max_concurrent_requests={in_flight}")
    engine = ("rollout.sglang.max_total_tokens=131072", "training.max_tokens_per_micro_batch=4096")
    return load_settings(None, [*paths, *sizes, *limits, *engine, "reward.function=examples.arithmetic.reward:score", *overrides])


@asynccontextmanager
async def opened(settings: Settings, addresses: Sequence[EngineAddress]) -> AsyncIterator[RolloutManager]:
    """Yield the manager of a run with a new buffer."""
    prompts = RunPrompts.read(settings.model.path, settings.data, seed=0)
    with tempfile.TemporaryDirectory() as directory:
        (settings.run.directory / "logs").mkdir(parents=True, exist_ok=True)
        async with RolloutManager.open(settings, prompts=prompts, buffer=Path(directory) / "buffer.sqlite") as manager:
            await manager.join(addresses, serve_current=True)
            yield manager


async def ours(settings: Settings, address: EngineAddress) -> tuple[float, list[Asked]]:
    """Return tokens/s of a step, and what it asked the engine, in the order of the answers."""
    made: list[Asked] = []
    ask = EngineClient._ask

    async def recorded(self: EngineClient, asked: Sequence[dict[str, Any]]) -> list[Any]:
        answers = await ask(self, asked)
        made.extend(zip(asked, answers, strict=True))
        return answers

    with patch.object(EngineClient, "_ask", recorded):
        async with opened(settings, [address]) as manager:
            await manager.clients[0].flush_cache()
            begun_s = time.perf_counter()
            await manager.next_batch(0, progress=QUIET)
            seconds = time.perf_counter() - begun_s
    return sum(len(answer["output_ids"]) for _, answer in made) / seconds, made


def chains_of(made: Sequence[Asked]) -> list[list[dict[str, Any]]]:
    """Return the requests of each trajectory in their order: a further one begins with the longest answered before."""
    chains: list[tuple[list[int], list[dict[str, Any]]]] = []
    for asked, answer in made:
        prompt, rest = asked["input_ids"], {name: asked[name] for name in ("input_ids", "sampling_params")}
        found = max((chain for chain in chains if prompt[: len(chain[0])] == chain[0]), key=lambda chain: len(chain[0]), default=None)
        earlier = [] if found is None else chains.pop(chains.index(found))[1]
        chains.append(([*prompt, *answer["output_ids"]], [*earlier, rest]))
    return [requests for _, requests in chains]


def num_broken(chains: Sequence[Sequence[dict[str, Any]]]) -> int:
    """Return the chains that begin behind another one's first prompt; a trajectory begun again has the same."""
    firsts = [chain[0]["input_ids"] for chain in chains]
    return sum(any(len(one) < len(each) and each[: len(one)] == one for one in firsts) for each in firsts)


async def flood(chains: Sequence[Sequence[dict[str, Any]]], address: EngineAddress, *, in_flight: int) -> float:
    """Return tokens/s of the same requests, each in an HTTP call, by a client that does nothing with the answers."""
    bodies = [[json.dumps({**asked, "return_logprob": True}).encode() for asked in chain] for chain in chains]
    answers: list[bytes] = []
    headers = {"Authorization": f"Bearer {address.api_key}", "Content-Type": "application/json"}
    async with aiohttp.ClientSession(headers=headers, connector=aiohttp.TCPConnector(limit=in_flight)) as session:

        async def follow(chain: Sequence[bytes]) -> None:
            for body in chain:
                async with session.post(f"{address.url}/generate", data=body) as response:
                    answers.append(await response.read())

        (await session.post(f"{address.url}/flush_cache")).release()
        begun_s = time.perf_counter()
        await asyncio.gather(*map(follow, bodies))
        seconds = time.perf_counter() - begun_s
    return sum(len(json.loads(answer)["output_ids"]) for answer in answers) / seconds


def told(ratios: Sequence[float], *, goal: float) -> str:
    """Return the median and the range of ratios."""
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}; goal {goal})"


async def single_turns(task: Path, address: EngineAddress, *, turns: int) -> None:
    """Print single turns against the flood."""
    for in_flight, goal in ((64, 1.0), (256, 0.95)):
        settings = settings_for(task, samples=1024, in_flight=in_flight, answer=ANSWER_TOKENS)
        made = (await ours(settings, address))[1]
        asked = [[request] for chain in chains_of(made) for request in chain]
        pairs = [((await ours(settings, address))[0], await flood(asked, address, in_flight=in_flight)) for _ in range(turns)]
        rates = statistics.median(own for own, _ in pairs)
        print(f"single turns, {in_flight:>3} in flight: {rates:,.0f} tokens/s, of a flood {told([a / b for a, b in pairs], goal=goal)}")


async def tool_turns(task: Path, address: EngineAddress, *, turns: int) -> None:
    """Print trajectories with tools against the flood, and agents against them."""
    forms = {
        "tools, on the loop": "rollout.environment=shop_task:LoopShop",
        "tools, in processes": "rollout.environment=examples.agents.shop:Shop",
        "agents, by the endpoint": "rollout.agent={function: 'shop_task:play'}",
    }
    runs = {form: settings_for(task, samples=256, in_flight=64, overrides=[override]) for form, override in forms.items()}
    chains = chains_of((await ours(runs["tools, on the loop"], address))[1])
    rates: dict[str, list[float]] = {form: [] for form in (*forms, "flood")}
    for _ in range(turns):
        for form, settings in runs.items():
            rate, made = await ours(settings, address)
            rates[form].append(rate)
            begun = chains_of(made)
            print(f"  {form}: {num_broken(begun)} broken prefixes in {len(begun)} beginnings of 256 trajectories")
        rates["flood"].append(await flood(chains, address, in_flight=64))
    for form, peer in zip(forms, ("flood", "flood", "tools, on the loop"), strict=True):
        ratios = [own / other for own, other in zip(rates[form], rates[peer], strict=True)]
        print(f"{form}: {statistics.median(rates[form]):,.0f} tokens/s, of {peer} {told(ratios, goal=0.95)}")


@contextmanager
def stubs(*arguments: object) -> Iterator[tuple[EngineAddress, psutil.Process]]:
    """Yield the address of stub engines, and their process."""
    command = [sys.executable, str(STUB), *map(str, arguments)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        url = f"http://127.0.0.1:{int(process.stdout.readline())}"
        limits = {"vocab_size": 266, "context_length": 4096, "max_total_tokens": 2**20, "has_tokenizer": False}
        yield EngineAddress(url, "key", **limits), psutil.Process(process.pid)


async def control_plane(task: Path, *, small: bool) -> None:
    """Print the samples/s that one driver bears."""
    for num_engines in (2,) if small else (16, 64, 256):
        num_samples = 64 * num_engines if small else max(4096, 64 * num_engines)
        settings = settings_for(task, samples=num_samples, in_flight=64, answer=ANSWER_TOKENS)
        with stubs() as (address, stub):
            async with opened(settings, [address] * num_engines) as manager:
                parts = {"driver": psutil.Process(), "stub": stub}
                parts |= {f"reward worker {each.pid}": each for each in parts["driver"].children(recursive=True) if each != stub}
                before_s, begun_s = {part: sum(each.cpu_times()[:2]) for part, each in parts.items()}, time.perf_counter()
                await manager.next_batch(0, progress=QUIET)
                seconds = time.perf_counter() - begun_s
                used_s = {part: sum(each.cpu_times()[:2]) - before_s[part] for part, each in parts.items()}
        cores = ", ".join(f"{part} {each / seconds:.2f}" for part, each in used_s.items() if each)
        rates = f"{num_samples / seconds:,.0f} samples/s, {num_samples / used_s['driver']:,.0f} per CPU second of the driver"
        print(f"{num_engines:>3} engines x 64: {rates}; cores: {cores}")


ORDERS: dict[str, tuple[str, ...]] = {
    "synchronous": (),
    "over-sampling": ("rollout.order={kind: first_complete}", "rollout.max_staleness=1"),
    "partial": ("rollout.order={kind: first_complete, partial: true}",),
    "asynchronous 1": ("rollout.max_staleness=1",),
    "asynchronous 4": ("rollout.max_staleness=4",),
}


async def long_tails(task: Path, *, turns: int, small: bool) -> None:
    """Print the seconds for the same number of steps by each order, training a wait of 0.3 s."""
    budget, token_s, num_steps, train_s = (100, 1e-4, 2, 0.01) if small else (1000, 1e-3, 12, 0.3)
    found: dict[str, list[float]] = {order: [] for order in ORDERS}
    for _ in range(turns):
        for order, overrides in ORDERS.items():
            late = ["objective.off_policy={mode: truncate, high: 2.0}", f"run.num_steps={num_steps}", *overrides]
            settings = settings_for(task, samples=128, in_flight=16, answer=budget, overrides=late)
            with stubs(budget, token_s) as (address, _):
                async with opened(settings, [address] * 4) as manager:
                    begun_s = time.perf_counter()
                    for step in range(num_steps):
                        await manager.next_batch(step, progress=QUIET)
                        await asyncio.sleep(train_s)
                        await manager.clients[0].load_weights(task, version=step + 1)
                    found[order].append(time.perf_counter() - begun_s)
    for order, seconds in found.items():
        ratios = [other / own for own, other in zip(seconds, found["synchronous"], strict=True)]
        print(f"{order:<15} {statistics.median(seconds):.1f} s, {statistics.median(ratios):.2f} times as fast as synchronous")


async def on_server(task: Path, names: Sequence[str], *, turns: int) -> None:
    """Run the parts `names` on one real server."""
    model = {"model_path": task / "model", "device_kind": "cpu", "dtype": "float32", "seed": 0, "needs_tokenizer": True}
    engine = Engine(server_arguments({"max_total_tokens": 131072}, **model), log_path=task / "engine.log")
    try:
        address = await asyncio.to_thread(engine.start)
        for name, part in (("single", single_turns), ("tools", tool_turns)):
            if name in names:
                await part(task, address, turns=turns)
    finally:
        await asyncio.to_thread(engine.stop)


def main() -> int:
    """Measure the parts that are asked for."""
    names = ["single", "tools", "control", "tails"]
    parser = argparse.ArgumentParser(description="The rollout side of a run.")
    parser.add_argument("--only", nargs="+", default=names, choices=names)
    parser.add_argument("--turns", type=int, default=3, help="repetitions of each pair")
    parser.add_argument("--small", action="store_true", help="sizes for a trial of control and tails")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        write_task(task := Path(name))
        if {"single", "tools"} & {*arguments.only}:
            asyncio.run(on_server(task, arguments.only, turns=arguments.turns))
        for each, part in (("control", control_plane), ("tails", partial(long_tails, turns=arguments.turns))):
            if each in arguments.only:
                asyncio.run(part(task, small=arguments.small))
    return 0


if __name__ == "__main__":
    del __file__  # spawned workers import a main program that has a file, with all that it imports
    sys.exit(main())
