import re
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_rl.algorithms.entropy_aware import EntropyAware
from megatron_rl.config.decided import decide
from megatron_rl.config.eval_sets import EvalSet
from megatron_rl.config.settings import Settings
from megatron_rl.config.settings_reference import setting_fields
from megatron_rl.engines.sampling import Sampling, eval_sampling
from megatron_rl.errors import UserError

README = Path(__file__).parents[3] / "megatron_rl" / "evaluation" / "README.md"


def test_a_file_alone_is_a_set(settings_with: Callable[..., Settings]) -> None:
    alone, whole = settings_with("eval.sets.a=x.jsonl"), settings_with("eval.sets.a={data: x.jsonl}")
    assert alone == whole and alone.eval.sets["a"].data == Path("x.jsonl")
    assert settings_with().eval.sets == {}


def test_own_values_win_and_others_are_the_rollouts(settings_with: Callable[..., Settings]) -> None:
    settings = settings_with(
        "rollout.sampling={temperature: 0.7, max_response_tokens: 9, stop_token_ids: [3]}",
        "eval.sets.a={data: x, samples: 4, sampling: {top_p: 0.5, top_k: 2, min_p: 0.1, presence_penalty: 1.0, logit_bias: {'4': -2}, "
        "max_response_tokens: 20}}",
    )
    own = settings.eval.sets["a"].sampling
    sampling = eval_sampling(settings.rollout.sampling, own, eos_token_ids=[1])
    assert sampling == Sampling(
        temperature=0.7, top_p=0.5, top_k=2, min_p=0.1, presence_penalty=1.0, logit_bias={4: -2.0}, max_tokens=20, stop_token_ids=(3, 1)
    )  # fmt: skip
    request = sampling.request()
    assert [request[name] for name in ("top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty")] == [0.5, 2, 0.1, 1.0, 0.0]
    assert request["logit_bias"] == {"4": -2.0}
    assert settings.eval.longest_sampling(settings.rollout.sampling).max_response_tokens == 20
    shaped = settings.rollout.sampling.model_copy(update={"entropy": EntropyAware(thresholds=(1.0, 1.0))})
    assert eval_sampling(shaped, own, eos_token_ids=[1]) == sampling, "no evaluation draws by entropy"
    assert settings.eval.described(sampling=shaped, reward="m:f") == settings.eval.described(
        sampling=settings.rollout.sampling, reward="m:f"
    )
    line = settings.eval.described(sampling=settings.rollout.sampling, reward="m:f")["a"]
    assert {"4 per prompt", "(every 10 steps)", "(temperature 0.7)", "top_k 2", "max_response_tokens 20", "(reward m:f)"} <= set(
        line.split(", ")
    )


def test_a_set_with_its_own_top_p_takes_no_decided_top_k(settings_with: Callable[..., Settings]) -> None:
    sets = "eval.sets={a: {data: x, sampling: {top_p: 1.0}}, b: x}"
    for words, expected in ((("rollout.sampling.top_p=0.9",), [-1, 2048]), (("rollout.sampling={top_p: 0.9, top_k: 7}",), [7, 7])):
        settings, _ = decide(settings_with(*words, sets), has_gpus=False)
        samplings = [eval_sampling(settings.rollout.sampling, each.sampling, eos_token_ids=[]) for each in settings.eval.sets.values()]
        assert [(each.request()["top_p"], each.request()["top_k"]) for each in samplings] == list(zip([1.0, 0.9], expected, strict=True))


def test_sets_are_due_before_at_intervals_and_after(settings_with: Callable[..., Settings]) -> None:
    evaluation = settings_with("eval={interval: 3, sets: {a: x, b: {data: x, interval: 2}, never: {data: x, interval: 0}}}").eval
    due = {steps: evaluation.due(steps=steps, num_steps=7) for steps in range(8)}
    assert due == {0: ("a", "b"), 1: (), 2: ("b",), 3: ("a",), 4: ("b",), 5: (), 6: ("a", "b"), 7: ("a", "b")}


@pytest.mark.parametrize(
    ("word", "parts"),
    [
        ("eval.sets.a={data: x, sample: 3}", ["unknown setting eval.sets.a.sample;", "did you mean eval.sets.a.samples?"]),
        ("eval.sets.a={data: x, sampling: {topp: 1}}", ["eval.sets.a.sampling.topp", "did you mean eval.sets.a.sampling.top_p?"]),
        ("eval.sets.a={data: x, samples: 0}", ["eval.sets.a.samples is 0 (integer)", "integer >= 1"]),
        ("eval.sets.a={data: x, sampling: {temperature: hot}}", ["eval.sets.a.sampling.temperature is hot", "number >= 0"]),
        ("eval.sets.a={samples: 3}", ["eval.sets.a.data is missing", "set it in the file, or with eval.sets.a.data=VALUE"]),
        ("eval={sets: {'a b': x}}", ["eval.sets has the name 'a b'", "needs letters, digits"]),
        ("eval.sets.a=3", ["eval.sets.a is 3 (integer)", "needs a section"]),
    ],
)
def test_mistakes_in_a_set_are_named(settings_with: Callable[..., Settings], word: str, parts: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        settings_with(word)
    assert [part for part in parts if part not in str(caught.value)] == [], str(caught.value)


def test_the_readme_lists_every_setting_of_a_set() -> None:
    text = README.read_text()
    rows = re.findall(r"^\| (`[a-z].*?) \| (.*) \|$", text, re.MULTILINE)
    listed = {name: words for cell, words in rows for name in re.findall(r"`([a-z_.]+)`", cell)}
    fields = {field.path: field for field in setting_fields(EvalSet)}
    leaves = {path.removeprefix("sampling.") for path in fields if path != "reward"}
    assert leaves <= {name.removeprefix("sampling.") for name in listed}
    assert all(listed[path] == fields[path].description for path in ("data", "samples", "interval"))


def test_stop_strings_of_a_set_are_looked_for(settings_with: Callable[..., Settings]) -> None:
    every = [settings_with(), settings_with("rollout.sampling.stop=[x]"), settings_with("eval.sets.a={data: x, sampling: {stop: [x]}}")]
    assert [settings.eval.has_stop_strings(settings.rollout.sampling) for settings in every] == [False, True, True]


@pytest.mark.parametrize(("token", "bias"), [(5, 200), (-1, 2)])
def test_a_bias_is_bounded(settings_with: Callable[..., Settings], token: int, bias: int) -> None:
    got = f"adds {bias}.0 to the logit of token {token}, needs numbers from -100 to 100"
    with pytest.raises(UserError, match=f"sampling.logit_bias: {got}"):
        settings_with(f"eval.sets.a={{data: x, sampling: {{logit_bias: {{'{token}': {bias}}}}}}}")
