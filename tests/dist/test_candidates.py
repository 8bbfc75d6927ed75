"""Log-probs, ratios, KLs, entropies and gradients over recorded candidates: those of a float64 loop, and equal under every layout."""

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from layout_runs import Outcome, check_ranks_agree, compare, make_batch, make_settings, make_trainer, merged_metrics, outcome_of, shards_of
from layout_table import DISTRIBUTED, SEQUENCE_PARALLEL, Layout
from test_routing import QWEN3

VOCAB, ONE = 32, "one"
TEMPERATURE, LOW, HIGH, KL, ENTROPY = 0.7, 0.02, 0.03, 0.05, 0.01
TWO_RANKS: dict[str, Layout] = {
    ONE: Layout(),
    "tp2 sp": Layout(2, SEQUENCE_PARALLEL),
    "cp2": Layout(2, {"cp": 2}),
    "pp2": Layout(2, {"pp": 2}),
    "ep2": Layout(2, {"ep": 2}),
}
MORE: dict[str, Layout] = {
    ONE: Layout(),
    "micro-batches of 10, distopt": Layout(2, budget=10, optimizer=DISTRIBUTED),
    "tp4 sp": Layout(4, {**SEQUENCE_PARALLEL, "tp": 4}),
    "tp2 cp2 sp": Layout(4, {**SEQUENCE_PARALLEL, "cp": 2}),
    "tp2 ep2 etp1 sp": Layout(4, {**SEQUENCE_PARALLEL, "ep": 2, "etp": 1}),
    "pp2 vpp2 cp2": Layout(4, {"pp": 2, "vpp": 2, "cp": 2}),
}


def sampled_batch(seed: int) -> Any:
    """A batch with candidates: one for about half of the trainable tokens, else two to eight, by chance with all of the vocabulary."""
    from megatron_rl.system.frozen_arrays import Candidates

    batch, random = make_batch(seed, vocab=VOCAB), np.random.default_rng(seed)
    sets = []
    for token, trained in zip(batch.tokens.tolist(), batch.loss_mask, strict=True):
        count = int(random.choice([1, 1, 2, 5, 8, VOCAB])) if trained else 0
        others = random.permutation([other for other in range(VOCAB) if other != token])
        sets.append(random.permutation([token, *others[: count - 1]]).tolist() if count else [])
    advantages = np.repeat(random.normal(size=batch.num_sequences), batch.lengths)
    return dataclasses.replace(batch, candidates=Candidates.of(sets), advantages=advantages)


def run(rank: int, world_size: int, init_method: str, model: str, directory: str, layouts: dict[str, Layout]) -> dict[str, Outcome]:
    """Two batches under each layout. The old log-probs of the second are those before the first."""
    from megatron_rl.training.topology import shutdown

    outcomes = {}
    for number, (name, layout) in enumerate(layouts.items()):
        if rank >= layout.num_ranks:
            continue
        print(f"layout {name}", flush=True)
        objective = {
            "policy_loss": {"kind": "clip", "low": LOW, "high": HIGH}, "aggregation": "token_mean",
            "kl": {"coef": KL, "estimator": "k3"}, "entropy": {"coef": ENTROPY},
        }  # fmt: skip
        settings = make_settings(model, Path(directory) / str(number), layout, objective=objective)
        sampling = settings.rollout.sampling.model_copy(update={"temperature": TEMPERATURE})
        settings = settings.model_copy(update={"rollout": settings.rollout.model_copy(update={"sampling": sampling})})
        trainer = make_trainer(settings, rank, f"{init_method}-{number}")
        second = dataclasses.replace(sampled_batch(2), old_log_probs=trainer.log_probs(sampled_batch(2)))
        metrics = trainer.train_shard(shards_of(sampled_batch(1), settings)[trainer.dp_rank])
        between = {name: tensor.float().numpy().copy() for name, tensor in trainer.weights()}
        metrics += trainer.train_shard(shards_of(second, settings)[trainer.dp_rank])
        outcomes[name] = outcome_of(trainer, metrics, log_probs=[second.old_log_probs], whole=rank == 0)
        outcomes[name]["between"] = between if name == ONE else None
        shutdown()
    return outcomes


def by_definition(model: Any, batch: Any) -> list[dict[str, torch.Tensor]]:
    """Log-prob, entropy and full entropy of every trainable token, a token at a time."""
    tokens, sets = batch.tokens, np.split(batch.candidates.ids, np.cumsum(batch.candidates.counts)[:-1])
    found = []
    for start, end in zip(batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist(), strict=True):
        logits = model(torch.tensor(tokens[start:end])[None]).logits[0] / TEMPERATURE
        for index in range(start, end):
            if batch.loss_mask[index]:
                row, columns = logits[index - start - 1], torch.tensor(sets[index])
                log_p, full = row[columns] - row[columns].exp().sum().log(), row - row.exp().sum().log()
                log_prob = log_p[sets[index].tolist().index(tokens[index])]
                found.append({"log_prob": log_prob, "entropy": -(log_p.exp() * log_p).sum(), "full_entropy": -(full.exp() * full).sum()})
    return found


def expected_step(path: str, between: dict[str, np.ndarray]) -> tuple[dict[str, float], np.ndarray]:
    """Metrics of the second step and the log-probs before the first, by transformers in float64."""
    import transformers
    from safetensors.numpy import save_file

    changed, batch = Path(f"{path}-between"), sampled_batch(2)
    changed.mkdir()
    shutil.copy(Path(path) / "config.json", changed)
    save_file(between, changed / "model.safetensors")
    options = {"dtype": torch.float64, "experts_implementation": "eager"}
    first, model = (transformers.AutoModelForCausalLM.from_pretrained(each, **options) for each in (path, changed))
    # transformers gives the embedding of a padding token no gradient.
    model.get_input_embeddings().padding_idx = None
    with torch.no_grad():
        old = [token["log_prob"] for token in by_definition(first, batch)]
    tokens = by_definition(model, batch)
    losses, seen = [], {name: 0.0 for name in ("ratio", "ppo_kl", "kl_k3", "entropy", "full_entropy")}
    for token, before, advantage in zip(tokens, old, batch.advantages[batch.loss_mask].tolist(), strict=True):
        ratio, distance = (token["log_prob"] - before).exp(), before - token["log_prob"]
        k3 = distance.exp() - 1 - distance
        clipped = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - LOW, 1 + HIGH))
        losses.append(clipped + KL * k3 - ENTROPY * token["entropy"])
        values = {"ratio": ratio, "ppo_kl": distance, "kl_k3": k3, "entropy": token["entropy"], "full_entropy": token["full_entropy"]}
        seen = {name: seen[name] + float(value.detach()) for name, value in values.items()}
    loss = torch.stack(losses).sum() / len(losses)
    loss.backward()
    norm = torch.stack([each.grad.norm() for each in model.parameters() if each.grad is not None]).norm()
    counts = batch.candidates.counts[batch.loss_mask]
    means = {f"train/{name}": value / len(losses) for name, value in seen.items()}
    means |= {"train/loss": float(loss.detach()), "train/grad_norm": float(norm)}
    return {**means, "train/candidates": counts.mean(), "train/lone_candidate": (counts == 1).mean()}, torch.stack(old).numpy()


def assert_layouts_agree(results: list[dict[str, Outcome]], layouts: dict[str, Layout]) -> None:
    for name in layouts:
        outcomes = [result[name] for result in results if name in result]
        difference = compare(outcomes, [results[0][ONE]])
        print(f"{name}: {difference}")
        assert difference.largest <= 1e-5, f"{name}: {difference}"
        check_ranks_agree(outcomes)


def test_candidates_mean_the_same_to_every_layout(run_ranks: Callable[..., Any], tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    path = str(tiny_model(**QWEN3))
    results = run_ranks(run, 2, path, str(tmp_path), TWO_RANKS, timeout_s=240)
    base = results[0][ONE]
    wanted, old = expected_step(path, base["between"])
    _, second = merged_metrics([base])
    for name, value in wanted.items():
        assert second[name] == pytest.approx(value, rel=2e-5, abs=2e-6), name
    assert abs(second["train/ratio"] - 1) > 1e-4 and second["train/full_entropy"] > second["train/entropy"] > 0.1
    batch = sampled_batch(2)
    np.testing.assert_allclose(base["log_probs"][0][batch.loss_mask], old, atol=2e-6)
    assert_layouts_agree(results, TWO_RANKS)


@pytest.mark.slow
def test_candidates_on_four_ranks(run_ranks: Callable[..., Any], tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    results = run_ranks(run, 4, str(tiny_model(**QWEN3)), str(tmp_path), MORE, timeout_s=480)
    assert_layouts_agree(results, MORE)
