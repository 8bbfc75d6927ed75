"""megatron-core's optimizer, gradient buffers and learning-rate schedule from settings, fields by upstream's own names."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer import TransformerConfig

from megatron_rl.checkpoints.optimizer_shards import parts_of, set_num_updates
from megatron_rl.config.derived import anneal_steps
from megatron_rl.config.settings import ScheduleSettings
from megatron_rl.errors import UserError
from megatron_rl.models.upstream_fields import checked_fields

OPTIMIZER_DEFAULTS: Mapping[str, Any] = {"optimizer": "adam", "lr": 1e-6, "min_lr": 0.0, "weight_decay": 0.0, "clip_grad": 1.0}
"""A small constant rate and no weight decay: RL starts from a trained model, which decay would pull away from without a reward."""

DDP_DEFAULTS: Mapping[str, Any] = {"grad_reduce_in_fp32": True}
"""Gradients are summed in fp32 whatever the parameters' dtype, so that the sum does not depend on the layout."""

_NO_END = 2**40
"""Optimizer steps of a training that says no number of them."""
_DECAY_STYLES = {"inverse_square_root": "inverse-square-root", "wsd": "WSD"}
"""megatron-core's names of decay styles where they are not ours."""
_OPTIMIZER_REFUSED = {
    "bf16": "it follows from model.dtype",
    "fp16": "model.dtype can be float32 or bfloat16",
    "params_dtype": "it follows from model.dtype",
    "loss_scale": "there is no float16 here, and the losses of routers would not be scaled with the others",
    "timers": "it is not a value that a file can hold",
    "optimizer_cpu_offload": "the optimizer's state has to stay on the ranks' device, where it is saved from and put away",
    "reuse_grad_buf_for_mxfp8_param_ag": "parameters here are never fp8",
    **dict.fromkeys(
        ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis"), "there is no float16 here, whose losses are scaled"
    ),
    **dict.fromkeys(
        (
            "optimizer_offload_fraction",
            "use_torch_optimizer_for_cpu_offload",
            "overlap_cpu_optimizer_d2h_h2d",
            "pin_cpu_grads",
            "pin_cpu_params",
        ),
        "only optimizer_cpu_offload reads it, which cannot be set",
    ),
    "log_num_zeros_in_grad": "no metric shows it",
    "overlap_param_gather": "it is a field of training.ddp here",
    "overlap_param_gather_with_optimizer_step": "it needs a schedule of its own, which is not built; use training.ddp.overlap_param_gather",
}
_OF_OTHERS = ("sgd_", "muon_", "soap_", "lion_", "dist_muon")
"""How fields of optimizers other than adam begin."""
_DDP_REFUSED = {
    "average_in_collective": "gradients are sums over ranks here, never averages",
    "use_megatron_fsdp": "only megatron-core's DistributedDataParallel is supported",
    "fp8_param_gather": "parameters here are never fp8",
    "reuse_grad_buf_for_mxfp8_param_ag": "parameters here are never fp8",
    "nccl_ub": "megatron-core's allocator of NCCL buffers is not part of its releases",
    "use_custom_fsdp": "only megatron-core's DistributedDataParallel is supported",
}


def validate_optimizer_fields(fields: Mapping[str, Any], *, section: str = "optimizer") -> dict[str, Any]:
    """Return `fields` of `training.SECTION` in OptimizerConfig's types. Raises UserError for unknown, wrong or derived ones."""
    # megatron-core leaves some optional fields without a None in their type.
    checked = checked_fields(f"training.{section}", fields, OptimizerConfig, nullable=True)
    for name, reason in _OPTIMIZER_REFUSED.items():
        if name in checked:
            raise UserError(f"training.{section}.{name} cannot be set, because {reason}; remove it")
    unread = {name: "adam does not read it" for name in checked if name.startswith(_OF_OTHERS)}
    if checked.get("decoupled_lr") is None and "decoupled_min_lr" in checked:
        unread["decoupled_min_lr"] = "decoupled_lr is not set"
    for name, reason in unread.items():
        raise UserError(f"training.{section}.{name} is {checked[name]}, which has no effect, because {reason}; remove it")
    merged = {**OPTIMIZER_DEFAULTS, **checked}
    if merged["optimizer"] != "adam":
        raise UserError(f"training.{section}.optimizer is {merged['optimizer']!r}, only 'adam' can be saved and resumed; remove it")
    if merged["lr"] is None or not merged["lr"] >= (merged["min_lr"] or 0.0):
        raise UserError(f"training.{section}.lr is {merged['lr']} with min_lr {merged['min_lr']}; lr must be a number of at least min_lr")
    return checked


def validate_ddp_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return `fields` in DistributedDataParallelConfig's types. Raises UserError for unknown, wrong or unsupported ones."""
    checked = checked_fields("training.ddp", fields, DistributedDataParallelConfig, nullable=True)
    for name, reason in _DDP_REFUSED.items():
        if checked.get(name):
            raise UserError(f"training.ddp.{name} is on, which cannot be, because {reason}; remove it")
    instances = checked.get("num_distributed_optimizer_instances", 1)
    if instances != 1:
        raise UserError(f"training.ddp.num_distributed_optimizer_instances is {instances}, only 1 is supported; remove it")
    return checked


def _distributed(optimizer: Mapping[str, Any], ddp: Mapping[str, Any]) -> bool:
    """Return True when a section asks for the distributed optimizer. Raises UserError when both contradict each other."""
    name = "use_distributed_optimizer"
    wanted = {section: bool(fields[name]) for section, fields in (("optimizer", optimizer), ("ddp", ddp)) if name in fields}
    if len(set(wanted.values())) > 1:
        raise UserError(
            f"training.optimizer.{name} is {wanted['optimizer']} and training.ddp.{name} is {wanted['ddp']}; set one of them, or both alike"
        )
    return any(wanted.values())


def make_configs(
    optimizer: Mapping[str, Any], ddp: Mapping[str, Any], *, dtype: torch.dtype, section: str = "optimizer"
) -> tuple[OptimizerConfig, DistributedDataParallelConfig]:
    """Return the configurations for parameters of `dtype`, the optimizer's from `section`. Raises UserError."""
    optimizer, ddp = validate_optimizer_fields(optimizer, section=section), validate_ddp_fields(ddp)
    distributed = {"use_distributed_optimizer": _distributed(optimizer, ddp)}
    if ddp.get("overlap_param_gather") and not distributed["use_distributed_optimizer"]:
        raise UserError(
            "training.ddp.overlap_param_gather is on without the distributed optimizer, whose gather it overlaps; "
            "set training.optimizer.use_distributed_optimizer to true, or remove it"
        )
    derived = {"bf16": dtype is torch.bfloat16, "params_dtype": dtype}
    try:
        return (
            OptimizerConfig(**{**OPTIMIZER_DEFAULTS, **optimizer, **derived, **distributed}),
            DistributedDataParallelConfig(**{**DDP_DEFAULTS, **ddp, **distributed}),
        )
    except (AssertionError, ValueError, RuntimeError, TypeError) as error:
        raise UserError(f"training.optimizer or training.ddp: megatron-core refuses the combination ({error})") from error


def wrap_ddp(chunks: Sequence[GPTModel], config: TransformerConfig, ddp: DistributedDataParallelConfig) -> list[DistributedDataParallel]:
    """Wrap the model chunks in gradient buffers, and set the reduction in `config`."""
    wrapped = [DistributedDataParallel(config, ddp, chunk, disable_bucketing=index > 0) for index, chunk in enumerate(chunks)]
    if ddp.overlap_grad_reduce:
        functions = [chunk.no_sync for chunk in wrapped]
        config.no_sync_func = functions if len(functions) > 1 else functions[0]
    return wrapped


def build_optimizer(config: OptimizerConfig, model: Sequence[DistributedDataParallel]) -> MegatronOptimizer:
    """Return megatron-core's optimizer of `model`; torch's Adam, where no fused one is installed, has its state from the start."""
    optimizer = get_megatron_optimizer(config, list(model), use_gloo_process_groups=False)
    for part in parts_of(optimizer):
        if isinstance(part.optimizer, torch.optim.Adam):
            # megatron-core makes the moments alone, and then torch's Adam misses its counts.
            part.init_state_fn(part.optimizer, part.config)
            set_num_updates(part, 0)
            for group in part.optimizer.param_groups:
                group["foreach"] = True  # as on a GPU, whose memory is planned on a machine without one
    return optimizer


def build_scheduler(
    optimizer: MegatronOptimizer, config: OptimizerConfig, schedule: ScheduleSettings, *, total_steps: int | None
) -> OptimizerParamScheduler:
    """Return the learning rate over optimizer steps: linear warm-up to `config.lr`, then constant
    or falling to `config.min_lr`.

    Step n of w warm-up steps, counted from 0, has n + 1 of w + 1 parts of the peak. The rate falls
    over `schedule.decay_steps`, or over `total_steps` of the run; the inverse square root, (w /
    n)^0.5 of the peak, has no end. wsd (Hu et al. 2024, arXiv 2404.06395) anneals along 1 - square
    root (Hägele et al. 2024, arXiv 2405.18392). Raises UserError when the warm-up leaves no step to
    fall, or no setting gives the end of the fall.
    """
    endless = schedule.decay_style in ("constant", "inverse_square_root")
    decay_steps = schedule.decay_steps or total_steps or (_NO_END if endless else None)
    if decay_steps is None:
        raise UserError(
            f"training.schedule.decay_style is {schedule.decay_style} without decay_steps, and the training has no total_steps, so there "
            "is no step at which the learning rate reaches its floor; give one of them"
        )
    if endless:
        decay_steps = max(decay_steps, schedule.warmup_steps + 1)
    if schedule.warmup_steps >= decay_steps:
        raise UserError(
            f"training.schedule: warmup_steps {schedule.warmup_steps} of {decay_steps} decay steps leave none to fall; "
            "lower warmup_steps or raise decay_steps"
        )
    return OptimizerParamScheduler(
        optimizer,
        init_lr=config.lr / (schedule.warmup_steps + 1),
        max_lr=config.lr,
        min_lr=config.min_lr or 0.0,
        lr_warmup_steps=schedule.warmup_steps,
        lr_decay_steps=decay_steps,
        lr_decay_style=_DECAY_STYLES.get(schedule.decay_style, schedule.decay_style),
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=decay_steps,
        wd_incr_style="constant",
        wsd_decay_steps=anneal_steps(schedule, decay_steps),
        lr_wsd_decay_style="minus_sqrt",
    )
