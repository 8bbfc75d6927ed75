"""The real SGLang server with a tiny random Qwen3: what it generates, scores and loads, and how it goes down."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from engine_parts import TEMPERATURE, VOCAB, drawn_log_probs, load, make_engine, make_model, prompts_of_many_lengths, reference_log_probs
from maker_parts import make_maker
from scoring import score
from slowed_engine import in_the_middle
from small_run import exposures
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from megatron_rl.algorithms.entropy_aware import QUADRANTS, Draw, EntropyAware
from megatron_rl.config.settings import SamplingSettings
from megatron_rl.engines.answers import EngineLoad, Generation
from megatron_rl.engines.client import ENGINE_PARTS, EngineClient
from megatron_rl.engines.engine import Engine, EngineAddress
from megatron_rl.engines.engine_pool import EnginePool
from megatron_rl.engines.sampling import Sampling, make_sampling
from megatron_rl.engines.server_args import server_arguments
from megatron_rl.errors import EngineError, UserError
from megatron_rl.rollout.generator import together
from megatron_rl.system.leftovers import PREFIX, remove_leftovers
from megatron_rl.system.rendezvous import serve_store
from megatron_rl.types import Group, Prompt, StopReason
from megatron_rl.weights.broadcast import BroadcastPlan, join_as_sender


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Qwen3ForCausalLM]]:
    root = tmp_path_factory.mktemp("models")
    return {name: (root / name, make_model(root / name, seed=seed)) for seed, name in enumerate(("first", "second", "third"))}


@pytest.fixture(scope="module")
def engine(
    models: dict[str, tuple[Path, Qwen3ForCausalLM]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Engine, EngineAddress]]:
    server = make_engine(models["first"][0], tmp_path_factory.mktemp("log") / "engine.log", shapes_logits=True)
    address = server.start()
    family = [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]
    yield server, address
    server.stop()
    assert not [process for process in family if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]


@pytest.fixture
def ask(engine: tuple[Engine, EngineAddress], models: dict[str, tuple[Path, Qwen3ForCausalLM]]) -> Callable[..., Any]:
    """Run `work(client)` against the server after it was brought back to the first model's weights, version 1."""

    def run(work: Callable[[EngineClient], Awaitable[Any]]) -> Any:
        async def session() -> Any:
            async with EngineClient(engine[1], request_timeout_s=60) as client:
                await load(client, models["first"][0], version=1)
                return await work(client)

        return asyncio.run(session())

    return run


def test_nobody_is_shown_the_key_of_a_server(engine: tuple[Engine, EngineAddress]) -> None:
    assert "server_args=" in engine[0]._log_path.read_text() and len(engine[0].api_key) >= 32
    open_to_others = [path for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*") if path.is_dir() and path.stat().st_mode & 0o077]
    assert exposures(engine[0].api_key, engine[0]._log_path.parent, *open_to_others) == []


CHOSEN = ({"top_p": 0.9, "top_k": 4096}, {"top_k": 5}, {"min_p": 0.2, "top_k": 4096}, {"top_p": 0.9, "top_k": 7, "min_p": 0.1})


def test_candidates_are_those_of_which_a_token_is_drawn(ask, models) -> None:
    prompt = np.array([3, 1, 4, 1, 5])

    async def work(client: EngineClient) -> list[Generation]:
        options = {"temperature": TEMPERATURE, "records_candidates": True}
        made = [client.generate(prompt, sampling=Sampling(max_tokens=24, **options, **chosen)) for chosen in CHOSEN]
        recorded = await asyncio.gather(*made)
        async with in_the_middle(client.generate(prompt, sampling=Sampling(max_tokens=400, **options, **CHOSEN[0])), client) as aborted:
            await client.pause("abort")
        await client.resume()
        return [each for (each,) in (*recorded, await aborted)]

    for generation, chosen in zip(ask(work), (*CHOSEN, CHOSEN[0]), strict=True):
        with torch.no_grad():
            logits = models["first"][1](torch.tensor([[*prompt, *generation.token_ids]])).logits[0, len(prompt) - 1 : -1]
        log_p, right = torch.log_softmax(logits.double() / TEMPERATURE, -1).numpy(), 0
        for place, (token, row) in enumerate(zip(generation.token_ids, log_p, strict=True)):
            found, order, probs = generation.candidates.take(np.array([place])).ids, np.argsort(-row), np.exp(row)
            before = np.cumsum(probs[order]) - probs[order]
            kept = (before <= chosen.get("top_p", 1)) & (probs[order] >= chosen.get("min_p", 0) * probs.max())
            right += set(found) == set(order[: chosen["top_k"]][kept[: chosen["top_k"]]]) and len(set(found)) == len(found)
            assert abs(row[token] - np.logaddexp.reduce(row[found]) - generation.log_probs[place]) < 2e-5
        # A token at the border of top_p may fall either way by rounding.
        assert right > 0.95 * len(log_p) > 0


def test_entropy_aware_tokens_are_drawn_as_their_log_probs_say(ask, models) -> None:
    """Beside plain requests in the same batch."""
    prompt, entropy = np.array([3, 1, 4, 1, 5]), EntropyAware(thresholds=(2.5, 1.9), quadrants={"branch": Draw(temperature=1.2, top_k=5)})
    kinds = ((TEMPERATURE, entropy), (1.3, entropy), (TEMPERATURE, None))
    samplings = [Sampling(temperature=temperature, max_tokens=40, entropy=shaped) for temperature, shaped in kinds]

    async def work(client: EngineClient) -> list[tuple[Generation, ...]]:
        return await asyncio.gather(*(client.generate(prompt, sampling=each, num_samples=6) for each in samplings))

    places = []
    for generations, sampling in zip(ask(work), samplings, strict=True):
        for generation in generations:
            expected, quadrants = drawn_log_probs(models["first"][1], [*prompt, *generation.token_ids], sampling)
            np.testing.assert_allclose(generation.log_probs, expected[len(prompt) - 1 :], atol=2e-5)
            places += quadrants[len(prompt) - 1 :]
    assert min(places.count(name) for name in QUADRANTS) >= 5, "every quadrant was drawn from"


def test_a_server_tells_its_load_and_of_its_answers(ask: Callable[..., Any]) -> None:
    async def work(client: EngineClient) -> tuple[list[EngineLoad], dict[str, int]]:
        prompt, sampling, loads = np.arange(60), Sampling(max_tokens=300), []
        running = asyncio.create_task(client.generate(prompt, sampling=sampling, num_samples=4))
        while not running.done():
            loads.append(await client.load())
            await asyncio.sleep(0.05)
            if len(loads) == 3:
                await client.pause("retract")
                await client.resume()
        await running
        await client.generate(prompt, sampling=Sampling(max_tokens=1))
        (answer,) = await client._ask([{"rid": "told", "input_ids": [1, 2], "sampling_params": Sampling(max_tokens=1).request(0)}])
        assert {"cached_tokens", "num_retractions", "prompt_tokens"} <= answer["meta_info"].keys()
        return loads, dict(client.served)

    loads, served = ask(work)
    assert all(load is not None for load in loads)
    assert 0 < max(load.kv_use for load in loads) < 0.1 and all(load.num_waiting >= 0 for load in loads)
    assert served["answers"] == 5 and served["prompt_tokens"] == 300 and served["retractions"] == 0
    assert 30 <= served["cached_tokens"] < 300


def test_log_probs_of_a_mixed_batch_agree_with_transformers(ask, models) -> None:
    prompts = prompts_of_many_lengths()
    sampling = Sampling(temperature=TEMPERATURE, max_tokens=12)

    async def work(client: EngineClient) -> list[tuple[Generation, ...]]:
        first = [client.generate(np.array(prompt), sampling=sampling, num_samples=3) for prompt in prompts]
        return await asyncio.gather(*first)

    # The second round finds the prompts in the prefix cache, so that only their last tokens are computed anew.
    for _ in range(2):
        for prompt, generations in zip(prompts, ask(work), strict=True):
            for generation in generations:
                assert generation.stop_reason is StopReason.LENGTH
                assert generation.weight_versions.tolist() == [1] * 12
                expected = reference_log_probs(models["first"][1], prompt + generation.token_ids.tolist(), temperature=TEMPERATURE)
                np.testing.assert_allclose(generation.log_probs, expected[len(prompt) - 1 :], atol=2e-5)


def test_scores_agree_with_transformers(ask, models) -> None:
    for tokens in prompts_of_many_lengths()[1:]:
        scores = ask(lambda client, tokens=tokens: score(client, np.array(tokens)))
        assert scores[0] == 0
        np.testing.assert_allclose(scores[1:], reference_log_probs(models["first"][1], tokens, temperature=1.0), atol=2e-5)


def test_greedy_is_the_argmax_and_keeps_the_stop_token(ask, models) -> None:
    tokens = [3, 1, 4]
    for _ in range(6):
        with torch.no_grad():
            tokens.append(int(models["first"][1](torch.tensor([tokens])).logits[0, -1].argmax()))
    greedy = ask(lambda client: client.generate(np.array([3, 1, 4]), sampling=Sampling(temperature=0.0, max_tokens=6)))
    assert greedy[0].token_ids.tolist() == tokens[3:]
    stop = tokens[5]
    first = tokens[3:].index(stop) + 1
    sampling = Sampling(temperature=0.0, max_tokens=6, stop_token_ids=(stop,))
    stopped = ask(lambda client: client.generate(np.array([3, 1, 4]), sampling=sampling))
    assert stopped[0].token_ids.tolist() == tokens[3 : 3 + first]
    assert stopped[0].stop_reason is StopReason.STOP


def test_weights_from_disk_take_effect_with_their_version(ask, models) -> None:
    tokens = [5, 6, 7, 8]

    async def work(client: EngineClient) -> tuple[np.ndarray, int]:
        await score(client, np.array(tokens))
        await load(client, models["second"][0], version=2)
        return await score(client, np.array(tokens)), await client.weight_version()

    scores, version = ask(work)
    np.testing.assert_allclose(scores[1:], reference_log_probs(models["second"][1], tokens, temperature=1.0), atol=2e-5)
    assert version == 2


def test_the_checksum_follows_the_weights(ask, models) -> None:
    async def work(client: EngineClient) -> list[dict[str, str]]:
        checksums = [await client.checksums()]
        for name in ("second", "first"):
            await load(client, models[name][0], version=2)
            checksums.append(await client.checksums())
        return checksums

    first, second, again = ask(work)
    assert first == again != second


@pytest.mark.parametrize("flushes", [True, False])
def test_no_cached_prefix_outlives_its_weights(ask, models, monkeypatch: pytest.MonkeyPatch, flushes: bool) -> None:
    """As the flush of a sync empties the cache; without it, tokens follow a prefix of other weights."""
    prompt, sampling = np.arange(200) % (VOCAB - 1) + 1, Sampling(temperature=0.0, max_tokens=4)

    async def work(client: EngineClient) -> tuple[Generation, int]:
        await client.generate(prompt, sampling=sampling)
        control = client._control

        async def keeping(path: str, body: dict[str, Any], **options: Any) -> Any:
            return await control(path, {**body, "flush_cache": False} if "flush_cache" in body else body, **options)

        monkeypatch.setattr(client, "_control", control if flushes else keeping)
        await load(client, models["second"][0], version=2)
        cached_before = client.served["cached_tokens"]
        (generation,) = await client.generate(prompt, sampling=sampling)
        return generation, client.served["cached_tokens"] - cached_before

    generation, num_cached = ask(work)
    tokens = [*prompt.tolist(), *generation.token_ids.tolist()]
    apart = np.abs(generation.log_probs - reference_log_probs(models["second"][1], tokens, temperature=1.0)[len(prompt) - 1 :])
    assert (num_cached == 0) == flushes and (apart.max() < 2e-5) == flushes


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_weights_by_broadcast_take_effect_with_their_version(ask, models) -> None:
    named = list(models["third"][1].state_dict().items())
    group = {"address": "127.0.0.1", "port": free_port(), "world_size": 2, "name": "test", "backend": "gloo"}

    def send(process_group: torch.distributed.ProcessGroup) -> None:
        whole = torch.cat([tensor.flatten().view(torch.uint8) for _, tensor in named])
        torch.distributed.broadcast(whole, src=0, group=process_group)

    async def work(client: EngineClient) -> tuple[np.ndarray, int]:
        store = serve_store("127.0.0.1", port=group["port"], timeout_s=30)
        joining = asyncio.to_thread(join_as_sender, BroadcastPlan(**group, buckets=(), timeout_s=30), store)
        process_group, _ = await asyncio.gather(joining, client.join_group(rank_offset=1, **group))
        await score(client, np.array([9, 9, 9, 2]))
        await client.pause("abort")
        await client.begin_weight_update()
        receiving = client.receive_bucket(
            [name for name, _ in named],
            dtypes=["float32"] * len(named),
            shapes=[tensor.shape for _, tensor in named],
            group="test",
            version=3,
        )
        await asyncio.gather(receiving, asyncio.to_thread(send, process_group))
        await client.end_weight_update()
        await client.resume()
        await client.leave_group("test")
        torch.distributed.destroy_process_group(process_group)
        return await score(client, np.array([9, 9, 9, 2])), await client.weight_version()

    scores, version = ask(work)
    np.testing.assert_allclose(scores[1:], reference_log_probs(models["third"][1], [9, 9, 9, 2], temperature=1.0), atol=2e-5)
    assert version == 3


def test_tokens_of_a_request_across_an_update_have_both_versions(ask, models) -> None:
    async def work(client: EngineClient) -> Generation:
        async with in_the_middle(client.generate(np.array([1, 2]), sampling=Sampling(max_tokens=400)), client) as running:
            await client.pause("retract")
            await client.load_weights(models["second"][0], version=2)
        await client.resume()
        return (await running)[0]

    versions = ask(work).weight_versions.tolist()
    assert len(versions) == 400
    assert set(versions) == {1, 2}
    assert versions == sorted(versions)


def test_a_pause_that_aborts_returns_what_there_is(ask) -> None:
    async def work(client: EngineClient) -> Generation:
        async with in_the_middle(client.generate(np.array([1, 2]), sampling=Sampling(max_tokens=500)), client) as running:
            await client.pause("abort")
        await client.resume()
        return (await running)[0]

    generation = ask(work)
    assert generation.stop_reason is StopReason.ABORT
    assert 0 < len(generation.token_ids) < 500


def test_cancelling_a_call_aborts_its_requests(ask) -> None:
    async def work(client: EngineClient) -> None:
        call = client.generate(np.array([1, 2]), sampling=Sampling(max_tokens=500), num_samples=8)
        async with in_the_middle(call, client, num_samples=8) as running:
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            # Waits 5 seconds for running requests, then is refused; all these tokens would take twice as long.
            await client.flush_cache()

    ask(work)


def test_memory_is_released_and_taken_again_part_by_part(ask) -> None:
    async def work(client: EngineClient) -> tuple[list[int], list[int]]:
        sampling, prompt = Sampling(max_tokens=6, temperature=0.0), np.array([3, 9, 4])
        (before,) = await client.generate(prompt, sampling=sampling)
        await client.release_memory(ENGINE_PARTS)
        await client.restore_memory(["weights"])
        await client.restore_memory(["kv_cache", "cuda_graph"])
        (after,) = await client.generate(prompt, sampling=sampling)
        return before.token_ids.tolist(), after.token_ids.tolist()

    # Without a GPU nothing but the cache is lost, so the answer is the same.
    before, after = ask(work)
    assert before == after


def test_the_loop_yields_a_group_per_prompt(engine) -> None:
    prompts = [Prompt(id=str(index), token_ids=np.array([index % VOCAB, 1]), text="") for index in range(50)]

    async def work() -> list[Group]:
        async with EngineClient(engine[1], request_timeout_s=60) as client:
            maker = make_maker(EnginePool([client], max_requests=32))
            return await together(maker.make(prompt, num_samples=4) for prompt in prompts)

    groups = asyncio.run(work())
    assert [group.id for group in groups] == [prompt.id for prompt in prompts]
    for group in groups:
        assert [sample.index for sample in group.samples] == [0, 1, 2, 3]
        assert all(sample.response_text == " ".join(map(str, sample.response_ids)) for sample in group.samples)


@pytest.mark.parametrize(
    ("tokens", "sampling", "message"),
    [
        ([1, VOCAB], Sampling(max_tokens=4), "vocab_size"),
        ([-1], Sampling(max_tokens=4), "vocab_size"),
        ([1], Sampling(max_tokens=4, stop_token_ids=(VOCAB,)), "vocab_size"),
        ([], Sampling(max_tokens=4), "no tokens"),
        ([1] * 500, Sampling(max_tokens=20), "520"),
        ([1], Sampling(max_tokens=4, stop=("a",)), "tokenizer"),
    ],
)
def test_what_would_kill_the_server_is_refused_before_it_is_sent(ask, tokens, sampling, message) -> None:
    with pytest.raises(UserError, match=message):
        ask(lambda client: client.generate(np.array(tokens, np.int64), sampling=sampling))


def test_a_wrong_key_is_refused(engine) -> None:
    server, address = engine
    stranger = EngineAddress(server.url, "wrong", address.vocab_size, address.context_length, address.max_total_tokens, False)

    async def work() -> None:
        async with EngineClient(stranger, request_timeout_s=10) as client:
            await client.weight_version()

    with pytest.raises(EngineError, match="401"):
        asyncio.run(work())


def test_a_port_in_use_is_one_sentence(models, tmp_path) -> None:
    with socket.socket() as occupied:
        occupied.bind(("127.0.0.1", 0))
        occupied.listen()
        port = occupied.getsockname()[1]
        with pytest.raises(UserError, match=f"port {port} on 127.0.0.1 is in use"):
            make_engine(models["first"][0], tmp_path / "log", port=port)


@pytest.mark.slow
def test_a_server_that_dies_at_start_is_reported_with_its_log(models, tmp_path) -> None:
    (broken := tmp_path / "broken").mkdir()
    config = (models["first"][0] / "config.json").read_text().replace("Qwen3ForCausalLM", "NoSuchForCausalLM").replace('"qwen3"', '"none"')
    (broken / "config.json").write_text(config)
    server = make_engine(broken, tmp_path / "engine.log")
    with pytest.raises(EngineError, match=r"died \(exit status \d+\)[\s\S]*ValueError"):
        server.start()
    assert server.pid is None
    server.stop()


OWNER = """
import sys, time
from pathlib import Path
from megatron_rl.engines.engine import Engine
from megatron_rl.engines.server_args import server_arguments
arguments = server_arguments({}, model_path=Path(sys.argv[1]), device_kind="cpu", dtype="float32", seed=0)
engine = Engine(arguments, log_path=Path(sys.argv[2]))
engine.start()
print(engine.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.slow
def test_the_server_goes_down_with_a_killed_owner(models, tmp_path, monkeypatch) -> None:
    """Also one that is stopped. The next start removes its files."""
    (scratch := tmp_path / "tmp").mkdir()
    command = [sys.executable, "-c", OWNER, models["first"][0], tmp_path / "log"]
    owner = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": str(scratch)})
    assert owner.stdout is not None
    server = psutil.Process(int(owner.stdout.readline()))
    family = [server, *server.children(recursive=True)]
    assert len(family) >= 3
    for process in family:
        process.suspend()
    owner.kill()
    owner.wait()
    _, alive = psutil.wait_procs(family, timeout=15)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    assert remove_leftovers() and not list(scratch.iterdir())


@pytest.mark.slow
def test_stop_strings_and_two_tensor_parallel_ranks(models, tmp_path) -> None:
    model = models["first"][1]
    words = WordLevel({f"w{index}": index for index in range(VOCAB)}, unk_token="w0")
    model.save_pretrained(tmp_path / "model")
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words)).save_pretrained(tmp_path / "model")
    tokens = [3, 1, 4]
    with torch.no_grad():
        for _ in range(6):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    sampling = SamplingSettings(max_response_tokens=6, stop=(f"w{tokens[5]}",))
    options: dict[str, Any] = {"device_kind": "cpu", "dtype": "float32", "seed": 0, "needs_tokenizer": True}
    server = Engine(server_arguments({"tp_size": 2}, model_path=tmp_path / "model", **options), log_path=tmp_path / "log")

    async def work(address: EngineAddress) -> tuple[Generation, ...]:
        async with EngineClient(address, request_timeout_s=60) as client:
            return await client.generate(np.array([3, 1, 4]), sampling=make_sampling(sampling, eos_token_ids=(), greedy=True))

    try:
        (generation,) = asyncio.run(work(server.start()))
    finally:
        server.stop()
    length = tokens[3:].index(tokens[5]) + 1
    assert generation.stop_reason is StopReason.STOP
    assert generation.token_ids.tolist() == tokens[3 : 3 + length]
    expected = reference_log_probs(model, tokens[: 3 + length], temperature=1.0)
    np.testing.assert_allclose(generation.log_probs, expected[2:], atol=2e-5)


def test_a_killed_server_is_reported(engine) -> None:
    """The last test of this file: the module's server does not come back."""
    server, _ = engine
    server.check()
    os.kill(server.pid, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while server.pid is not None and time.monotonic() < deadline:
        time.sleep(0.05)
    with pytest.raises(EngineError, match="killed by signal 9"):
        server.check()


@pytest.mark.slow
def test_a_deterministic_server_ignores_other_requests(models: dict[str, tuple[Path, Qwen3ForCausalLM]], tmp_path: Path) -> None:
    """Every token and every log-prob, to the last bit: alone, all at once, and joining a batch that runs, of any sampling."""
    user = {"enable_deterministic_inference": True}
    arguments = server_arguments(user, model_path=models["first"][0], device_kind="cpu", dtype="float32", seed=7)
    server, prompts = Engine(arguments, log_path=tmp_path / "log"), [np.array(prompt) for prompt in prompts_of_many_lengths()]

    async def work() -> None:
        async with EngineClient(address, request_timeout_s=120) as client:

            async def ask(number: int, *, after_s: float = 0.0) -> list[tuple[bytes, bytes]]:
                await asyncio.sleep(after_s)
                own: Any = ({}, {"temperature": 0.0}, {"top_p": 0.9}, {"top_k": 5})[number % 4] | {"max_tokens": 40}
                answers = await client.generate(prompts[number], sampling=Sampling(seed=2**55 + 1000 * number, **own), num_samples=3)
                return [(answer.token_ids.tobytes(), answer.log_probs.tobytes()) for answer in answers]

            alone = [await ask(number) for number in range(len(prompts))]
            assert await asyncio.gather(*(ask(number) for number in range(len(prompts)))) == alone
            assert await asyncio.gather(*(ask(number, after_s=0.05 * number) for number in range(len(prompts)))) == alone
            different = {answer for answers in alone for answer in answers}
            assert len(different) == sum(1 if number % 4 == 1 else 3 for number in range(len(prompts))), "seeds differ"

    address = server.start()
    try:
        asyncio.run(work())
    finally:
        server.stop()
