"""Experts that the real SGLang server records for a tiny mixture of experts, and what replaying them does to the trainer's log-probs."""

import asyncio
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from slowed_engine import in_the_middle
from small_run import metrics, rl_arguments
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

from megatron_rl.config.settings import Settings
from megatron_rl.data.batch import make_train_batch
from megatron_rl.data.packing import make_shards
from megatron_rl.engines.answers import Generation, MixtureShape
from megatron_rl.engines.client import EngineClient
from megatron_rl.engines.engine import Engine, EngineAddress
from megatron_rl.engines.sampling import Sampling
from megatron_rl.engines.server_args import server_arguments
from megatron_rl.observe.metrics import metric_values
from megatron_rl.rollout.groups import single_turn
from megatron_rl.rollout.rollout_trial import NumberTokenizer
from megatron_rl.training.topology import shutdown
from megatron_rl.training.trainer import Trainer
from megatron_rl.types import Group, Prompt, Reward, RewardOutcome, StopReason, TrainBatch

VOCAB = 64
SHAPE = MixtureShape(num_layers=3, num_dense_layers=0, num_experts=8, experts_per_token=2)
PROMPT_LENGTHS = (1, 2, 3, 5, 9, 30, 33)
SAMPLES, MAX_TOKENS = 8, 24
"""Of each prompt: few tokens change their experts in bfloat16, and these few decide a mean over all."""


def make_model(path: Path, *, vocab_size: int = VOCAB) -> Qwen3MoeForCausalLM:
    """Save a random model of SHAPE to `path`."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=SHAPE.num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        initializer_range=0.3,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        dtype="float32",
        num_experts=SHAPE.num_experts,
        num_experts_per_tok=SHAPE.experts_per_token,
        moe_intermediate_size=16,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
    )
    model = Qwen3MoeForCausalLM(config).float().eval()
    model.save_pretrained(path)
    return model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Qwen3MoeForCausalLM]:
    path = tmp_path_factory.mktemp("moe") / "model"
    return path, make_model(path)


@pytest.fixture(scope="module")
def address(model: tuple[Path, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineAddress]:
    log = tmp_path_factory.mktemp("log") / "engine.log"
    options: dict[str, Any] = {"device_kind": "cpu", "dtype": "float32", "seed": 7, "records_routing": True}
    engine = Engine(server_arguments({}, model_path=model[0], **options), log_path=log, mixture=SHAPE)
    yield engine.start()
    engine.stop()


def chosen_experts(model: Qwen3MoeForCausalLM, tokens: Sequence[int]) -> np.ndarray:
    """Experts [T, L, K] that transformers takes, in ascending order."""
    with torch.no_grad():
        logits = model(torch.tensor([tokens]), output_router_logits=True).router_logits
    return torch.stack([layer.topk(SHAPE.experts_per_token).indices.sort(-1).values for layer in logits], 1).numpy()


def test_records_cover_all_tokens_but_the_last(address: EngineAddress, model: tuple[Path, Any]) -> None:
    prompt = np.array([3, 1, 4, 1, 5])

    async def work() -> list[tuple[Generation, ...]]:
        async with EngineClient(address, request_timeout_s=60) as client:
            stopped = await client.generate(prompt, sampling=Sampling(max_tokens=60, stop_token_ids=tuple(range(7, 14))), num_samples=4)
            cached = await client.generate(prompt, sampling=Sampling(max_tokens=1), num_samples=2)
            async with in_the_middle(client.generate(prompt, sampling=Sampling(max_tokens=400)), client) as aborted:
                await client.pause("abort")
            await client.resume()
            async with in_the_middle(client.generate(prompt, sampling=Sampling(max_tokens=400)), client) as retracted:
                await client.pause("retract")
            await client.resume()
            return [stopped, cached, await aborted, await retracted]

    stopped, cached, aborted, retracted = asyncio.run(work())
    assert {generation.stop_reason for generation in stopped} == {StopReason.STOP}
    assert aborted[0].stop_reason is StopReason.ABORT and 0 < len(aborted[0].token_ids) < 400
    for generation in (*stopped, *cached, *aborted, *retracted):
        tokens = [*prompt.tolist(), *generation.token_ids.tolist()]
        assert generation.routed_experts is not None and generation.routed_experts.dtype == np.uint8
        assert generation.routed_experts.shape == (len(tokens) - 1, SHAPE.num_layers, SHAPE.experts_per_token)
        expected = chosen_experts(model[1], tokens)[:-1]
        assert (np.sort(generation.routed_experts, axis=-1) == expected).all(-1).mean() > 0.99


def generated_batch(address: EngineAddress) -> TrainBatch:
    """Samples for each prompt, with different rewards, as training gets them."""
    random = np.random.default_rng(0)
    prompts = [Prompt(id=str(length), token_ids=random.integers(0, VOCAB, length), text="") for length in PROMPT_LENGTHS]

    async def work() -> list[Group]:
        async with EngineClient(address, request_timeout_s=60) as client:
            groups = []
            for prompt in prompts:
                samples = await single_turn(
                    prompt=prompt,
                    generator=client,
                    sampling=Sampling(max_tokens=MAX_TOKENS),
                    num_samples=SAMPLES,
                    tokenizer=NumberTokenizer(),
                )
                groups.append(Group(id=prompt.id, prompt=prompt, samples=samples))
            return groups

    groups = []
    for group in asyncio.run(work()):
        rewards = [Reward(RewardOutcome.SCORED, float(sample.index)) for sample in group.samples]
        samples = [dataclasses.replace(sample, reward=reward) for sample, reward in zip(group.samples, rewards, strict=True)]
        groups.append(Group(id=group.id, prompt=group.prompt, samples=tuple(samples)))
    return make_train_batch(groups)


def train_once(model: Path, directory: Path, batch: TrainBatch, *, dtype: str, replay: bool) -> dict[str, float]:
    """Metrics of one step of one rank."""
    settings = Settings.model_validate(
        {
            "run": {"directory": directory / "run"},
            "model": {"path": model, "dtype": dtype},
            "data": {"train": "unused.jsonl"},
            "training": {"routing_replay": replay, "max_tokens_per_micro_batch": 256},
        }
    )
    trainer = Trainer.of(settings, rank=0, init_method=f"file://{directory}/rendezvous-{dtype}-{replay}")
    try:
        shard = make_shards(batch, dp=1, optimizer_steps=1, max_tokens_per_micro_batch=256, seed=0)[0]
        return metric_values(trainer.train_shard(shard)[0])
    finally:
        shutdown()


def test_replay_brings_the_trainer_closer_to_the_engine(address: EngineAddress, model: tuple[Path, Any], tmp_path: Path) -> None:
    batch = generated_batch(address)
    outcomes = {
        (dtype, replay): train_once(model[0], tmp_path, batch, dtype=dtype, replay=replay)
        for dtype in ("float32", "bfloat16")
        for replay in (False, True)
    }
    for (dtype, replay), values in outcomes.items():
        print(f"{dtype} replay {replay}: |d log-prob| {values['train/log_prob_diff']:.3g}, changed {values.get('train/routing_changed')}")
    exact, rounded = outcomes["float32", True], outcomes["bfloat16", True]
    assert batch.num_sequences == SAMPLES * len(PROMPT_LENGTHS)
    for values in (exact, rounded):
        assert values["train/routing_replayed"] == pytest.approx(1 - batch.num_sequences / len(batch.tokens))
    assert exact["train/routing_changed"] < 0.01
    assert exact["train/log_prob_diff"] < 1e-4
    assert 0.005 < rounded["train/routing_changed"] < 0.2
    # Both means are of the same tokens.
    assert rounded["train/log_prob_diff"] < 0.8 * outcomes["bfloat16", False]["train/log_prob_diff"]


@pytest.mark.slow
def test_records_of_stopped_responses_have_their_length(model: tuple[Path, Any], tmp_path: Path) -> None:
    model[1].save_pretrained(tmp_path / "model")
    words = WordLevel({f"w{index}": index for index in range(VOCAB)}, unk_token="w0")
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words)).save_pretrained(tmp_path / "model")
    stops = tuple(f"w{index}" for index in range(20, 30))
    options: dict[str, Any] = {"device_kind": "cpu", "dtype": "float32", "seed": 7, "records_routing": True, "needs_tokenizer": True}
    arguments = server_arguments({}, model_path=tmp_path / "model", **options)
    engine = Engine(arguments, log_path=tmp_path / "engine.log", mixture=SHAPE)

    async def work(address: EngineAddress) -> tuple[Generation, ...]:
        async with EngineClient(address, request_timeout_s=60) as client:
            return await client.generate(np.array([3, 1, 4]), sampling=Sampling(max_tokens=60, stop=stops), num_samples=8)

    try:
        generations = asyncio.run(work(engine.start()))
    finally:
        engine.stop()
    assert {generation.stop_reason for generation in generations} == {StopReason.STOP}
    for generation in generations:
        assert generation.routed_experts is not None and len(generation.routed_experts) == 3 + len(generation.token_ids) - 1
        expected = chosen_experts(model[1], [3, 1, 4, *generation.token_ids.tolist()])[:-1]
        assert (np.sort(generation.routed_experts, axis=-1) == expected).all(-1).mean() > 0.99


@pytest.mark.slow
def test_a_run_replays_what_its_engine_chose(task: Path, tmp_path: Path, start: Callable[..., Any]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(task / "model")
    make_model(tmp_path / "model", vocab_size=len(tokenizer))
    tokenizer.save_pretrained(tmp_path / "model")
    sizes = (f"model.path={tmp_path / 'model'}", "run.num_steps=2", "data.prompts_per_step=8", "rollout.sampling.max_response_tokens=12")
    replay = ("training.routing_replay=true", "model.megatron.moe_aux_loss_coeff=0.01", "training.topology={num_ranks: 2, ep: 2}")
    run = start(*rl_arguments(task, tmp_path / "run", *sizes, *replay))
    assert run.wait() == 0, run.output
    steps = [row for row in metrics(tmp_path / "run").values() if "train/routing_replayed" in row]
    assert len(steps) == 2
    for row in steps:
        assert row["train/routing_replayed"] > 0.8
        assert row["train/routing_changed"] < 0.01 and row["train/routing_reordered"] < 0.01
        assert row["train/log_prob_diff"] < 1e-4
        assert row["train/expert_load_max"] > 1
        assert row["train/aux_loss"] > 0.9


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["pp: 2", "ep: 2", "tp: 2, sequence_parallel: true", "cp: 2"])
def test_a_mixture_agrees_under_top_p_and_every_layout(task: Path, tmp_path: Path, start: Callable[..., Any], layout: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(task / "model")
    make_model(tmp_path / "model", vocab_size=len(tokenizer))
    tokenizer.save_pretrained(tmp_path / "model")
    sizes = (f"model.path={tmp_path / 'model'}", "run.num_steps=2", "data.prompts_per_step=8", "rollout.sampling.max_response_tokens=12")
    words = ("rollout.sampling.top_p=0.95", "eval={}", f"training.topology={{num_ranks: 2, {layout}}}", *sizes)
    # Of three layers.
    stages = "model.megatron={num_layers_in_first_pipeline_stage: 2, num_layers_in_last_pipeline_stage: 1}"
    run = start(*rl_arguments(task, tmp_path / "run", *words, *[stages] * ("pp" in layout)))
    assert run.wait() == 0, run.output
    rows = [row for row in metrics(tmp_path / "run").values() if "train/log_prob_diff" in row]
    names = ("train/log_prob_diff", "train/log_prob_diff_max", "train/log_prob_outliers", "train/candidates")
    print(layout, [{name: row[name] for name in names} for row in rows])
    assert len(rows) == 2 and all(row["train/log_prob_diff"] <= 1e-6 and row["train/candidates"] > 1 for row in rows)
