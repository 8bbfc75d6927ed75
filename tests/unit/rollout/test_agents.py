"""Trajectories of agents: commands and functions, their rewards, failures with causes, and what they leave."""

import asyncio
import contextlib
import itertools
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from agents_under_test import count
from chat_parts import Policy, chat_tokenizer
from endpoint_parts import Gate, until

from megatron_rl.config.settings import AgentSettings, RolloutSettings
from megatron_rl.engines.answers import Generation
from megatron_rl.engines.sampling import Sampling
from megatron_rl.errors import EngineError, TrajectoryError, UserError
from megatron_rl.observe.group_metrics import rollout_metrics
from megatron_rl.observe.metrics import metric_values
from megatron_rl.plugins.loader import kind_of
from megatron_rl.rollout.agent_rollout import AgentRollout
from megatron_rl.rollout.agents import AgentNode
from megatron_rl.rollout.environment_call import Answer
from megatron_rl.rollout.groups import MOST_ALONE, GroupMaker, most_alone
from megatron_rl.rollout.opened_rollout import load_rollout, opened_rollout
from megatron_rl.rollout.sample_checks import check_samples
from megatron_rl.runtime.plugin_contracts import check
from megatron_rl.types import Group, Ints, Message, Prompt, Sample

PROGRAM = Path(__file__).parent / "agents_under_test.py"


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def play(
    name: str,
    texts: Sequence[str] | Callable[[str], str] = ("4",),
    *,
    runs: bool = False,
    must_reward: bool = True,
    label: str = "4",
    metadata: dict[str, Any] | None = None,
    args: dict[str, Any] | None = None,
    policy: type[Policy] = Policy,
    max_turns: int = 16,
    log_path: Path | None = None,
    until_s: float = 100.0,
    ends: Callable[[], bool] | None = None,
) -> tuple[Sample, ...]:
    """The samples of a rollout with the agent `name`, a program where it `runs`, after the checks of a run; late once it `ends`."""
    tokenizer = chat_tokenizer()
    agent = AgentSettings(command=(sys.executable, str(PROGRAM), name)) if runs else AgentSettings(function=f"agents_under_test:{name}")
    chosen = RolloutSettings(agent=agent, args=args or {}, max_turns=max_turns)
    prompt = Prompt(id="p", token_ids=np.array([1]), text="Hi.", label=label, metadata=metadata or {})

    async def work() -> Sequence[Sample]:
        opened = opened_rollout(chosen, tokenizer=tokenizer, model_type="qwen3", must_reward=must_reward, log_path=log_path)
        async with opened as rollout:
            sampling = Sampling(max_tokens=200)
            made = rollout(prompt=prompt, generator=policy(tokenizer, texts), sampling=sampling, num_samples=1, tokenizer=tokenizer)
            playing = asyncio.ensure_future(made)
            if ends is not None:
                await until(lambda: playing.done() or ends())
            return await asyncio.wait_for(playing, until_s if ends is None else 0)

    return check_samples(asyncio.run(work()), prompt=prompt, num_samples=1, vocab_size=len(tokenizer), max_tokens=4096)


def failure(*arguments: Any, **options: Any) -> TrajectoryError:
    with pytest.raises(TrajectoryError) as raised:
        play(*arguments, **options)
    return raised.value


def test_a_function_gives_parts_of_the_reward() -> None:
    (sample,) = play("count", args={"bonus": 0.25})
    assert sample.reward is not None and sample.reward.value == 1.25
    assert sample.reward.components == {"right": 1.0, "bonus": 0.25}
    facts = {"num_turns": 1, "num_tool_calls": 0, "num_tool_errors": 0, "num_refused": 0, "num_overridden": 0, "answer": "4"}
    assert sample.metadata == {**facts, "turn_rewards": [{"right": 1.0, "bonus": 0.25}]}
    assert sample.loss_mask.all() and len(sample.response_ids) == 2 and not sample.truncated


def test_branches_share_one_reward_and_the_last_knows_the_others() -> None:
    samples = play("fan_out", lambda text: "4" if "Choose" in text else f"say{text.count('1')}", must_reward=True)
    assert len(samples) == 3 and [sample.reward.value for sample in samples if sample.reward] == [1.0] * 3
    branches = samples[-1].metadata["branches"]
    # They ask at once.
    assert sorted(text[text.index("Propose") :][:10] for text in branches) == ["Propose 0.", "Propose 1."]
    assert all("say" in text for text in branches) and "branches" not in samples[0].metadata
    assert "Choose: say0, say1" in samples[-1].prompt.text
    group = Group(id="p", prompt=samples[0].prompt, samples=samples)
    values = metric_values(rollout_metrics([group], version=3))
    assert values["rollout/turns"] == 3 and values["rollout/samples_per_trajectory"] == 3
    assert values["rollout/refused_requests"] == values["rollout/overridden_requests"] == 0


@pytest.mark.parametrize("name", ["fan_out", "at_once"])
def test_samples_of_concurrent_requests_follow_tokens(name: str) -> None:
    questions = {"fan_out": ("Propose 0", "Propose 1"), "at_once": ("Ask 0", "Ask 1", "Ask 2")}[name]

    def made(*order: str) -> list[tuple[Any, ...]]:
        arrived, ended = list[str](), list[str]()

        class Slow(Policy):
            """Answers the first questions in `order`, once it has all of them."""

            async def generate(self, token_ids: Ints, **options: Any) -> tuple[Generation, ...]:
                text = self.tokenizer.decode(token_ids)
                first = [each for each in questions if each in text and "Choose" not in text and "And?" not in text]
                arrived.extend(first)
                before = [each for each in order if first and order.index(each) < order.index(first[0])]
                await until(lambda: not first or (len(arrived) == len(order) and ended == before))
                ended.extend(first)
                return await super().generate(token_ids, **options)

        samples = play(name, lambda text: "4" if "Choose" in text else f"say{text.count('1')}", policy=Slow)
        return [(sample.prompt.text, sample.response_text, sample.loss_mask.tolist(), sample.metadata) for sample in samples]

    orders = [made(*order) for order in itertools.permutations(questions)]
    assert all(each == orders[0] for each in orders) and len(orders[0]) == 3
    assert ("And?" if name == "at_once" else "Choose") in orders[0][-1][0] + orders[0][-1][1]


def test_without_a_reward_of_its_own_the_function_decides() -> None:
    (sample,) = play("silent", must_reward=False)
    assert sample.reward is None
    error = failure("silent")
    assert error.cause == "contract" and "ended without a reward, and reward.function is null" in str(error)
    error = failure("silent", label="nothing")
    assert error.cause == "no_request" and "OPENAI_BASE_URL" in str(error)


@pytest.mark.parametrize(
    ("label", "word"), [("text", "gave '4', needs a number"), ("infinite", "needs a finite number"), ("raise", "needs a number")]
)
def test_a_result_that_is_no_reward_is_a_failure(label: str, word: str) -> None:
    error = failure("silent", label=label)
    assert error.cause == "agent" and word in str(error)


@pytest.mark.parametrize(
    ("label", "cause", "word"),
    [
        ("raise", "agent", "KeyError: 'missing'"),
        ("exit", "agent", "SystemExit: 3"),
        ("budget", "budget", "rollout.max_turns"),
        ("context", "context", "too long"),
    ],
)
def test_failures_of_functions_have_causes(label: str, cause: str, word: str) -> None:
    error = failure("failing", ["4", "4"], label=label, max_turns=2)
    assert error.cause == cause and word in str(error)


def test_a_failed_answer_ends_the_agent_with_its_error() -> None:
    class Broken(Policy):
        async def generate(self, *arguments: Any, **options: Any) -> Any:
            raise EngineError("the engine returned 3 tokens and the log-probs of 2 others")

    with pytest.raises(EngineError, match="log-probs of 2 others"):
        play("failing", label="swallowed", policy=Broken)


def test_a_late_function_is_cancelled() -> None:
    with pytest.raises(TimeoutError):
        play("failing", label="hang", until_s=0.5)


def test_a_command_has_the_prompt_and_no_other_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENAI_ORG_ID", "ANTHROPIC_AUTH_TOKEN", "WANDB_API_KEY", "HF_TOKEN", "RAY_AUTH_TOKEN", "SEARCH_KEY"):
        monkeypatch.setenv(name, "of-the-run")
    monkeypatch.setenv("NO_PROXY", "example.org")
    file, log = tmp_path / "seen.json", tmp_path / "agents.log"
    (sample,) = play("environment", runs=True, metadata={"file": str(file), "row": [1]}, log_path=log)
    assert sample.reward is not None and (sample.reward.value, sample.reward.components) == (1.5, {"agent": 1.5})
    seen = json.loads(file.read_text())
    assert {name: seen["task"][name] for name in ("id", "text", "label", "messages")} == {
        "id": "p", "text": "Hi.", "label": "4", "messages": [{"role": "user", "content": "Hi."}],
    }  # fmt: skip
    assert seen["task"]["metadata"]["row"] == [1]
    variables = seen["variables"]
    assert [name for name, value in variables.items() if value == "of-the-run"] == ["SEARCH_KEY"]
    url = variables["ANTHROPIC_BASE_URL"]
    assert url.startswith("http://127.0.0.1:") and variables["OPENAI_BASE_URL"] == f"{url}/v1"
    assert variables["OPENAI_API_KEY"] == variables["ANTHROPIC_API_KEY"] and len(variables["OPENAI_API_KEY"]) >= 32
    assert variables["NO_PROXY"] == "example.org,127.0.0.1"
    assert not Path(variables["MEGATRON_RL_PROMPT"]).exists() and "said 4" in log.read_text()


@pytest.mark.parametrize(
    ("last", "value"),
    [
        ('{"reward": {"a": 1, "b": 0.5}}', 1.5), ('{"reward": -2}', -2.0), ("42", None), ('{"tokens": 42}', None), ("done", None),
        ('{"reward": 1, "tokens": 42}', None),
    ],
)  # fmt: skip
def test_a_marked_last_line_is_the_reward(last: str, value: float | None) -> None:
    (sample,) = play("ask", runs=True, must_reward=False, metadata={"last": last})
    assert (None if sample.reward is None else sample.reward.value) == value


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("status", "ended with status 3"),
        ("killed", "was killed by signal 9"),
        ("memory", "ended with status"),
        ("ask", "needs a number, or an object"),
    ],
)
def test_failures_of_commands_are_the_agents(name: str, word: str) -> None:
    error = failure(name, runs=True, metadata={"last": '{"reward": {"a": "1"}}'})
    assert error.cause == "agent" and word in str(error)
    assert name != "status" or "it went wrong" in error.trace


@pytest.mark.parametrize("name", ["children", "hang"])
def test_a_command_ends_with_what_it_started(name: str, tmp_path: Path) -> None:
    file = tmp_path / "pid"
    if name == "hang":
        with pytest.raises(TimeoutError):
            play(name, runs=True, metadata={"file": str(file)}, ends=lambda: file.exists() and bool(file.read_text()))
    else:
        play(name, runs=True, metadata={"file": str(file)})
    own = int(file.read_text())

    def left() -> list[psutil.Process]:
        found = []
        for each in psutil.Process().children(recursive=True):
            # One that ends meanwhile has no command line any more.
            with contextlib.suppress(psutil.NoSuchProcess):
                if each.pid == own or "time.sleep(1000)" in each.cmdline()[-1:]:
                    found.append(each)
        return found

    asyncio.run(until(lambda: not psutil.pid_exists(own) and not left()))


def test_check_plugin_tries_an_agent_with_a_model(tmp_path: Path) -> None:
    chat_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    assert kind_of("agents_under_test:count") == "rollout"
    found = list(check("agents_under_test:fan_out", "rollout", model=tmp_path))
    assert [each.level for each in found] == ["ok"] * 6, found
    assert [each.level for each in check("agents_under_test:count", "rollout", {"bonus": 0.5})] == ["ok"]
    found = list(check("agents_under_test:failing", "rollout", model=tmp_path))
    assert found[-1].level == "broken" and "agents_under_test:failing failed for a probe of 1 sample" in found[-1].text
    assert "without an answer of the policy" in found[-1].text
    found = list(check("agents_under_test:count", "rollout", {"bonus": "x"}))
    assert found[-1].level == "broken" and "rollout.args.bonus is 'x'" in found[-1].text


@pytest.mark.parametrize("is_lost", [False, True])
def test_agents_play_where_the_fewest_are_for_each_core(monkeypatch: pytest.MonkeyPatch, is_lost: bool) -> None:
    """4 trajectories on this node of one core and another of two, which ask it by another URL; a lost node loses one at most."""
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0})
    tokenizer, policy = chat_tokenizer(), Gate(chat_tokenizer(), lambda text: "4")
    settings = RolloutSettings(agent=AgentSettings(function="agents_under_test:count"))
    prompt = Prompt(id="p", token_ids=np.array([1]), text="Hi.", label="4")
    urls, failures = list[str](), list[TrajectoryError]()

    async def work() -> None:
        async with opened_rollout(settings, tokenizer=tokenizer, model_type="qwen3", must_reward=True) as rollout:
            assert isinstance(rollout, AgentRollout)

            async def elsewhere(asked: Prompt, message: Message) -> Answer:
                urls.append(message["base_url"])
                if is_lost:
                    return {"cause": "error", "headline": "gone", "trace": "", "lost": True}
                await count(prompt=asked, base_url=message["base_url"], api_key=message["api_key"])
                return {"messages": [], "done": True, "parts": {"agent": 1.0}, "num_calls": 0, "num_errors": 0}

            options = {"pool": None, "tokenizer": tokenizer, "score": None, "seed": 0, "max_tokens": 99}
            maker = GroupMaker(RolloutSettings(agent=AgentSettings(command=("true",))), rollout, **options)  # type: ignore[arg-type]
            await maker.spread_agents([AgentNode(elsewhere, 2)], host="127.0.0.2")
            # 4 for each of 3 cores.
            assert [places._value for places in maker._places.values()] == [12] * 3
            policy.opened.clear()

            async def one() -> None:
                asked = {"sampling": Sampling(max_tokens=200), "num_samples": 1, "tokenizer": tokenizer}
                try:
                    await rollout(prompt=prompt, generator=policy, **asked)  # type: ignore[arg-type]
                except TrajectoryError as error:
                    failures.append(error)

            playing = [asyncio.ensure_future(one())]
            await until(lambda: bool(urls) if is_lost else policy.num_running == 1)
            playing += [asyncio.ensure_future(one()) for _ in range(3)]
            await until(lambda: policy.num_running == (3 if is_lost else 4))
            policy.opened.set()
            await asyncio.gather(*playing)
            assert [node.num_playing for node in rollout._nodes] == [0, 0]

    asyncio.run(asyncio.wait_for(work(), 60))
    assert len(urls) == (1 if is_lost else 3) and all(url.startswith("http://127.0.0.2:") for url in urls)
    assert [(error.cause, str(error)) for error in failures] == ([("error", "gone")] if is_lost else [])


def test_commands_at_once_follow_from_the_cores() -> None:
    command, function = AgentSettings(command=("true",)), AgentSettings(function="a:b")
    assert most_alone(RolloutSettings(agent=command)) == 4 * len(os.sched_getaffinity(0))
    assert most_alone(RolloutSettings(agent=AgentSettings(command=("true",), max_processes=3))) == 3
    assert most_alone(RolloutSettings(agent=command), num_cores=7) == 28
    assert most_alone(RolloutSettings(agent=function)) == most_alone(RolloutSettings(environment="a:B")) == MOST_ALONE


def test_an_agent_that_is_not_there_is_refused() -> None:
    with pytest.raises(UserError, match=r"rollout\.agent\.command begins with no-such-program.*every node of the run"):
        load_rollout(RolloutSettings(agent=AgentSettings(command=("no-such-program",))))
    with pytest.raises(UserError, match=r"rollout\.agent\.function agents_under_test:main .*is called as \(prompt=\.\."):
        load_rollout(RolloutSettings(agent=AgentSettings(function="agents_under_test:main")))
    with pytest.raises(UserError, match=r"rollout\.args\.bonus is 'x'"):
        load_rollout(RolloutSettings(agent=AgentSettings(function="agents_under_test:count"), args={"bonus": "x"}))
