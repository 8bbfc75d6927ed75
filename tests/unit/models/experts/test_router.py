"""The router against ten-line float64 references: what it counts, its own losses' gradients, and experts that it is given."""

import dataclasses
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_rl.checkpoints.stored_weights import load_hf_weights
from megatron_rl.config.settings import TopologySettings
from megatron_rl.errors import UserError
from megatron_rl.models.build import build_model
from megatron_rl.models.experts.routed_tokens import RoutedTokens, RouterStep, Routing
from megatron_rl.models.experts.router import PackedRouter
from megatron_rl.models.megatron_config import transformer_config
from megatron_rl.models.packed_sequences import packed_sequences
from megatron_rl.models.read_spec import read_model_spec

MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "hidden": 32,
    "tied": False,
}
LENGTHS = (5, 1, 9, 4)
COUNTED = (True, True, False, True)
NUM_PADDING = 3


@pytest.fixture
def model(tiny_model, one_rank):
    """Make the model of MOE with fields of megatron-core's configuration."""
    path = tiny_model(**MOE)

    def make(**overrides):
        spec = read_model_spec(path)
        config = transformer_config(spec, topology=TopologySettings(), dtype=torch.float32, overrides=overrides)
        chunks = build_model(spec, config, attention="torch")
        load_hf_weights(chunks, spec, path)
        return chunks[0]

    return make


def tokens_of(lengths=LENGTHS, counted=COUNTED, padding: int = NUM_PADDING, **record) -> RoutedTokens:
    index = np.concatenate([np.repeat(np.arange(len(lengths)), lengths), np.full(padding, -1)])
    return RoutedTokens(torch.from_numpy(index), torch.tensor(lengths), torch.tensor(counted), **record)


def make_step(*, layers: int = 1, balance: float = 0.0, z: float = 0.0) -> RouterStep:
    """A step of 7 sequences and 50 tokens, of which the micro-batch at hand is a part."""
    losses = {"num_sequences": 7, "num_tokens": 50, "balance_coef": balance, "z_coef": z}
    return RouterStep(**losses, num_layers=layers, num_experts=6, device=torch.device("cpu"))


def hidden_states(seed: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(sum(LENGTHS) + NUM_PADDING, 1, 32, generator=generator).requires_grad_()


def normalised(logits: Tensor, score_function: str) -> Tensor:
    scores = logits.sigmoid() if score_function == "sigmoid" else logits.softmax(-1)
    return scores / scores.sum(-1, keepdim=True)


def reference_balance_loss(logits: Tensor, score_function: str) -> Tensor:
    """Equations 17 to 20 of arXiv 2412.19437, summed over counted sequences and divided by the step's."""
    total, start = torch.zeros((), dtype=torch.float64), 0
    for length, counted in zip(LENGTHS, COUNTED, strict=True):
        scores = normalised(logits[start : start + length], score_function)
        chosen = torch.zeros_like(scores).scatter(1, scores.topk(2).indices, 1.0)
        fraction = 6 / (2 * length) * chosen.sum(0)
        total = total + counted * (fraction * scores.mean(0)).sum() / 7
        start += length
    return total


@pytest.mark.parametrize("score_function", ["softmax", "sigmoid"])
def test_auxiliary_gradients_are_those_of_the_formulas(model, score_function):
    router: PackedRouter = model().decoder.layers[0].mlp.router
    router.score_function = score_function
    hidden, step = hidden_states(), make_step(balance=0.3, z=0.02)
    router.routing_call = Routing(tokens_of(), step=step)
    probabilities, _ = router(hidden)
    (probabilities * 0.0).sum().backward()

    inputs, weight = hidden.detach().double()[:, 0].requires_grad_(), router.weight.detach().double().requires_grad_()
    logits = inputs @ weight.T
    balance = reference_balance_loss(logits, score_function)
    counted = torch.cat([torch.repeat_interleave(torch.tensor(COUNTED), torch.tensor(LENGTHS)), torch.zeros(NUM_PADDING, dtype=torch.bool)])
    z_loss = logits.logsumexp(-1).square()[counted].sum() / 50
    (0.3 * balance + 0.02 * z_loss).backward()
    torch.testing.assert_close(router.weight.grad.double(), weight.grad, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(hidden.grad[:, 0].double(), inputs.grad, rtol=1e-5, atol=1e-7)
    report = step.reduce(torch.clone)
    assert report.balance_loss == pytest.approx(balance.item(), rel=1e-6)
    assert report.z_loss == pytest.approx(z_loss.item(), rel=1e-6)
    assert weight.grad.abs().max() > 1e-3, "the gradient must be seen for this test to be able to fail"


def test_padding_and_passes_without_gradients_are_not_counted(model):
    router: PackedRouter = model().decoder.layers[1].mlp.router
    step = make_step(layers=2)
    router.routing_call = Routing(tokens_of(), step=step)
    with torch.no_grad():
        router(hidden_states())
    assert step.reduce(torch.clone).load.sum() == 0
    _, taken = router(hidden_states())
    load = step.reduce(torch.clone).load
    torch.testing.assert_close(load[1], taken[:-NUM_PADDING].sum(0).double())
    assert load[0].sum() == 0 and load[1].sum() == 2 * sum(LENGTHS)


def record(experts: Tensor, recorded: Tensor) -> RoutedTokens:
    """Experts [T, L, K] that were recorded for two layers."""
    return tokens_of(experts=experts.to(torch.uint8).transpose(0, 1), recorded=recorded)


@pytest.mark.parametrize("scores", ["softmax of the chosen", "softmax of all", "sigmoid with bias"])
def test_replayed_experts_get_weights_of_their_own_scores(model, scores):
    router: PackedRouter = model().decoder.layers[1].mlp.router
    router.config.moe_router_topk_scaling_factor = 1.5
    bias = torch.linspace(-1, 1, 6)
    if scores == "softmax of all":
        router.config.moe_router_pre_softmax = True
    if scores == "sigmoid with bias":
        router.score_function, router.expert_bias = "sigmoid", bias
    step, hidden = make_step(layers=2), hidden_states()
    free, free_taken = router(hidden)
    experts = torch.rand(len(hidden), 6, generator=torch.Generator().manual_seed(1)).argsort(1)[:, :2]
    experts[:2] = free_taken[:2].nonzero()[:, 1].view(2, 2)
    recorded = tokens_of().real & (torch.arange(len(experts)) != 4)
    router.routing_call = Routing(record(torch.stack([experts.roll(1, 0), experts], 1), recorded), replay=True, step=step)
    probabilities, taken = router(hidden)
    (probabilities * torch.arange(6.0)).sum().backward()

    inputs = hidden.detach().double()[:, 0].requires_grad_()
    logits = inputs @ router.weight.detach().double().T
    affinity = logits.sigmoid() if scores == "sigmoid with bias" else logits.softmax(-1)
    own = (affinity + bias if scores == "sigmoid with bias" else affinity).topk(2).indices
    chosen = torch.where(recorded[:, None], experts, own)
    weights = affinity.gather(1, chosen)
    if scores != "softmax of all":
        weights = weights / weights.sum(-1, keepdim=True)
    expected = torch.zeros_like(logits).scatter(1, chosen, 1.5 * weights)
    (expected * torch.arange(6.0)).sum().backward()
    torch.testing.assert_close(probabilities.double(), expected, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(taken, expected > 0)
    torch.testing.assert_close(hidden.grad[:, 0].double(), inputs.grad, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(probabilities[~recorded], free[~recorded], rtol=0, atol=0)
    changed = (experts.sort(-1).values != own.sort(-1).values).any(-1) & recorded
    report = step.reduce(torch.clone)
    assert (report.replayed, report.changed) == (int(recorded.sum()), int(changed.sum()))
    assert 0 < changed.sum() < recorded.sum(), "some tokens must be routed as before for this test to be able to fail"


def packed_batch(seed: int, **routing):
    """Token ids [1, T] and packed sequences of one micro-batch without padding."""
    lengths = LENGTHS if seed % 2 else LENGTHS[::-1]
    ids = torch.randint(0, 32, (1, sum(lengths)), generator=torch.Generator().manual_seed(seed))
    packed = packed_sequences(np.concatenate([[0], np.cumsum(lengths)]))
    return ids, packed, tokens_of(lengths, COUNTED, 0)


def run_two(chunk, step: RouterStep | None, records=(None, None)) -> dict[str, Tensor]:
    """Gradients of two micro-batches whose forwards run before their backwards, as in a pipeline."""
    chunk.zero_grad()
    losses = []
    for seed, experts in enumerate(records):
        ids, packed, tokens = packed_batch(seed)
        if experts is not None:
            tokens = dataclasses.replace(tokens, experts=experts.transpose(0, 1), recorded=tokens.real)
        routing = Routing(tokens, replay=experts is not None, step=step)
        logits = chunk(ids, packed.positions[None], None, packed_seq_params=dataclasses.replace(packed, routing=routing))
        losses.append(logits.log_softmax(-1).square().mean())
    for loss in losses:
        loss.backward()
    return {name: parameter.grad.clone() for name, parameter in chunk.named_parameters()}


def _keep_second(kept: list[Tensor], module: object, arguments: object, output: tuple[Tensor, Tensor]) -> None:
    kept.append(output[1])


def own_experts(chunk) -> list[Tensor]:
    """The experts [T, L, K] that the model itself takes for the two micro-batches, in ascending order."""
    records = []
    for seed in range(2):
        taken: list[Tensor] = []
        keep = partial(_keep_second, taken)
        hooks = [layer.mlp.router.register_forward_hook(keep) for layer in chunk.decoder.layers]
        ids, packed, tokens = packed_batch(seed)
        with torch.no_grad():
            chunk(ids, packed.positions[None], None, packed_seq_params=dataclasses.replace(packed, routing=Routing(tokens)))
        for hook in hooks:
            hook.remove()
        records.append(torch.stack([mask.nonzero()[:, 1].view(-1, 2) for mask in taken], 1).to(torch.uint8))
    return records


def test_replaying_the_own_routing_changes_no_bit(model):
    chunk = model()
    free = run_two(chunk, None)
    step = make_step(layers=2)
    replayed = run_two(chunk, step, own_experts(chunk))
    for name, gradient in free.items():
        assert torch.equal(replayed[name], gradient), name
    report = step.reduce(torch.clone)
    assert (report.replayed, report.changed) == (2 * 2 * sum(LENGTHS), 0)


@pytest.mark.parametrize(
    ("recompute", "calls"),
    [
        ({"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}, 8),
        ({"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1}, 6),
        ({"recompute_granularity": "selective", "recompute_modules": ["moe"]}, 8),
    ],
    ids=["full uniform", "full block", "selective moe"],
)
def test_recomputed_layers_route_and_count_their_tokens_once(model, recompute, calls):
    plain = model()
    # Other experts than the model's own, and other ones in each micro-batch.
    records = [(experts + 1 + seed) % 6 for seed, experts in enumerate(own_experts(plain))]
    step, again_step = make_step(layers=2, balance=0.5, z=0.1), make_step(layers=2, balance=0.5, z=0.1)
    expected = run_two(plain, step, records)
    recomputing, taken = model(**recompute), []
    for layer in recomputing.decoder.layers:
        layer.mlp.router.register_forward_hook(partial(_keep_second, taken))
    again = run_two(recomputing, again_step, records)
    assert len(taken) == calls, "2 layers route 2 micro-batches, once more where they are recomputed"
    for name, gradient in expected.items():
        torch.testing.assert_close(again[name], gradient, rtol=0, atol=0, msg=name)
    report, again_report = step.reduce(torch.clone), again_step.reduce(torch.clone)
    assert torch.equal(report.load, again_report.load)
    assert report.load.sum() == 2 * 2 * 2 * sum(LENGTHS)
    for field in ("replayed", "changed", "balance_loss", "z_loss"):
        assert getattr(report, field) == getattr(again_report, field) > 0, field


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.01}, "'aux_loss' with .*_coeff 0.01.*seq_aux_loss"),
        ({"moe_router_load_balancing_type": "global_aux_loss", "moe_aux_loss_coeff": 0.01}, "global_aux_loss"),
        ({"moe_router_load_balancing_type": "sinkhorn"}, "sinkhorn"),
        ({"moe_expert_capacity_factor": 1.0}, "moe_expert_capacity_factor is 1.0"),
        ({"moe_input_jitter_eps": 0.1}, "moe_input_jitter_eps"),
    ],
)
def test_what_depends_on_the_packing_is_refused(model, fields, message):
    with pytest.raises(UserError, match=message):
        model(**fields)


def test_a_coefficient_alone_means_the_balance_of_sequences(model):
    assert model(moe_aux_loss_coeff=0.01).config.moe_router_load_balancing_type == "seq_aux_loss"
