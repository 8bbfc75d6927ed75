"""The client against a server of client_parts that misbehaves on demand."""

import asyncio
import base64
import gc
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from client_parts import ONE, always, answer, generate, talk

from megatron_rl.engines import client as module
from megatron_rl.engines.answers import MixtureShape, refusal
from megatron_rl.engines.client import EngineClient
from megatron_rl.engines.sampling import Sampling
from megatron_rl.errors import DeadlineError, EngineError, EngineRefusal, UserError
from megatron_rl.types import StopReason


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_BACKOFF_S", 0.01)


async def generates(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    return web.json_response([answer() for _ in body["input_ids"]])


def test_one_request_asks_for_all_samples_of_a_prompt() -> None:
    generations, seen = talk(generates, lambda client: client.generate(np.array([1, 2]), sampling=ONE, num_samples=3))
    ((path, body),) = seen
    assert path == "/generate"
    assert body["input_ids"] == [[1, 2]] * 3
    assert body["return_logprob"] is True
    assert len(set(body["rid"])) == 3 and len({len(rid) for rid in body["rid"]}) == 1
    assert len(generations) == 3
    assert generations[0].token_ids.tolist() == [7, 8, 9]
    assert generations[0].log_probs.tolist() == [-0.5, -0.25, -2.0]
    assert generations[0].weight_versions.tolist() == [5, 5, 5]
    assert generations[0].stop_reason is StopReason.LENGTH


def test_tokens_are_scored_from_the_second_on() -> None:
    entries = [[[None, 1, None], [-0.5, 2, None], [-0.25, 0, None]], [[None, 4, None]]]
    answers = [{"meta_info": {"input_token_logprobs": row}} for row in entries]
    sequences = [np.array([1, 2, 15]), np.array([4])]
    scores, seen = talk(always(answers), lambda client: client.score(sequences))
    assert [row.tolist() for row in scores] == [[0.0, -0.5, -0.25], [0.0]]
    assert seen[0][1]["logprob_start_len"] == 0 and seen[0][1]["sampling_params"]["max_new_tokens"] == 0
    for wrong in (answers[:1], [answers[0], {"meta_info": {"input_token_logprobs": [[None, 5, None]]}}], [{}, {}]):
        with pytest.raises(EngineError, match="scored tokens in another form than SGLang's"):
            talk(always(wrong), lambda client: client.score(sequences))


def test_a_request_may_fill_the_context_and_no_more() -> None:
    sampling = Sampling(max_tokens=24)
    generations, _ = talk(generates, lambda client: client.generate(np.zeros(40, np.int64), sampling=sampling))
    assert len(generations) == 1
    with pytest.raises(UserError, match=r"a prompt of 41 tokens \+ 24 response tokens = 65, the engine takes 64"):
        talk(generates, lambda client: client.generate(np.zeros(41, np.int64), sampling=sampling))


def test_samples_of_one_request_count_on_from_its_seed() -> None:
    sampling = Sampling(max_tokens=3, seed=2**56 - 1)
    _, seen = talk(generates, lambda client: client.generate(np.array([1, 2]), sampling=sampling, num_samples=3))
    assert [each["sampling_seed"] for each in seen[0][1]["sampling_params"]] == [2**56 - 1, 2**56, 2**56 + 1]


def test_what_is_tried_once_has_a_connection_of_its_own() -> None:
    """One that the server closes while it is taken out of the pool would lose the call, which nobody repeats."""
    connections: list[tuple[str, Any]] = []

    async def handler(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        assert request.transport is not None
        connections.append((request.path, request.transport.get_extra_info("peername")))
        return await generates(request, body) if request.path == "/generate" else web.json_response({"weight_version": "3"})

    async def work(client: EngineClient) -> None:
        for _ in range(3):
            await client.generate(np.array([1, 2]), sampling=ONE)
            await client.pause("retract")

    talk(handler, work)
    used = {path: {peer for other, peer in connections if other == path} for path, _ in connections}
    assert {path: len(peers) for path, peers in used.items()} == {"/generate": 1, "/pause_generation": 3}


def test_the_key_is_sent() -> None:
    keys: list[str | None] = []

    async def handler(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        keys.append(request.headers.get("Authorization"))
        return web.json_response({"weight_version": "3"})

    assert talk(handler, lambda client: client.weight_version())[0] == 3
    assert keys == ["Bearer key"]


def test_versions_come_from_the_spans() -> None:
    spans = [{"version": "4", "start": 0, "end": 1}, {"version": "5", "start": 1, "end": 3}]

    generations, _ = talk(always([answer(weight_versions=spans)]), generate)
    assert generations[0].weight_versions.tolist() == [4, 5, 5]


@pytest.mark.parametrize(
    ("meta", "message"),
    [
        ({"weight_versions": [{"version": "4", "start": 0, "end": 2}]}, "a part of 3 tokens only"),
        ({"weight_version": "default"}, "weight version 'default', needs a number"),
        ({"output_token_logprobs": [[-0.5, 7, None]]}, "3 tokens and the log-probs of 1"),
        ({"finish_reason": {"type": "abort", "message": "out of memory", "status_code": 500}}, "out of memory"),
        ({"output_token_logprobs": [[float("nan"), 7, None], [-1, 8, None], [-1, 9, None]]}, "the log-prob nan of a token"),
        ({"output_token_logprobs": None}, "an answer of another form than SGLang's .TypeError"),
        ({"finish_reason": {}}, "an answer of another form than SGLang's .KeyError: 'type'"),
        ({"finish_reason": {"type": "thirst"}}, "an answer of another form than SGLang's .ValueError"),
    ],
)
def test_an_answer_that_cannot_be_trusted_is_an_error(meta: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        talk(always([answer(**meta)]), generate)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"meta_info": None}, "another form than SGLang's .TypeError"),
        ({"output_ids": []}, "answered no token and says that it ended by 'length'"),
        ({"output_ids": [7, 8, 16]}, "gave token 16 of a vocabulary of 16"),
    ],
)
def test_tokens_that_cannot_be_trusted_are_an_error(changed: dict[str, Any], message: str) -> None:
    scored = [[-0.5, token, None] for token in changed.get("output_ids", ())]
    with pytest.raises(EngineError, match=message):
        talk(always([answer(output_token_logprobs=scored) | changed]), generate)


SAMPLED = {"output_token_sampling_mask": [[7], [3, 8], [9, 1, 2]], "output_token_sampling_logprobs": [0.0, -0.5, -1.0]}
TRUNCATED = Sampling(max_tokens=3, top_p=0.9, top_k=4, records_candidates=True)


def test_candidates_come_with_log_probs_over_them() -> None:
    async def both(client: EngineClient) -> Any:
        plain = client.generate(np.array([1]), sampling=ONE)
        return await asyncio.gather(plain, client.generate(np.array([1]), sampling=TRUNCATED))

    ((plain,), (recorded,)), seen = talk(always([answer("a", **SAMPLED), answer("b", **SAMPLED)]), both)
    assert [body["return_sampling_mask"] for _, body in seen] == [[False, True]]
    assert plain.candidates is None and plain.log_probs.tolist() == [-0.5, -0.25, -2.0]
    assert recorded.log_probs.tolist() == [0.0, -0.5, -1.0]
    assert recorded.candidates.ids.tolist() == [7, 3, 8, 9, 1, 2] and recorded.candidates.counts.tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    "meta",
    [
        {"output_token_sampling_mask": SAMPLED["output_token_sampling_mask"]},
        {"output_token_sampling_logprobs": SAMPLED["output_token_sampling_logprobs"]},
        SAMPLED | {"output_token_sampling_mask": [[7], [3, 8]]},
        SAMPLED | {"output_token_sampling_mask": [[7], [3, 4], [9, 1, 2]]},
        {},
    ],
)
def test_a_token_without_its_candidates_is_an_error(meta: dict[str, Any]) -> None:
    with pytest.raises(EngineError, match="answered 3 tokens with candidates for"):
        talk(always([answer(**meta)]), lambda client: client.generate(np.array([1]), sampling=TRUNCATED))


def test_an_abort_keeps_the_partial_tokens() -> None:
    aborted = answer(finish_reason={"type": "abort", "message": "Aborted", "status_code": None})
    generations, _ = talk(always([aborted]), generate)
    assert generations[0].stop_reason is StopReason.ABORT
    assert len(generations[0].token_ids) == 3


MIXTURE = MixtureShape(num_layers=3, num_dense_layers=1, num_experts=9, experts_per_token=2)
RECORD = np.random.default_rng(0).random((4, 3, 9)).argsort(-1)[..., :2].astype("<i4")


def encoded(record: np.ndarray) -> str:
    return base64.b64encode(record.tobytes()).decode()


def ask_with_record(**meta: Any) -> tuple[Any, list[Any]]:
    return talk(always([answer(**meta)]), lambda client: client.generate(np.array([1, 2]), sampling=ONE), mixture=MIXTURE)


def test_experts_are_asked_for_and_read_without_the_dense_layers() -> None:
    (generation,), seen = ask_with_record(routed_experts=encoded(RECORD))
    assert seen[0][1]["return_routed_experts"] is True
    assert generation.routed_experts.dtype == np.uint8
    np.testing.assert_array_equal(generation.routed_experts, RECORD[:, 1:])


@pytest.mark.parametrize(
    ("meta", "message"),
    [
        ({}, r"answered 3 tokens without the experts .* turn training\.routing_replay off"),
        ({"routed_experts": encoded(RECORD[:-1])}, "recorded 18 experts for a prompt of 2 and a response of 3 tokens, needs .* = 24"),
        ({"routed_experts": encoded(RECORD + 8)}, "recorded experts 8 to 16, the model has 0 to 8"),
    ],
)
def test_experts_that_do_not_fit_the_response_are_an_error(meta: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        ask_with_record(**meta)


def test_a_response_aborted_at_its_start_has_no_experts() -> None:
    aborted = {**answer(finish_reason={"type": "abort"}, output_token_logprobs=[]), "output_ids": []}
    (generation,), _ = talk(always([aborted]), generate, mixture=MIXTURE)
    assert generation.routed_experts.shape == (0, 2, 2)


@pytest.mark.parametrize("trouble", ["dropped", "busy"])
def test_generation_retries_lost_connections_and_full_queues(trouble: str) -> None:
    calls = 0

    async def handler(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        nonlocal calls
        calls += 1
        if calls < 3 and trouble == "dropped":
            assert request.transport is not None
            request.transport.abort()
        if calls < 3 and trouble == "busy":
            return web.json_response({"object": "error", "message": "The request queue is full.", "code": 503}, status=503)
        return await generates(request, body)

    generations, seen = talk(handler, generate)
    assert len(generations) == 1
    assert len(seen) == 3


def test_an_engine_that_keeps_failing_is_an_error() -> None:
    async def handler(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    with pytest.raises(EngineError, match="cannot be reached for /generate"):
        talk(handler, generate)


def test_a_refused_request_is_not_tried_again() -> None:
    calls: list[str] = []

    async def handler(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        calls.append(request.path)
        return web.json_response({"error": {"message": "too long"}}, status=400)

    with pytest.raises(EngineRefusal, match=r"refused /generate: too long \(HTTP 400\)") as caught:
        talk(handler, generate)
    assert caught.value.status == 400
    assert calls == ["/generate"]


def ask_for_several(client: EngineClient, prompts: list[list[int]], *, sampling: Sampling = ONE, num_samples: int = 2) -> Awaitable[Any]:
    calls = (client.generate(np.array(prompt), sampling=sampling, num_samples=num_samples) for prompt in prompts)
    return asyncio.gather(*calls, return_exceptions=True)


async def echoes(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """Answer with the last token of the prompt."""
    answers = []
    for prompt in body["input_ids"]:
        scored = [[-1.0, prompt[-1], None]]
        answers.append({"output_ids": prompt[-1:], "meta_info": {**answer()["meta_info"], "output_token_logprobs": scored}})
    return web.json_response(answers)


def test_short_simultaneous_requests_share_an_http_call() -> None:
    prompts = [[token, token + 1] for token in range(7)]
    sampling = Sampling(max_tokens=32, seed=5)
    groups, seen = talk(echoes, lambda client: ask_for_several(client, prompts, sampling=sampling, num_samples=16))
    assert [{int(each.token_ids[0]) for each in group} for group in groups] == [{prompt[1]} for prompt in prompts]
    assert [len(body["input_ids"]) for _, body in seen] == [64, 48], "64 samples are enough for one"
    assert all(len(body["rid"]) == len(set(body["rid"])) == len(body["input_ids"]) for _, body in seen)
    assert [each["sampling_seed"] for each in seen[0][1]["sampling_params"]] == [*range(5, 21)] * 4


def test_long_and_later_requests_go_by_themselves() -> None:
    async def work(client: EngineClient) -> None:
        await ask_for_several(client, [[1], [2]], sampling=Sampling(max_tokens=33))
        for token in (3, 4):
            await client.generate(np.array([token]), sampling=ONE)

    _, seen = talk(echoes, work)
    assert [body["input_ids"] for _, body in seen] == [[[1], [1]], [[2], [2]], [[3]], [[4]]]


def test_of_requests_refused_together_only_the_faulty_one_fails() -> None:
    async def handler(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if [3] in body["input_ids"]:
            return web.json_response({"error": {"message": "no threes"}}, status=400)
        return await echoes(request, body)

    (first, refused, last), seen = talk(handler, lambda client: ask_for_several(client, [[2], [3], [4]]))
    assert [int(group[0].token_ids[0]) for group in (first, last)] == [2, 4]
    assert isinstance(refused, EngineRefusal) and "no threes" in str(refused)
    assert [len(body["input_ids"]) for _, body in seen] == [6, 2, 2, 2]


def test_cancelling_one_of_several_joint_calls_spares_the_others() -> None:
    started, aborted = asyncio.Event(), asyncio.Event()

    async def handler(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if request.path == "/abort_request":
            aborted.set()
            return web.Response()
        started.set()
        await aborted.wait()
        return await echoes(request, body)

    async def work(client: EngineClient) -> Any:
        kept, dropped = (asyncio.create_task(client.generate(np.array([token]), sampling=ONE)) for token in (1, 2))
        await started.wait()
        dropped.cancel()
        return await asyncio.gather(kept, dropped, return_exceptions=True)

    (kept, dropped), seen = talk(handler, work)
    assert kept[0].token_ids.tolist() == [1] and isinstance(dropped, asyncio.CancelledError)
    assert [body["rid"] for _, body in seen[1:]] == [seen[0][1]["rid"][1]]


def test_a_failed_call_without_waiters_prints_nothing() -> None:
    """As those to an engine that died do, whose requests have gone to another."""
    started, free, printed = asyncio.Event(), asyncio.Event(), []

    async def handler(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if request.path == "/generate":
            started.set()
            await free.wait()
        return web.Response(status=400)

    async def work(client: EngineClient) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: printed.append(context["message"]))
        asked = asyncio.create_task(client.generate(np.array([1]), sampling=ONE))
        await started.wait()
        (call,) = (task for task in asyncio.all_tasks() if "_ask_collected" in repr(task))
        asked.cancel()
        free.set()
        await asyncio.wait([asked, call])
        del call
        gc.collect()

    talk(handler, work)
    assert printed == []


def test_all_requests_are_aborted_by_one_call() -> None:
    _, seen = talk(always({}), lambda client: client.abort_all())
    assert [(path, body) for path, body in seen] == [("/abort_request", {"abort_all": True})]


def test_control_calls_are_made_once() -> None:
    calls: list[str] = []

    async def handler(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        calls.append(request.path)
        return web.Response(status=503, text="busy")

    with pytest.raises(EngineRefusal, match="busy"):
        talk(handler, lambda client: client.pause("abort"))
    assert calls == ["/pause_generation"]


def test_a_failure_reported_with_status_200_is_an_error() -> None:
    with pytest.raises(EngineRefusal, match="unknown group"):
        talk(
            always({"success": False, "message": "unknown group"}),
            lambda client: client.receive_bucket(["a"], dtypes=["float32"], shapes=[[1]], group="g"),
        )


WAITS: dict[str, Callable[[EngineClient], Awaitable[Any]]] = {
    "generate": generate,
    "version": lambda client: client.weight_version(),
    "bucket": lambda client: client.receive_bucket(["a"], dtypes=["float32"], shapes=[[1]], group="g", version=1),
    "shared bucket": lambda client: client.take_bucket(["handle"], version=1),
    "files": lambda client: client.load_weights(Path("weights"), version=1),
    "release": lambda client: client.release_memory(["weights"]),
    "restore": lambda client: client.restore_memory(["weights"]),
}


@pytest.mark.parametrize("call", WAITS)
def test_every_wait_has_a_deadline(call: str) -> None:
    """That of the client, or half of it: a sync of a large model may take any time, and none has a deadline of its own."""

    async def handler(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        await asyncio.sleep(30)
        return web.Response()

    with pytest.raises(DeadlineError, match=r"did not answer .* within 0\.[12] s; see model\.deadline_s"):
        talk(handler, WAITS[call], timeout_s=0.2)


def test_a_bucket_sets_version_and_flushes_only_at_the_end() -> None:
    async def work(client: EngineClient) -> None:
        await client.receive_bucket(["a"], dtypes=["float32"], shapes=[(1, 2)], group="g")
        await client.receive_bucket(["b"], dtypes=["float32"], shapes=[(3,)], group="g", version=7)

    _, seen = talk(always({"success": True, "message": ""}), work)
    (_, first), (_, last) = seen
    assert first["flush_cache"] is False and "weight_version" not in first
    assert last["flush_cache"] is True and last["weight_version"] == "7"
    assert first["load_format"] == last["load_format"] == "flattened_bucket"
    assert first["shapes"] == [[1, 2]]


def test_a_call_cancelled_twice_at_the_end_prints_nothing() -> None:
    """By its caller and with all that still runs, when the client is closed already."""
    started, printed = asyncio.Event(), []

    async def handler(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        started.set()
        await asyncio.sleep(30)
        return web.Response()

    async def work(client: EngineClient) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: printed.append(context["message"]))
        call = asyncio.create_task(client.generate(np.array([1]), sampling=ONE))
        await started.wait()
        client.abort = fail_later  # type: ignore[method-assign]
        for _ in range(2):
            call.cancel()
            await asyncio.sleep(0)
        await asyncio.wait([call])
        await asyncio.sleep(0.02)
        gc.collect()

    async def fail_later(_: object) -> None:
        await asyncio.sleep(0.01)
        raise EngineError("the client is not open")

    talk(handler, work)
    assert printed == []


def test_cancelling_a_call_aborts_exactly_its_samples() -> None:
    started = asyncio.Event()

    async def handler(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if request.path == "/generate":
            started.set()
            await asyncio.sleep(30)
        return web.Response()

    async def work(client: EngineClient) -> None:
        call = asyncio.create_task(client.generate(np.array([1]), sampling=ONE, num_samples=2))
        await started.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

    _, seen = talk(handler, work)
    (_, generate), *aborts = seen
    assert [path for path, _ in aborts] == ["/abort_request"] * 2
    assert {body["rid"] for _, body in aborts} == set(generate["rid"])


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error": {"message": "one"}}', "one"),
        (b'{"error": "two"}', "two"),
        (b'{"object": "error", "message": "three", "code": 400}', "three"),
        (b"four", "four"),
        (b"", "None"),
        (b'{"detail": "five"}', "{'detail': 'five'}"),
    ],
)
def test_every_shape_of_error_body_gives_its_message(body: bytes, message: str) -> None:
    assert refusal(body) == message


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_an_answer_without_a_token_is_the_engine_s_failure(reason: str) -> None:
    empty = {"output_ids": [], "meta_info": answer()["meta_info"] | {"output_token_logprobs": [], "finish_reason": {"type": reason}}}

    async def handler(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.json_response([empty])

    with pytest.raises(EngineError, match=f"answered no token and says that it ended by '{reason}', needs at least one token"):
        talk(handler, lambda client: client.generate(np.array([1]), sampling=ONE))
