"""Logits and gradients of the Megatron model under every two-rank layout equal those of transformers, and weights survive the trip."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

# Multiples of 2 cp, as context parallelism needs them; some longer than the short-sequence path takes.
LENGTHS = (8, 12, 4, 80, 12, 40, 132)
LAYOUTS = {
    "tp2": {"tp": 2},
    "tp2+sp": {"tp": 2, "sequence_parallel": True},
    "cp2": {"cp": 2},
    "pp2": {"pp": 2},
    "pp2 vpp2": {"pp": 2, "vpp": 2},
}
MODELS = {
    "tied": {},
    "untied, vocabulary not divisible by 2": {"tied": False, "vocab": 33},
    "olmo2": {"family": "olmo2"},
    "glm4": {"family": "glm4", "tied": False},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "tied": False},
}


def inputs(vocab: int):
    """Token ids [T] and the weights [T, vocab] of the logits in the loss, the same on every rank and in the reference."""
    generator = torch.Generator().manual_seed(3)
    return torch.randint(1, vocab, (sum(LENGTHS),), generator=generator), torch.randn(sum(LENGTHS), vocab, generator=generator)


def zigzag(cp: int, rank: int) -> torch.Tensor:
    """Tokens of a context parallel rank, sequence by sequence, written out plainly."""
    tokens, start = [], 0
    for length in LENGTHS:
        chunks = torch.arange(start, start + length).chunk(2 * cp) if cp > 1 else [torch.arange(start, start + length)]
        tokens += [chunks[rank], chunks[2 * cp - 1 - rank]] if cp > 1 else chunks
        start += length
    return torch.cat(tokens)


def work(rank: int, world_size: int, init_method: str, paths: dict[str, str]):
    """For every model and layout: (model, layout) -> local logits, tokens, exported gradients, exported weights."""
    from megatron.core import parallel_state, tensor_parallel

    from megatron_rl.system.device import local_device, prepare_megatron

    prepare_megatron(local_device())
    dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=world_size)
    results = {}
    for layout, topology in LAYOUTS.items():
        parallel_state.initialize_model_parallel(
            topology.get("tp", 1), topology.get("pp", 1), topology.get("vpp"), context_parallel_size=topology.get("cp", 1)
        )
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        for name, path in paths.items():
            results[name, layout] = one_case(Path(path), topology, world_size)
        parallel_state.destroy_model_parallel()
    return results


def one_case(path: Path, topology: dict, world_size: int) -> dict:
    """Load, run forward and backward, and hand back what the main process compares."""
    from megatron.core import parallel_state

    from megatron_rl.checkpoints.stored_weights import load_hf_weights
    from megatron_rl.config.settings import TopologySettings
    from megatron_rl.models.build import build_model
    from megatron_rl.models.hf_weights import export_hf_weights
    from megatron_rl.models.megatron_config import transformer_config
    from megatron_rl.models.packed_sequences import packed_sequences
    from megatron_rl.models.read_spec import read_model_spec
    from megatron_rl.system.device import local_device
    from megatron_rl.weights.transport import WeightSpec, exported_specs

    spec = read_model_spec(path)
    settings = TopologySettings(num_ranks=world_size, **topology)
    config = transformer_config(spec, topology=settings, dtype=torch.float32, overrides={})
    chunks = build_model(spec, config, attention="torch")
    load_hf_weights(chunks, spec, path)
    if spec.qk_norm_over_heads:
        saved = {key: tensor for chunk in chunks for key, tensor in chunk.sharded_state_dict().items() if "q_layernorm.weight" in key}
        assert saved and {tensor.global_shape[-1] for tensor in saved.values()} == {spec.num_heads * spec.head_dim}
    weights = {key: tensor.clone() for key, tensor in export_hf_weights(chunks, spec)}
    assert exported_specs(spec, dtype="float32") == tuple(WeightSpec.of(key, tensor) for key, tensor in weights.items())
    cp_rank, tp_rank = parallel_state.get_context_parallel_rank(), parallel_state.get_tensor_model_parallel_rank()
    tokens, device = zigzag(settings.cp, cp_rank), local_device().torch_device
    input_ids, loss_weights = (tensor.to(device) for tensor in inputs(spec.vocab_size))
    cu_seqlens = np.concatenate([[0], np.cumsum(LENGTHS)])
    packed = packed_sequences(cu_seqlens, cp_size=settings.cp, cp_rank=cp_rank)
    padded = torch.nn.functional.pad(loss_weights[tokens], (0, spec.padded_vocab_size(settings.tp) - spec.vocab_size))
    logits = run(chunks, input_ids[tokens][None], packed, padded.chunk(settings.tp, dim=-1)[tp_rank])
    reduce_gradients(chunks, settings)
    for parameter in itertools.chain.from_iterable(model.parameters() for model in chunks):
        parameter.data = parameter.grad
    gradients = dict(export_hf_weights(chunks, spec))
    return {"logits": logits, "tokens": tokens, "gradients": gradients, "weights": weights}


def run(chunks, input_ids, packed, loss_weights):
    """Forward and backward of sum(logits * loss_weights), stage after stage. Local logits [T, V / tp], None where there are none."""
    from megatron.core import parallel_state

    rank, pp = parallel_state.get_pipeline_model_parallel_rank(), parallel_state.get_pipeline_model_parallel_world_size()
    last = pp * len(chunks) - 1
    ends = {}
    for stage in range(rank, last + 1, pp):
        received, model = input_ids.new_empty(input_ids.shape[1], 1, chunks[0].config.hidden_size, dtype=torch.float32), chunks[stage // pp]
        if stage > 0:
            dist.recv(received, (rank - 1) % pp)
            model.set_input_tensor(received.requires_grad_())
        ends[stage] = received, model(input_ids, packed.positions[None], None, packed_seq_params=packed)
        if stage < last:
            dist.send(ends[stage][1].detach(), (rank + 1) % pp)
    for stage, (received, output) in reversed(ends.items()):
        gradient = torch.empty_like(output)
        if stage == last:
            gradient = loss_weights[None]
        else:
            dist.recv(gradient, (rank + 1) % pp)
        output.backward(gradient)
        if stage > 0:
            dist.send(received.grad, (rank - 1) % pp)
    return ends[last][1][0].detach() if last in ends else None


def reduce_gradients(chunks, settings) -> None:
    """What megatron's finalize_model_grads and DDP do: sum partial gradients of parameters that several ranks hold."""
    from megatron.core import parallel_state

    for name, parameter in itertools.chain.from_iterable(model.named_parameters() for model in chunks):
        # A norm over all heads is split over the ranks like the heads.
        split = getattr(parameter, "tensor_model_parallel", False)
        per_head = ("q_layernorm" in name or "k_layernorm" in name) and not split
        if settings.tp > 1 and (per_head or (settings.sequence_parallel and parameter.ndim == 1 and not split)):
            assert parameter.sequence_parallel == settings.sequence_parallel, "megatron sums what carries this mark"
            dist.all_reduce(parameter.grad)
        if settings.cp > 1:
            dist.all_reduce(parameter.grad)
    if settings.pp > 1 and chunks[0].share_embeddings_and_output_weights:
        holder = chunks[0] if chunks[0].pre_process else chunks[-1]
        dist.all_reduce(holder.shared_embedding_or_output_weight().grad, group=parallel_state.get_embedding_group())


def reference(path: Path):
    """Logits [T, V] and gradients by name of the transformers model in float64."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    input_ids, loss_weights = inputs(model.config.vocab_size)
    outputs = [model(part[None]).logits[0] for part in input_ids.split(LENGTHS)]
    logits = torch.cat(outputs)
    (logits * loss_weights.double()).sum().backward()
    return logits.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.timeout(150)
def test_two_rank_layouts_equal_transformers(tiny_model, run_ranks):
    from safetensors.torch import load_file

    paths = {name: str(tiny_model(name=f"model{index}", layers=4, **config)) for index, (name, config) in enumerate(MODELS.items())}
    ranks = run_ranks(work, 2, paths, timeout_s=120.0)
    for name, path in paths.items():
        expected, gradients = reference(Path(path))
        original = load_file(Path(path) / "model.safetensors")
        for layout, topology in LAYOUTS.items():
            results = [rank[name, layout] for rank in ranks]
            torch.testing.assert_close(
                whole_logits(results, topology, expected), expected, rtol=0, atol=2e-5, msg=f"{name} {layout} logits"
            )
            for result in results:
                assert list(result["weights"]) == list(results[0]["weights"]), "every rank exports the same names in the same order"
                assert all(torch.equal(result["weights"][key], original[key]) for key in original), f"{name} {layout} round trip"
                compare_gradients(result["gradients"], gradients, f"{name} {layout}")


def whole_logits(results: list[dict], topology: dict, like: torch.Tensor) -> torch.Tensor:
    """Put the ranks' local logits together, without padding columns."""
    if "tp" in topology:
        return torch.cat([result["logits"] for result in results], dim=-1)[:, : like.shape[1]].double()
    logits = torch.full_like(like, float("nan"))
    for result in results:
        if result["logits"] is not None:
            logits[result["tokens"]] = result["logits"].double()
    return logits


def compare_gradients(got: dict, expected: dict, label: str) -> None:
    """Relative to the largest entry of each gradient, to rounding of float32."""
    assert got.keys() == expected.keys()
    for name, gradient in got.items():
        error = (gradient.double() - expected[name]).abs().max() / expected[name].abs().max()
        assert error < 1e-5, f"{label}: gradient of {name} differs by {error:.1e}"
