"""Two checkpoints of one model run on the same tokens: how far their log-probs are apart, and where their hidden states part.

Legend: T tokens of a prompt, V vocabulary, H hidden channels.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_rl.config.settings import TopologySettings
from megatron_rl.convert.sources import HuggingFaceSource, Source, open_source
from megatron_rl.device import local_device, prepare_megatron
from megatron_rl.errors import UserError
from megatron_rl.models.build import PolicyModel, build_model
from megatron_rl.models.hf_weights import load_weights
from megatron_rl.models.megatron_config import transformer_config
from megatron_rl.models.model_spec import ModelSpec
from megatron_rl.models.packed_sequences import packed_sequences
from megatron_rl.training.topology import Topology, initialize, shutdown

_LENGTHS = (7, 61)
_BEYOND = 24
"""Tokens of the longest prompt beyond the length that a scaled rotary embedding was trained at."""


@dataclass(frozen=True, slots=True)
class Outputs:
    """What a model makes of a prompt: log-probs [T, V], and the hidden states [T, H] behind each layer, the last one behind the norm."""

    log_probs: Tensor
    hidden: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """How far two models are apart: |Δ log-prob| of the prompts' next tokens, the share of places where both have the same argmax.

    `layer` is the first one, counted from 0, behind which hidden states part by more than `tolerance` of their size, None without one.
    `tolerance` None is of models whose weights differ on purpose, by rounding.
    """

    num_tokens: int
    max_difference: float
    mean_difference: float
    same_argmax: float
    layer: int | None
    tolerance: float | None

    @property
    def same(self) -> bool:
        """Whether the two are one model. Where their weights differ on purpose, whether both give numbers."""
        allowed = sys.float_info.max if self.tolerance is None else 100 * self.tolerance
        return self.layer is None and self.max_difference <= allowed

    def line(self) -> str:
        """In words."""
        numbers = f"{self.num_tokens} tokens: |Δ log-prob| max {self.max_difference:.2e}, mean {self.mean_difference:.2e}; same argmax "
        numbers += f"{self.same_argmax:.2%}; "
        if self.tolerance is None:
            return f"{numbers}that is what rounding the weights does"
        limit = f"by more than {self.tolerance:g} of their size"
        if self.layer is None:
            return f"{numbers}hidden states are nowhere apart {limit}"
        return f"{numbers}hidden states part behind layer {self.layer} {limit}"


def prompts(spec: ModelSpec) -> list[Tensor]:
    """Token ids [T] of the prompts: the same for everyone, one longer than a scaled rotary embedding was trained at."""
    lengths = list(_LENGTHS)
    if spec.rotary.kind != "default":
        lengths.append(min(spec.rotary.original_max_position_embeddings + _BEYOND, spec.max_position_embeddings))
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, spec.vocab_size, (length,), generator=generator) for length in lengths]


def compare(one: Path, other: Path, *, config: Path | None = None, tolerance: float | None = 1e-5) -> Comparison:
    """Run both checkpoints in float32 and compare. Hugging Face directories are run by transformers, quantised ones and ours by Megatron.

    `config` is the Hugging Face directory of a foreign checkpoint `one`.
    """
    with closing(open_source(one, config=config)) as source:
        tokens = prompts(source.spec)
        first = outputs(source, tokens)
    with closing(open_source(other)) as source:
        second = outputs(source, tokens)
    return difference(tokens, first, second, tolerance=tolerance)


def difference(tokens: Sequence[Tensor], first: Sequence[Outputs], second: Sequence[Outputs], *, tolerance: float | None) -> Comparison:
    """The comparison of what two models make of the prompts `tokens`, each [T]."""
    apart, agree = [], []
    layers: list[int] = []
    for ids, one, other in zip(tokens, first, second, strict=True):
        following = ids[1:, None]
        apart.append((one.log_probs[:-1].gather(1, following) - other.log_probs[:-1].gather(1, following)).abs().flatten().double())
        agree.append((one.log_probs.argmax(-1) == other.log_probs.argmax(-1)).double())
        if tolerance is not None:
            layers += [index for index, pair in enumerate(zip(one.hidden, other.hidden, strict=True)) if not _near(*pair, tolerance)][:1]
    gaps = torch.cat(apart)
    return Comparison(
        num_tokens=len(torch.cat(agree)),
        # Not a number is as far apart as can be.
        max_difference=gaps.nan_to_num(nan=float("inf")).max().item(),
        mean_difference=gaps.mean().item(),
        same_argmax=torch.cat(agree).mean().item(),
        layer=min(layers, default=None),
        tolerance=tolerance,
    )


def _near(one: Tensor, other: Tensor, tolerance: float) -> bool:
    return bool((one - other).abs().max() <= tolerance * one.abs().max())


def outputs(source: Source, tokens: Sequence[Tensor]) -> list[Outputs]:
    """What the model of `source` makes of each prompt [T]."""
    return _by_transformers(source, tokens) if run_by_transformers(source) else _by_megatron(source, tokens)


def run_by_transformers(source: Source) -> bool:
    """Whether `source` is what transformers reads: plain safetensors."""
    return isinstance(source, HuggingFaceSource) and not source.quantised


def transformers_config(source: Source) -> Any:
    """What transformers' class of the architecture makes of config.json, whatever `model_type` says there: Kimi-K2 has one of its own.

    No code of the directory is run. Raises UserError when transformers has no such class, or refuses the file.
    """
    import transformers

    unopened = f"transformers {transformers.__version__}, by which {source.directory} is to be run,"
    try:
        named = getattr(transformers, source.spec.architecture)
    except AttributeError as error:
        raise UserError(f"{unopened} has no {source.spec.architecture}; install a release that has it, or leave --verify out") from error
    # How the class stores its weights transformers looks up by the type of the model.
    given = {key: value for key, value in source.config.items() if key != "auto_map"} | {"model_type": named.config_class.model_type}
    try:
        return named.config_class.from_dict(given)
    except Exception as error:  # its classes refuse a file in many ways, each family's in its own
        raise UserError(f"{unopened} does not take its config.json ({' '.join(str(error).split())}); correct the file") from error


@torch.no_grad()
def _by_transformers(source: Source, tokens: Sequence[Tensor]) -> list[Outputs]:
    import transformers
    from transformers.utils.logging import disable_progress_bar

    # It would be in the middle of the report.
    disable_progress_bar()
    config = transformers_config(source)
    named = getattr(transformers, source.spec.architecture)
    try:
        model, report = named.from_pretrained(source.path, config=config, dtype=torch.float32, output_loading_info=True)
    except Exception as error:  # as above
        words = " ".join(str(error).split())
        raise UserError(f"transformers {transformers.__version__} cannot open {source.path} ({words}); leave --verify out") from error
    unfilled = sorted(report["missing_keys"])
    if unfilled:
        raise UserError(
            f"transformers {transformers.__version__} finds nothing for {unfilled[0]} in {source.path} and would take random numbers; "
            "leave --verify out"
        )
    model.eval()
    made = []
    for ids in tokens:
        answer = model(ids[None], output_hidden_states=True, use_cache=False)
        made.append(Outputs(answer.logits[0].float().log_softmax(-1), tuple(states[0] for states in answer.hidden_states[1:])))
    return made


@torch.no_grad()
def _by_megatron(source: Source, tokens: Sequence[Tensor]) -> list[Outputs]:
    settings = TopologySettings()
    device = local_device()
    prepare_megatron(device)
    with _alone(settings):
        config = transformer_config(source.spec, topology=settings, dtype=torch.float32, overrides={})
        (model,) = build_model(source.spec, config, attention="torch")
        for parameter in model.parameters():
            # What nobody writes shows in every number behind it.
            parameter.fill_(float("nan"))
        load_weights([model], source.spec, source.tensors)
        return [_forward(model, ids, source.spec) for ids in tokens]


@contextmanager
def _alone(settings: TopologySettings) -> Iterator[None]:
    """A process group of this process, unless it is in one of its own already."""
    if torch.distributed.is_initialized():
        yield
        return
    initialize(Topology.of(settings), rank=0, init_method=None, device=local_device(), timeout_s=60.0)
    try:
        yield
    finally:
        shutdown()


def _forward(model: PolicyModel, ids: Tensor, spec: ModelSpec) -> Outputs:
    hidden: list[Tensor] = []
    layers = list(model.decoder.layers)
    hooks = [layer.register_forward_hook(lambda _, __, output: hidden.append(output[0][:, 0])) for layer in layers[:-1]]
    hooks.append(model.decoder.final_layernorm.register_forward_hook(lambda _, __, output: hidden.append(output[:, 0])))
    packed = packed_sequences(np.array([0, len(ids)]))
    try:
        logits = model(ids[None], packed.plan.positions[None], None, packed_seq_params=packed)
    finally:
        for hook in hooks:
            hook.remove()
    return Outputs(logits[0, :, : spec.vocab_size].float().log_softmax(-1), tuple(hidden))
