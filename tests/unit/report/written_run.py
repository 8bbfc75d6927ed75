"""Directories as runs leave them, with samples of every kind, without any process of a run."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from megatron_rl.config.load import dump_settings, load_settings
from megatron_rl.config.settings import ObserveSettings
from megatron_rl.data.buffer import BUFFER_FILE, Buffer
from megatron_rl.data.token_values import TOKEN_VALUES, TokenValues
from megatron_rl.observe.sinks import Sinks
from megatron_rl.types import Failure, Group, Prompt, Reward, RewardOutcome, Sample, StopReason

NASTY = "</script><script>alert(1)</script><img src=x onerror=alert(2)>&lt;b&gt; \x1b[31m \u202etxt.exe\u202c \x00 \u2028 <!--"
"""Markup, an entity, colours of a terminal, a reversed line, a control character, a separator, a comment."""


def byte_tokenizer() -> tokenizers.Tokenizer:
    """A tokenizer of single bytes: a letter outside of ASCII takes several tokens."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(tokenizers.models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    return made


_TOKENIZER = byte_tokenizer()


def encode(text: str) -> list[int]:
    """The ids of a text."""
    ids: list[int] = _TOKENIZER.encode(text).ids
    return ids


def sample(prompt: Prompt, index: int, text: str, reward: float | None, **fields: Any) -> Sample:
    """A sample of these words; every fourth token is not trained on, and tokens 8 to 11 are of an environment."""
    ids = encode(text)
    places = np.arange(len(ids))
    made = (places < 8) | (places >= 12)
    scored = Reward(RewardOutcome.SCORED, reward, components={"exact": reward}) if reward is not None else None
    given: dict[str, Any] = {
        "group_id": prompt.id,
        "prompt": prompt,
        "stop_reason": StopReason.STOP,
        "reward": scored or Reward(RewardOutcome.ERROR, None, f"Traceback {NASTY}"),
    }
    return Sample(
        index=index,
        response_ids=np.array(ids),
        loss_mask=made & (places % 4 != 3),
        rollout_log_probs=np.where(made, -0.01 * (places + 1), 0.0),
        weight_versions=np.where(made, 3, -1),
        response_text=text,
        **(given | fields),
    )


def group(name: str, texts: Sequence[str], rewards: Sequence[float | None], *, failures: Sequence[Failure] = (), **fields: Any) -> Group:
    """A group with one sample for each of `texts`."""
    text = fields.pop("text", f"What is {name}?")
    prompt = Prompt(id=name, token_ids=np.array(encode(text)), text=text, label="42", **fields)
    made = [sample(prompt, index, words, reward) for index, (words, reward) in enumerate(zip(texts, rewards, strict=True))]
    return Group(name, prompt, tuple(made), tuple(failures))


def branched(name: str) -> Group:
    """A trajectory of two samples: the second begins with the first four tokens of the first, and goes another way."""
    prompt = Prompt(id=name, token_ids=np.array(encode("ask")), text="ask")
    first = sample(prompt, 0, "one two", 1.0, trajectory=0, role="solver")
    own = Prompt(id=name, token_ids=np.array(encode("askone ")), text="askone ")
    second = sample(prompt, 1, "three", 1.0, trajectory=0, role="solver", stop_reason=StopReason.LENGTH)
    return Group(name, prompt, (first, Sample(**{**fields_of(second), "prompt": own})))


def fields_of(one: Sample) -> dict[str, Any]:
    """The fields of a sample."""
    return {name: getattr(one, name) for name in Sample.__slots__}


def token_values(one: Sample, row: int) -> TokenValues:
    """Values of the trained tokens of a sample in this row of the batch, each from its place alone."""
    places = np.flatnonzero(one.loss_mask)
    x = places.astype(np.float32)
    columns = {
        "log_probs": -0.01 * (x + 1) - 0.1,
        "old_log_probs": -0.01 * (x + 1) - 0.25,
        "entropy": 0.5 + 0.1 * x,
        "advantages": np.full_like(x, -1.5),
        "ref_log_probs": -0.01 * (x + 1) - 0.3,
        "clipped": (places % 5 == 0).astype(np.float32),
    }
    return TokenValues(np.full(len(places), row), places + len(one.prompt.token_ids), np.stack([columns[name] for name in TOKEN_VALUES]))


def write_buffer(directory: Path, steps: Sequence[Sequence[Group]], *, rejections: dict[str, str] | None = None) -> None:
    """Let step 1 and the following ones consume these groups, with values for all trained tokens."""
    with Buffer(directory / BUFFER_FILE) as buffer:
        for step, groups in enumerate(steps, start=1):
            buffer.add_prompts(one.prompt for one in groups)
            assert len(buffer.take_pending(len(groups))) == len(groups)
            for one in groups:
                buffer.put_done(one)
            buffer.consume({one.id: (rejections or {}).get(one.id) for one in groups}, step=step)
            samples = dict(enumerate(each for one in groups for each in one.samples))
            if samples:
                buffer.put_token_values(samples, TokenValues.joined(token_values(each, row) for row, each in samples.items()))


def write_run(directory: Path, steps: Sequence[Sequence[Group]], *, rejections: dict[str, str] | None = None) -> Path:
    """A run of so many steps with metrics, an evaluation, settings and a model with a tokenizer."""
    model = directory / "model"
    model.mkdir(parents=True)
    byte_tokenizer().save(str(model / "tokenizer.json"))
    settings = load_settings(None, (f"run.directory={directory}", f"model.path={model}", "data.train=a.jsonl", "reward.function=m:f"))
    (directory / "settings.yaml").write_text(dump_settings(settings))
    with Sinks(directory, ObserveSettings()) as sinks:
        for step in range(len(steps) + 1):
            sinks.log(step, metrics_of(step))
    for step in range(0, len(steps) + 1, 10):
        estimate = {"value": 0.5, "low": 0.4, "high": 0.625, "num": 9, "unit": "prompts"}
        path = directory / "evaluation" / f"step-{step:06}" / "held.json"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps({"estimates": {"accuracy": estimate}}))
    write_buffer(directory, steps, rejections=rejections)
    return directory


def metrics_of(step: int) -> dict[str, float]:
    """A row of metrics as a step logs one: as many as a run has."""
    names = ("rollout/reward", "train/loss", "train/entropy", "train/kl_reference", "train/grad_norm", "train/log_prob_diff")
    names += ("rollout/response_length", "rollout/response_length_max", "rollout/truncated_fraction", "rollout/staleness")
    names += ("engine/kv_use_max", "engine/kv_use_of_idlest", "engine/queue", "engine/prefix_hits_min", "rollout/tokens_per_second")
    phases = {f"time/{name}": 1.0 + math.sin(step) ** 2 for name in ("rollout_wait", "train", "sync")}
    return {name: math.sin(0.1 * step + len(name)) ** 2 for name in names} | phases
