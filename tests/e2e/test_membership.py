"""Real SGLang servers that join and leave: weights reach the present ones, and requests in flight go on elsewhere."""

import asyncio
import os
import signal
import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from maker_parts import make_maker
from scoring import score
from slowed_engine import in_the_middle
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from megatron_rl.engines.client import EngineClient
from megatron_rl.engines.engine import Engine, EngineAddress, free_port
from megatron_rl.engines.engine_pool import EnginePool, Urgency
from megatron_rl.engines.sampling import Sampling
from megatron_rl.engines.server_args import server_arguments
from megatron_rl.errors import EngineError
from megatron_rl.models.read_spec import read_model_spec
from megatron_rl.plugins.loader import load
from megatron_rl.rollout.generator import KeptAnswers, PoolGenerator
from megatron_rl.rollout.rollout_trial import NumberTokenizer
from megatron_rl.types import Prompt
from megatron_rl.weights.sync import TRANSPORTS, MakeTransport, WeightSync
from megatron_rl.weights.transport import BUCKET_BYTES, SenderPlan, Sent, Surroundings, WeightSender, WeightTransport, exported_specs
from tests.contract.two_turns import TOOL_IDS

PROBE = np.array([9, 9, 9, 2])
GROUP = {
    "seed": "0 p",
    "max_tokens": 4096,
    "max_answer": 4096,
    "urgency": Urgency.TRAINING,
    "kept": KeptAnswers(None, "p"),
    "decode": NumberTokenizer().decode,
}


def make_model(seed: int) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048, "tie_word_embeddings": False}
    tokens = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    return Qwen3ForCausalLM(Qwen3Config(**sizes, **heads, **tokens, initializer_range=0.3, dtype="float32")).float().eval()


def log_probs(model: Qwen3ForCausalLM) -> np.ndarray:
    """Of the probe's tokens but the first."""
    with torch.no_grad():
        scores = model(torch.tensor(PROBE)[None]).logits[0].double().log_softmax(-1)
    return np.array([float(scores[position, token]) for position, token in enumerate(PROBE[1:])])


class OneRank:
    """A trainer of one rank in this process, whose weights are those of `model`."""

    has_died = False

    def __init__(self, names: list[str]) -> None:
        self.names = names
        self.model: Qwen3ForCausalLM
        self._thread = ThreadPoolExecutor(1)
        self._sender: WeightSender

    def weights(self, *, receivers: object = None) -> Iterator[tuple[str, Tensor]]:
        tensors = self.model.state_dict()
        return ((name, tensors[name]) for name in self.names)

    def save_hf(self, directory: Path, *, max_shard_bytes: int, durable: bool) -> None:
        self.model.save_pretrained(directory)

    def begin_open_sender(self, plan: SenderPlan) -> list[Future[None]]:
        def work() -> None:
            self._sender = plan.open(self, rank=0)

        return [self._thread.submit(work)]

    def begin_close_sender(self) -> list[Future[None]]:
        return [self._thread.submit(lambda: self._sender.close())]

    def begin_send(self, *, version: int, checked: bool) -> list[Future[Sent]]:
        return [self._thread.submit(self._sender.send, version=version, checked=checked)]


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[list[tuple[Engine, EngineAddress]]]:
    """Two servers of one model, and where they are."""
    make_model(0).save_pretrained(tmp_path / "model")
    arguments = server_arguments({}, model_path=tmp_path / "model", device_kind="cpu", dtype="float32", seed=0)
    made = [Engine(arguments, log_path=tmp_path / f"engine-{number}.log") for number in range(2)]
    with ThreadPoolExecutor(2) as threads:
        try:
            yield list(zip(made, threads.map(Engine.start, made), strict=True))
        finally:
            list(threads.map(Engine.stop, made))


def make_ends(directory: Path, transport: str, *, bucket_bytes: int = BUCKET_BYTES) -> tuple[OneRank, MakeTransport]:
    """A rank, which is beside all engines, and what makes its transport to those at some URLs."""
    manifest = exported_specs(read_model_spec(directory / "model"), dtype="float32")

    def make_transport(urls: Sequence[str]) -> WeightTransport:
        surroundings = Surroundings(
            manifest=manifest,
            directory=directory / "weights",
            free_address=lambda: ("127.0.0.1", free_port("127.0.0.1", claim=socket.socket(socket.AF_UNIX))),
            backend="gloo",
            num_engines=len(urls),
            ranks_per_engine=1,
            timeout_s=60.0,
            ranks_beside={url: (0,) for url in urls},
            bucket_bytes=bucket_bytes,
        )
        return TRANSPORTS[transport](surroundings)

    return OneRank([spec.name for spec in manifest]), make_transport


@pytest.mark.timeout(300)
def test_engines_join_and_leave_between_syncs_and_in_requests(engines: list[tuple[Engine, EngineAddress]], tmp_path: Path) -> None:
    rank, make_transport = make_ends(tmp_path, "broadcast")

    async def work() -> None:
        async with AsyncExitStack() as stack:
            clients = [
                await stack.enter_async_context(EngineClient(address, request_timeout_s=60, control_timeout_s=60)) for _, address in engines
            ]
            pool = EnginePool(clients[:1], max_requests=8)
            sync = WeightSync(make_transport, ranks=rank, pool=pool, timeout_s=60)

            async def publish(version: int) -> None:
                rank.model = make_model(version)
                await sync.run(version=version)
                for client in pool.membership.members:
                    np.testing.assert_allclose((await score(client, PROBE))[1:], log_probs(rank.model), atol=2e-5)

            async def ask(max_tokens: int) -> list[int]:
                """The weight versions of 16 responses."""
                async with PoolGenerator(pool, **GROUP, arrival=pool.arrival()) as generator:
                    calls = [generator.generate(PROBE, sampling=Sampling(max_tokens=max_tokens)) for _ in range(16)]
                    answers = [answer for (answer,) in await asyncio.gather(*calls)]
                assert {len(answer.token_ids) for answer in answers} == {max_tokens}
                return sorted({int(version) for answer in answers for version in answer.weight_versions})

            await publish(1)
            pool.join(clients[1])
            assert await ask(4) == [1] and await clients[1].weight_version() == 0
            await publish(2)
            assert await ask(4) == [2]

            # A rollout of two turns is trained on what both engines made, whatever each did.
            maker = make_maker(pool, load("tests.contract.two_turns:rollout", kind="rollout"), max_answer=8)
            prompts = [Prompt(id=f"{number}", token_ids=PROBE, text="") for number in range(4)]
            groups = await asyncio.gather(*(maker.make(prompt, num_samples=3) for prompt in prompts))
            for sample in (sample for group in groups for sample in group.samples):
                # Two turns of 4 tokens at most; the end of a sequence may come earlier.
                own = int(sample.loss_mask.sum())
                assert 2 <= own <= 8 and len(sample.response_ids) == own + len(TOOL_IDS)
                assert sample.weight_versions[sample.loss_mask].tolist() == [2] * own

            async with in_the_middle(ask(400), *clients, num_samples=8) as asking:
                assert pool.num_running == 16
                await asyncio.to_thread(engines[0][0].stop)
                pool.leave(clients[0], EngineError("stopped"))
            assert await asking == [2] and pool.num_running == 0
            await publish(3)
            assert await ask(4) == [3]
            await sync.disconnect()

    asyncio.run(work())


class DyingClient(EngineClient):
    """The client of `engine`, which is killed in the middle of a call that brings it weights, after `after` of them."""

    def __init__(self, engine: Engine, address: EngineAddress, *, after: int) -> None:
        super().__init__(address, request_timeout_s=60, control_timeout_s=60)
        self._engine, self._after = engine, after

    async def _control(self, path: str, body: Any, **options: Any) -> Any:
        call = asyncio.ensure_future(super()._control(path, body, **options))
        if path.startswith("/update_weights_from"):
            self._after -= 1
        if self._after < 0:
            await asyncio.sleep(0.001)
            # None once it was noticed that it is dead.
            if self._engine.pid is not None:
                os.kill(self._engine.pid, signal.SIGKILL)
        return await call


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_engine_killed_in_a_sync_leaves_others_one_version(
    engines: list[tuple[Engine, EngineAddress]], tmp_path: Path, transport: str
) -> None:
    rank, make_transport = make_ends(tmp_path, transport, bucket_bytes=10_000)

    async def watch(pool: EnginePool, clients: Sequence[EngineClient]) -> None:
        """As the run's watchdog does."""
        while True:
            for (engine, _), client in zip(engines, clients, strict=True):
                if engine.pid is None:
                    pool.leave(client, EngineError("killed by signal 9"))
            await asyncio.sleep(0.5)

    async def work() -> None:
        async with AsyncExitStack() as stack:
            (dying, first), (_, second) = engines
            clients = [
                await stack.enter_async_context(client)
                for client in (
                    DyingClient(dying, first, after=0 if transport == "disk" else 3),
                    EngineClient(second, request_timeout_s=60, control_timeout_s=60),
                )
            ]
            pool = EnginePool(clients, max_requests=8)
            sync = WeightSync(make_transport, ranks=rank, pool=pool, timeout_s=60)
            watching = asyncio.create_task(watch(pool, clients))
            for version in (1, 2):
                rank.model = make_model(version)
                await sync.run(version=version)
                assert pool.membership.members == (clients[1],) and await clients[1].weight_version() == version
                np.testing.assert_allclose((await score(clients[1], PROBE))[1:], log_probs(rank.model), atol=2e-5)
            watching.cancel()
            await sync.disconnect()

    asyncio.run(work())
