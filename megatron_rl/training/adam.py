"""Adam with a count of steps per parameter group.

megatron-core's distributed optimizer fills torch's `step` tensors of all parameters with one shared
tensor when loading a checkpoint, so each parameter's update advances the count of all. A number of
the group cannot be shared.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class GroupStepAdam(torch.optim.Optimizer):
    """Adam (Kingma & Ba 2015) and, `decoupled`, AdamW (Loshchilov & Hutter 2019), in torch's order of operations.

    Moments exist from the start, as a checkpoint's shapes must be known. A missing gradient is
    zero.
    """

    def __init__(
        self,
        params: Any,
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        decoupled: bool = True,
    ) -> None:
        """Take over `params`, an iterable of tensors or of group dictionaries; keys of a group override the defaults."""
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "decoupled": decoupled, "step": 0}
        super().__init__(params, defaults)
        self._allocate()

    @classmethod
    def in_place_of(cls, adam: torch.optim.Adam, *, decoupled: bool) -> "GroupStepAdam":
        """Return a fresh optimizer that shares the parameter groups of `adam`, also groups of views into a buffer."""
        optimizer = cls([torch.zeros(0)], lr=0.0, decoupled=decoupled)
        optimizer.state.clear()
        optimizer.param_groups = adam.param_groups
        for group in optimizer.param_groups:
            group.update(step=0, decoupled=decoupled)
        optimizer._allocate()
        return optimizer

    def _allocate(self) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param] = {name: torch.zeros_like(param, requires_grad=False) for name in ("exp_avg", "exp_avg_sq")}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter from its `grad`. `closure` is not supported."""
        assert closure is None, "GroupStepAdam takes no closure"
        for group in self.param_groups:
            group["step"] += 1
            if group["params"]:
                self._step_group(group)

    def _step_group(self, group: dict[str, Any]) -> None:
        params: list[Tensor] = group["params"]
        grads = [torch.zeros_like(param) if param.grad is None else param.grad for param in params]
        exp_avgs = [self.state[param]["exp_avg"] for param in params]
        exp_avg_sqs = [self.state[param]["exp_avg_sq"] for param in params]
        (beta1, beta2), lr, decay = group["betas"], group["lr"], group["weight_decay"]
        if decay and group["decoupled"]:
            torch._foreach_mul_(params, 1 - lr * decay)
        elif decay:
            grads = list(torch._foreach_add(grads, params, alpha=decay))
        torch._foreach_lerp_(exp_avgs, grads, 1 - beta1)
        torch._foreach_mul_(exp_avg_sqs, beta2)
        torch._foreach_addcmul_(exp_avg_sqs, grads, grads, value=1 - beta2)
        correction1, correction2 = 1 - beta1 ** group["step"], 1 - beta2 ** group["step"]
        denominators = torch._foreach_sqrt(exp_avg_sqs)
        torch._foreach_div_(denominators, correction2**0.5)
        torch._foreach_add_(denominators, group["eps"])
        torch._foreach_addcdiv_(params, exp_avgs, denominators, value=-lr / correction1)

    def state_dict(self) -> dict[str, Any]:
        """Return torch's form: moments per parameter, with the group's `step` as tensors."""
        state_dict = super().state_dict()
        for group in state_dict["param_groups"]:
            for index in group["params"]:
                state_dict["state"][index] = state_dict["state"][index] | {"step": torch.tensor(float(group["step"]))}
        return state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this class or of torch's Adam. Raises ValueError when a group's parameters differ in step."""
        groups, state = [dict(group) for group in state_dict["param_groups"]], {}
        for group in groups:
            entries = [state_dict["state"][index] for index in group["params"] if index in state_dict["state"]]
            steps = {int(entry["step"]) for entry in entries if "step" in entry}
            if len(steps) > 1:
                raise ValueError(f"optimizer state has parameters at steps {sorted(steps)} in one group, needs one step per group")
            group["step"] = steps.pop() if steps else int(group.get("step", 0))
            group.setdefault("decoupled", self.defaults["decoupled"])
        for index, entry in state_dict["state"].items():
            state[index] = {name: value for name, value in entry.items() if name != "step"}
        super().load_state_dict({"state": state, "param_groups": groups})
