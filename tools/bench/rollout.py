"""The rollout side of a run, without a trainer: what it adds to the engines' own time, and what it bears.

    python tools/bench/rollout.py [--only single tools control tails] [--turns 3] [--small]

- `single`: tokens/s of the manager, with client, rewards, buffer and batch, against a bare flood of the same requests, an HTTP call each,
  on the same real server; goals 1.0 with 64 in flight and 0.95 with 256.
- `tools`: the same for environments on the driver's event loop and in processes, against a flood whose requests wait for the one before
  in their trajectory; goal 0.95. Agents that ask the endpoint, against the loop; goal 0.95. Prefixes broken between turns; goal 0, else
  the status is 1. Beside wall clock the CPU time of a token, which other programs change less. On a quiet machine
  `--only tools --turns 6` takes at most 6 minutes.
- `control`: samples/s of one driver with stub engines, 64 in flight at each, and the cores that driver, reward workers and stub take.
- `tails`: seconds and steps to the same reward by each order of training, with stub engines whose answers have long-tailed lengths and
  real waits, 1 ms a token, and 0.3 s of training; the policy of `copy_task.py`, of another seed in every turn.

The policy of the others is that of `shop_task.py`. Figures are taken in turns, each turn in another order; a flood's requests are
recorded from ours.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import aiohttp
import psutil
from copy_task import DIGITS, CopyPolicy, write_rows
from shop_task import TURNS, write_task

from megatron_rl.config.load import load_settings
from megatron_rl.config.settings import Settings
from megatron_rl.data.source import RunPrompts
from megatron_rl.data.tokenizer import load_tokenizer
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


@dataclass(frozen=True)
class Speed:
    """Tokens, seconds, and CPU seconds of the engine, of this process and of others that it has started."""

    tokens: int
    seconds: float
    cpu_s: Mapping[str, float]

    @property
    def rate(self) -> float:
        """Tokens/s."""
        return self.tokens / self.seconds

    def cpu_ms(self, part: str | None = None) -> float:
        """Return the CPU time of a token in one part or all, ms."""
        return 1000 * (sum(self.cpu_s.values()) if part is None else self.cpu_s[part]) / self.tokens


class Clock:
    """Measures the body of `with`; `speed` gives the result."""

    def __init__(self, server: psutil.Process) -> None:
        self._server = server

    def _cpu_s(self) -> dict[str, float]:
        own, engine = psutil.Process(), {self._server, *self._server.children(recursive=True)}
        return {
            "engine": sum(map(_cpu_s, engine)),
            "driver": sum(own.cpu_times()[:2]),
            "processes": sum(map(_cpu_s, {*own.children(recursive=True)} - engine)),
        }

    def __enter__(self) -> "Clock":
        self._before, self._begun_s = self._cpu_s(), time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self._seconds = time.perf_counter() - self._begun_s
        self._used = {part: each - self._before[part] for part, each in self._cpu_s().items()}

    def speed(self, tokens: int) -> Speed:
        """Return the speed at which `tokens` were made in the body."""
        return Speed(tokens, self._seconds, self._used)


def _cpu_s(process: psutil.Process) -> float:
    """Return the CPU seconds of a process and of its ended children, 0 for one that is gone."""
    try:
        return sum(process.cpu_times()[:4])
    except psutil.NoSuchProcess:
        return 0.0


async def ours(settings: Settings, address: EngineAddress, server: psutil.Process) -> tuple[Speed, list[Asked]]:
    """Return the speed of a step, and what it asked the engine, in the order of the answers."""
    made: list[Asked] = []
    ask = EngineClient._ask

    async def recorded(self: EngineClient, asked: Sequence[dict[str, Any]]) -> list[Any]:
        answers = await ask(self, asked)
        made.extend(zip(asked, answers, strict=True))
        return answers

    with patch.object(EngineClient, "_ask", recorded):
        async with opened(settings, [address]) as manager:
            await manager.clients[0].flush_cache()
            with Clock(server) as clock:
                await manager.next_batch(0, progress=QUIET)
    return clock.speed(sum(len(answer["output_ids"]) for _, answer in made)), made


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


async def flood(chains: Sequence[Sequence[dict[str, Any]]], address: EngineAddress, server: psutil.Process, *, in_flight: int) -> Speed:
    """Return the speed of the same requests, each in an HTTP call, by a client that does nothing with the answers."""
    bodies = [[json.dumps({**asked, "return_logprob": True}).encode() for asked in chain] for chain in chains]
    answers: list[bytes] = []
    headers = {"Authorization": f"Bearer {address.api_key}", "Content-Type": "application/json"}
    async with aiohttp.ClientSession(headers=headers, connector=aiohttp.TCPConnector(limit=in_flight)) as session:

        async def follow(chain: Sequence[bytes]) -> None:
            for body in chain:
                async with session.post(f"{address.url}/generate", data=body) as response:
                    answers.append(await response.read())

        (await session.post(f"{address.url}/flush_cache")).release()
        with Clock(server) as clock:
            await asyncio.gather(*map(follow, bodies))
    return clock.speed(sum(len(json.loads(answer)["output_ids"]) for answer in answers))


def told(ratios: Sequence[float], *, goal: float) -> str:
    """Return the median and the range of ratios, and how many meet the goal."""
    met = f"{sum(ratio >= goal for ratio in ratios)} of {len(ratios)} meet {goal}"
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}; {met})"


async def single_turns(task: Path, address: EngineAddress, server: psutil.Process, *, turns: int) -> int:
    """Print single turns against the flood; return 0."""
    for in_flight, goal in ((64, 1.0), (256, 0.95)):
        settings = settings_for(task, samples=1024, in_flight=in_flight, answer=ANSWER_TOKENS)
        made = (await ours(settings, address, server))[1]
        asked = [[request] for chain in chains_of(made) for request in chain]
        ratios, rates = list[float](), list[float]()
        for turn in range(turns):
            # Every other pair begins with the flood.
            before = await flood(asked, address, server, in_flight=in_flight) if turn % 2 else None
            own = (await ours(settings, address, server))[0].rate
            peer = before or await flood(asked, address, server, in_flight=in_flight)
            rates.append(own)
            ratios.append(own / peer.rate)
        print(f"single turns, {in_flight:>3} in flight: {statistics.median(rates):,.0f} tokens/s, of a flood {told(ratios, goal=goal)}")
    return 0


FORMS = {
    "tools, on the loop": "rollout.environment=shop_task:LoopShop",
    "tools, in processes": "rollout.environment=examples.agents.shop:Shop",
    "agents, by the endpoint": "rollout.agent={function: 'shop_task:play'}",
}


async def tool_turns(task: Path, address: EngineAddress, server: psutil.Process, *, turns: int) -> int:
    """Print trajectories with tools against the flood, and agents against them; return the number of broken prefixes."""
    runs = {form: settings_for(task, samples=256, in_flight=64, overrides=[override]) for form, override in FORMS.items()}
    chains = chains_of((await ours(runs["tools, on the loop"], address, server))[1])
    speeds: dict[str, list[Speed]] = {form: [] for form in (*FORMS, "flood")}
    num_chains = broken = 0
    for turn in range(turns):
        # Each form comes first, last and behind each other one as often, where turns are a multiple of 4.
        forms = [*speeds][turn % 4 :] + [*speeds][: turn % 4]
        for form in forms:
            if form == "flood":
                speeds[form].append(await flood(chains, address, server, in_flight=64))
                continue
            speed, made = await ours(runs[form], address, server)
            speeds[form].append(speed)
            begun = chains_of(made)
            num_chains, broken = num_chains + len(begun), broken + num_broken(begun)
        print(f"  turn {turn + 1}: {', '.join(f'{form} {each[-1].rate:,.0f} tokens/s' for form, each in speeds.items())}", flush=True)
    floods = [each.rate for each in speeds["flood"]]
    print(
        f"floods from {min(floods):,.0f} to {max(floods):,.0f} tokens/s; apart by more than 1.1: the machine is not quiet enough for goals"
    )
    for form, own in speeds.items():
        parts = ", ".join(f"{part} {statistics.median(each.cpu_ms(part) for each in own):.2f}" for part in own[0].cpu_s)
        print(f"{form}: {statistics.median(each.rate for each in own):,.0f} tokens/s; CPU ms a token: {parts}")
    for form, peer in zip(FORMS, ("flood", "flood", "tools, on the loop"), strict=True):
        pairs = list(zip(speeds[form], speeds[peer], strict=True))
        print(f"{form}, of {peer}: {told([one.rate / other.rate for one, other in pairs], goal=0.95)}")
        print(f"  by CPU time of all processes: {told([other.cpu_ms() / one.cpu_ms() for one, other in pairs], goal=0.95)}")
    print(f"{broken} broken prefixes in {num_chains} tool rollouts; goal 0")
    return broken


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


GOAL = 0.8
"""Expected reward of the policy that each order has to reach, from 0.125."""


async def long_tails(task: Path, *, turns: int, small: bool) -> None:
    """Print seconds and steps until the policy has the same expected reward, by each order."""
    budget, token_s, most_steps, train_s = (100, 1e-4, 2, 0.01) if small else (1000, 1e-3, 60, 0.3)
    tokenizer = load_tokenizer(task / "model")
    start = CopyPolicy([tokenizer.convert_tokens_to_ids(digit) for digit in DIGITS])
    write_rows(task / "digits.jsonl", count=4096)
    found: dict[str, list[tuple[float, int, float]]] = {order: [] for order in ORDERS}
    for turn in range(turns):
        for order, overrides in ORDERS.items():
            of_task = [f"data.train={task}/digits.jsonl", "reward.function=copy_task:share", f"run.seed={turn}"]
            late = ["objective.off_policy={mode: truncate, high: 2.0}", f"run.num_steps={most_steps}", *of_task, *overrides]
            settings = settings_for(task, samples=128, in_flight=16, answer=budget, overrides=late)
            policy = CopyPolicy(start.ids)
            policy.write(task)
            with stubs(budget, token_s, task) as (address, _):
                async with opened(settings, [address] * 4) as manager:
                    begun_s, step = time.perf_counter(), 0
                    while policy.reward < GOAL and step < most_steps:
                        batch, _ = await manager.next_batch(step, progress=QUIET)
                        await asyncio.sleep(train_s)
                        policy.learn(batch)
                        policy.write(task)
                        step += 1
                        await manager.clients[0].load_weights(task, version=step)
                    found[order].append((time.perf_counter() - begun_s, step, policy.reward))
    for order, each in found.items():
        seconds, steps, rewards = zip(*each, strict=True)
        ratios = [other[0] / own for own, other in zip(seconds, found["synchronous"], strict=True)]
        pace = statistics.median(one / other for one, other in zip(seconds, steps, strict=True))
        text = f"{statistics.median(seconds):.1f} s, {statistics.median(steps):g} steps of {pace:.2f} s to a reward of {min(rewards):.2f}"
        print(f"{order:<15} {text}; {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) times as fast as synchronous")


async def on_server(task: Path, names: Sequence[str], *, turns: int) -> int:
    """Run the parts `names` on one real server; return the number of broken prefixes."""
    model = {"model_path": task / "model", "device_kind": "cpu", "dtype": "float32", "seed": 0, "needs_tokenizer": True}
    engine = Engine(server_arguments({"max_total_tokens": 131072}, **model), log_path=task / "engine.log")
    try:
        address = await asyncio.to_thread(engine.start)
        parts = {"single": single_turns, "tools": tool_turns}
        server = psutil.Process(engine.pid)
        return sum([await parts[name](task, address, server, turns=turns) for name in parts if name in names])
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
        broken = 0
        if {"single", "tools"} & {*arguments.only}:
            broken = asyncio.run(on_server(task, arguments.only, turns=arguments.turns))
        for each, part in (("control", control_plane), ("tails", partial(long_tails, turns=arguments.turns))):
            if each in arguments.only:
                asyncio.run(part(task, small=arguments.small))
    return int(broken > 0)


if __name__ == "__main__":
    del __file__  # spawned workers import a main program that has a file, with all that it imports
    sys.exit(main())
