"""What the layout matrix is made of: layouts, models, objectives, and the cases that combine them. Data only.

A case trains one model with one objective under one layout, and is compared with the same training on one rank. The gate runs
the cases of `GATE`, `tests/run.sh --wide` all of `CASES`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

BASE = "one"
DISTRIBUTED = {"use_distributed_optimizer": True}
OVERLAPPED = {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 20000}
RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SEQUENCE_PARALLEL = {"tp": 2, "sequence_parallel": True}


@dataclass(frozen=True, slots=True)
class Layout:
    """`num_ranks` arranged by the sizes in `topology`, with fields of megatron-core's own configurations, by their names.

    `budget` is the tokens of a micro-batch per context-parallel rank.
    """

    num_ranks: int = 1
    topology: Mapping[str, Any] = field(default_factory=dict)
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    ddp: Mapping[str, Any] = field(default_factory=dict)
    megatron: Mapping[str, Any] = field(default_factory=dict)
    budget: int = 24


LAYOUTS: dict[str, Layout] = {
    BASE: Layout(),
    "one, micro-batches of 10": Layout(budget=10),
    "one, one micro-batch": Layout(budget=1000),
    "one, recompute": Layout(megatron=RECOMPUTED),
    "dp2": Layout(2),
    "dp2 distopt": Layout(2, optimizer=DISTRIBUTED),
    "dp2 distopt overlap": Layout(2, optimizer=DISTRIBUTED, ddp=OVERLAPPED),
    "tp2": Layout(2, {"tp": 2}),
    "tp2 sp": Layout(2, SEQUENCE_PARALLEL),
    "tp2 sp recompute": Layout(2, SEQUENCE_PARALLEL, megatron=RECOMPUTED),
    "tp2 distopt": Layout(2, {"tp": 2}, optimizer=DISTRIBUTED),
    "pp2": Layout(2, {"pp": 2}),
    "pp2 distopt": Layout(2, {"pp": 2}, optimizer=DISTRIBUTED),
    "pp2 vpp2": Layout(2, {"pp": 2, "vpp": 2}),
    "pp2 vpp2 recompute": Layout(2, {"pp": 2, "vpp": 2}, megatron=RECOMPUTED, budget=32),
    "cp2": Layout(2, {"cp": 2}),
    "cp2, micro-batches of 10": Layout(2, {"cp": 2}, budget=10),
    "cp2 recompute": Layout(2, {"cp": 2}, megatron=RECOMPUTED),
    "cp4": Layout(4, {"cp": 4}),
    "pp4": Layout(4, {"pp": 4}),
    "tp4 sp": Layout(4, {"tp": 4, "sequence_parallel": True}),
    "tp2 pp2": Layout(4, {"tp": 2, "pp": 2}),
    "tp2 pp2 vpp2 sp": Layout(4, {**SEQUENCE_PARALLEL, "pp": 2, "vpp": 2}),
    "tp2 cp2": Layout(4, {"tp": 2, "cp": 2}),
    "tp2 cp2 sp": Layout(4, {**SEQUENCE_PARALLEL, "cp": 2}),
    "pp2 cp2": Layout(4, {"pp": 2, "cp": 2}),
    "pp2 vpp2 cp2": Layout(4, {"pp": 2, "vpp": 2, "cp": 2}),
    "dp2 cp2": Layout(4, {"cp": 2}),
    "dp2 cp2 distopt": Layout(4, {"cp": 2}, optimizer=DISTRIBUTED),
    "tp2 dp2": Layout(4, {"tp": 2}),
    "tp2 dp2 sp distopt": Layout(4, SEQUENCE_PARALLEL, optimizer=DISTRIBUTED),
    "pp2 dp2": Layout(4, {"pp": 2}),
    "pp2 vpp2 dp2 distopt overlap": Layout(4, {"pp": 2, "vpp": 2}, optimizer=DISTRIBUTED, ddp=OVERLAPPED),
    "tp2 pp2 dp2 sp distopt": Layout(8, {**SEQUENCE_PARALLEL, "pp": 2}, optimizer=DISTRIBUTED),
    "tp2 pp2 vpp2 dp2 distopt overlap": Layout(8, {"tp": 2, "pp": 2, "vpp": 2}, optimizer=DISTRIBUTED, ddp=OVERLAPPED),
    "tp2 pp2 cp2 sp": Layout(8, {**SEQUENCE_PARALLEL, "pp": 2, "cp": 2}),
}

# Layouts of models with experts. Sequence parallelism is what they need with tensor parallelism.
ALL_GATHER = {"moe_token_dispatcher_type": "allgather"}
LAYOUTS |= {
    "ep2": Layout(2, {"ep": 2}),
    "ep2 all-gather": Layout(2, {"ep": 2}, megatron=ALL_GATHER),
    "ep2 distopt": Layout(2, {"ep": 2}, optimizer=DISTRIBUTED),
    "ep2 recompute": Layout(2, {"ep": 2}, megatron=RECOMPUTED),
    "ep2 cp2": Layout(2, {"ep": 2, "cp": 2}),
    "ep2 tp2 sp etp1": Layout(2, {**SEQUENCE_PARALLEL, "ep": 2, "etp": 1}),
    "ep2 dp2": Layout(4, {"ep": 2}),
    "ep2 dp2 distopt": Layout(4, {"ep": 2}, optimizer=DISTRIBUTED),
    "ep4": Layout(4, {"ep": 4}),
    "ep2 tp2 sp etp2": Layout(4, {**SEQUENCE_PARALLEL, "ep": 2, "etp": 2}),
    "ep2 tp2 sp etp2 all-gather": Layout(4, {**SEQUENCE_PARALLEL, "ep": 2, "etp": 2}, megatron=ALL_GATHER),
    "ep2 tp2 dp2 sp etp1": Layout(4, {**SEQUENCE_PARALLEL, "ep": 2, "etp": 1}),
    "ep2 pp2": Layout(4, {"ep": 2, "pp": 2}),
    "ep2 pp2 vpp2": Layout(4, {"ep": 2, "pp": 2, "vpp": 2}),
    "ep2 cp2 dp2": Layout(4, {"ep": 2, "cp": 2}),
    "ep2 tp2 pp2 sp etp2 distopt": Layout(8, {**SEQUENCE_PARALLEL, "ep": 2, "etp": 2, "pp": 2}, optimizer=DISTRIBUTED),
}

# Keys of `tiny_model`. The vocabulary of 33 is divisible by no tensor-parallel size.
MODELS: dict[str, dict[str, Any]] = {
    "tied": {"layers": 4},
    "untied": {"layers": 4, "tied": False, "vocab": 33, "num_key_value_heads": 4},
    "small": {"layers": 2},
    "qwen3_moe": {"family": "qwen3_moe", "layers": 4},
    "glm4_moe": {"family": "glm4_moe", "layers": 4},
    "deepseek_v3": {"family": "deepseek_v3", "layers": 4},
}
# Families of a feature each: windows, tensors of several projections, norms behind, norms over all heads; names of experts, a shared gate.
DENSE_FAMILIES = ("qwen2", "llama", "mistral", "ministral", "phi3", "glm", "glm4", "olmo2", "olmo3", "gemma3")
MIXTURE_FAMILIES = ("mixtral", "qwen2_moe", "gpt_oss")
MODELS |= {family: {"family": family, "layers": 4} for family in (*DENSE_FAMILIES, *MIXTURE_FAMILIES)}
# Families whose weights go to the real SGLang server, which generates with them on a CPU. Its latent attention does not run there: of
# deepseek_v3 there are checksums alone.
GENERATING = ("qwen3", "qwen2", "llama", "qwen3_moe", "glm4_moe", "mistral", "mixtral", "glm4", "olmo2", "olmo3", "phi3", "gemma3")
GENERATING += ("gpt_oss", "qwen2_moe", "ministral")
# Families that load files of this form in tests/unit/models/test_quantised.py.
QUANTISED = {"qwen3": "fp8", "qwen3_moe": "fp8", "glm4_moe": "fp8", "deepseek_v3": "fp8", "gpt_oss": "mxfp4"}
SYNCED = (*GENERATING, "deepseek_v3")
EXPERTS = ("qwen3_moe", "glm4_moe", "deepseek_v3")


@dataclass(frozen=True, slots=True)
class Training:
    """An objective, the `training` settings that go with it, and the trajectories of the batch's sequences; each its own when None."""

    objective: Mapping[str, Any]
    training: Mapping[str, Any] = field(default_factory=lambda: {"optimizer_steps_per_batch": 2})
    trajectories: tuple[int, ...] | None = None


# Two optimizer steps on a batch make ratios other than 1, so that clipping has something to do.
OBJECTIVES: dict[str, Training] = {
    "grpo": Training({"kl": {"coef": 0.05}, "entropy": {"coef": 0.01}, "policy_loss": {"low": 0.01, "high": 0.01}}),
    "gspo": Training(
        {
            "policy_loss": {"ratio_level": "sequence", "low": 0.003, "high": 0.004},
            "kl": {"coef": 0.05},
            "entropy": {"coef": 0.01},
            "zero_variance": "mask_kl",
        }
    ),
    "ppo": Training(
        {
            "aggregation": "token_mean",
            "kl_reward": {"coef": 0.05, "control": {"target": 0.01, "horizon": 100}},
            "entropy": {"coef": 0.01},
            "advantage": {"kind": "gae", "gamma": 0.95, "lam": 0.9, "bootstrap_truncated": True, "value_clip": 0.1},
        },
        {"optimizer_steps_per_batch": 2, "critic": {"optimizer": {"lr": 0.002}}},
    ),
    "sft": Training({"policy_loss": "sft", "aggregation": "token_mean"}, {}),
    "on-policy grpo": Training({"kl": {"coef": 0.05}, "entropy": {"coef": 0.01}}, {}),
    "grpo without clip": Training({"kl": {"coef": 0.05}, "entropy": {"coef": 0.01}, "policy_loss": {"low": None, "high": None}}),
    "gspo without clip": Training(
        {
            "policy_loss": {"ratio_level": "sequence", "low": None, "high": None},
            "kl": {"coef": 0.05},
            "entropy": {"coef": 0.01},
            "zero_variance": "mask_kl",
        }
    ),
    "rejection": Training(
        {
            "policy_loss": {"ratio_level": "sequence"},
            "off_policy": {"mode": "mask", "low": 0.5, "high": 2.0, "keep_rejected_in_denominator": False},
            "kl": {"coef": 0.1, "control": {"target": 0.01, "horizon": 100}},
        }
    ),
    "top entropy": Training(
        {
            "aggregation": "token_mean",
            "top_entropy_fraction": 0.5,
            "entropy": {"coef": 0.2, "control": {"kind": "paper", "target": 4.0, "delta": 0.1}},
            "advantage": {"kind": "rloo"},
        }
    ),
    "KL in the rewards": Training(
        {
            "kl_reward": {"coef": 0.1},
            "advantage": {"kind": "reinforce_plus_plus_baseline"},
            "policy_loss": {"kind": "kl_cov", "fraction": 0.1},
        }
    ),
    "geometric mean": Training(
        {
            "policy_loss": {"kind": "gmpo", "low": 0.2, "high": 0.2},
            "aggregation": "sequence_mean_token_sum_norm",
            "zero_variance": "mask_kl",
            "kl": {"coef": 0.1},
        }
    ),
    "trajectories": Training(
        {
            "advantage": {"kind": "opo"},
            "off_policy": {"mode": "mask", "low": 0.8, "high": 1.25, "keep_rejected_in_denominator": False},
            "kl": {"coef": 0.1, "control": {"target": 0.01, "horizon": 100}},
        },
        trajectories=(4, 0, 0, 1, 3, 2, 2, 2),
    ),
}
WITHOUT_CLIP = ("grpo without clip", "gspo without clip")
WHOLE_STEP = ("rejection", "top entropy", "KL in the rewards", "geometric mean")


@dataclass(frozen=True, slots=True)
class Case:
    """Names of a layout, a model and an objective, and the parameters' dtype."""

    layout: str
    model: str
    objective: str
    dtype: str = "float32"

    def __str__(self) -> str:
        return f"{self.layout} | {self.model} | {self.objective}" + (f" | {self.dtype}" if self.dtype != "float32" else "")

    @property
    def num_ranks(self) -> int:
        """Ranks of the layout."""
        return LAYOUTS[self.layout].num_ranks

    @property
    def base(self) -> "Case":
        """The same training on one rank."""
        return Case(BASE, self.model, self.objective, self.dtype)


DENSE = {"grpo": "tied", "gspo": "untied", "ppo": "tied", "sft": "untied"}
"""The model that each objective is proved with under every layout."""

GATE = (
    Case("one, micro-batches of 10", "tied", "grpo"),
    Case("dp2", "untied", "sft"),
    Case("dp2 distopt overlap", "untied", "gspo"),
    Case("tp2", "tied", "ppo"),
    Case("tp2 sp", "tied", "grpo"),
    Case("tp2 sp recompute", "untied", "sft"),
    Case("pp2", "tied", "ppo"),
    Case("pp2 vpp2", "tied", "grpo"),
    Case("cp2", "untied", "gspo"),
    Case("tp2 pp2", "tied", "ppo"),
    Case("tp2 cp2 sp", "untied", "gspo"),
    Case("pp2 vpp2 cp2", "untied", "sft"),
    Case("tp2 dp2 sp distopt", "tied", "grpo"),
    *(Case(layout, "small", objective) for objective in WHOLE_STEP for layout in ("dp2 distopt", "cp2")),
    Case("dp2", "small", "trajectories"),
)


def _every_dense_case() -> list[Case]:
    """Every layout with every objective, as far as the model can be divided; the largest layouts with two objectives."""
    cases = []
    for name, layout in LAYOUTS.items():
        for objective, model in DENSE.items():
            divisible = layout.topology.get("tp", 1) <= MODELS[model].get("num_key_value_heads", 2)
            if name != BASE and divisible and "ep" not in layout.topology and (layout.num_ranks < 8 or objective in ("gspo", "ppo")):
                cases.append(Case(name, model, objective))
    return cases


# Tied embeddings are a parameter of two pipeline stages and untied ones are two parameters: both under each pipeline.
PIPELINES = tuple(
    Case(layout, model, objective)
    for layout in ("pp2", "pp2 vpp2", "tp2 pp2", "pp2 cp2", "pp4")
    for model, objective in (("tied", "sft"), ("untied", "ppo"))
)
PIPELINES += tuple(Case("pp2", "small", objective) for objective in WHOLE_STEP)
# Softmax router; sigmoid router with shared experts and a dense first layer; the same with latent attention.
MIXTURES = tuple(
    Case(layout, model, objective)
    for model, objective in zip(EXPERTS, ("grpo", "gspo", "grpo"), strict=True)
    for layout in (
        *("one, micro-batches of 10", "one, recompute", "dp2", "tp2 sp", "pp2", "pp2 vpp2", "cp2", "pp2 cp2", "tp2 pp2 vpp2 sp"),
        *(name for name in LAYOUTS if "ep2" in name or "ep4" in name),
    )
) + tuple(Case(layout, "qwen3_moe", "ppo") for layout in ("ep2", "ep2 distopt", "ep2 pp2", "ep2 tp2 sp etp2"))
FAMILIES = (
    *(Case(layout, model, "grpo") for model in DENSE_FAMILIES for layout in ("tp2", "tp2 sp", "pp2", "cp2")),
    *(Case(layout, model, "grpo") for model in MIXTURE_FAMILIES for layout in ("ep2", "ep2 tp2 sp etp1", "pp2", "cp2")),
    # megatron-core does not split experts with biases, which gpt-oss has.
    *(Case("tp2 sp", model, "grpo") for model in MIXTURE_FAMILIES if model != "gpt_oss"),
)
BFLOAT16 = (
    *(
        Case(layout, "untied", objective, "bfloat16")
        for layout in ("dp2", "dp2 distopt", "tp2", "tp2 sp", "pp2", "pp2 vpp2", "cp2")
        for objective in ("on-policy grpo", "sft", *WITHOUT_CLIP)
    ),
    *(Case(layout, "tied", objective, "bfloat16") for layout in ("pp2", "pp2 vpp2") for objective in ("on-policy grpo", "sft")),
    *(
        Case(layout, "qwen3_moe", objective, "bfloat16")
        for layout in ("ep2", "ep2 distopt")
        for objective in ("on-policy grpo", "grpo without clip")
    ),
)

CASES: tuple[Case, ...] = tuple(dict.fromkeys((*GATE, *_every_dense_case(), *PIPELINES, *MIXTURES, *FAMILIES, *BFLOAT16)))
