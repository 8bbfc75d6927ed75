"""The vector file: typed, with the JSON path of whatever is wrong in it.

Numbers may be written "nan", "inf" and "-inf"; NaN and infinities are refused where they would take part in a result.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, get_args, get_type_hints

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError

from megatron_rl.algorithms.entropy import Entropy
from megatron_rl.algorithms.kl import KLControl
from megatron_rl.algorithms.objective import Advantages, Objective, PolicyLosses, expand_preset
from megatron_rl.algorithms.return_advantage import ValueLoss

FORMAT = "objective-vectors/1"
_NAMED = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_ESTIMATORS = {
    "pass_at_k": {"kind": "pass@k"}, "passk": {"kind": "pass@k"}, "grpo": {"kind": "group"}, "ppo": {"kind": "gae"},
    "dr_grpo": {"kind": "group", "scale": "none"},
}  # fmt: skip
"""Choices by the neutral names of estimators that have others here."""

_CLIPPED = ("clip", "clip_cov", "cispo", "gmpo", "dppo_tv", "dppo_kl")
_OWN = frozenset({
    "preset", "policy_loss", "clip_low", "clip_high", "aggregation", "max_response_length", "advantage", "kl_loss_coef", "kl_estimator",
    "kl_unbiased", "kl_control", "kl_reward_coef", "kl_reward_estimator", "off_policy_correction", "entropy_coef", "entropy_mode",
    "entropy_control", "distillation_coef", "zero_variance", "top_entropy_fraction",
})  # fmt: skip
"""Neutral names of the objective; any other is an argument of the policy loss, by its name with or without the loss's before it."""
_TOKEN_COLUMNS = (
    "log_probs", "old_log_probs", "rollout_log_probs", "ref_log_probs", "entropy", "varentropy", "values", "old_values", "returns",
)  # fmt: skip


class MalformedError(ValueError):
    """The file does not follow the format; the message starts with the JSON path."""


def _number(value: Any) -> Any:
    if isinstance(value, str) and value in _NAMED:
        return _NAMED[value]
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f'got {value!r}, needs a number or "nan", "inf", "-inf"')
    return value


def _finite(value: Any) -> Any:
    number = _number(value)
    if not math.isfinite(number):
        raise ValueError(f"got {value!r}, needs a finite number")
    return number


def _flag(value: Any) -> Any:
    if value not in (0, 1):
        raise ValueError(f"got {value!r}, needs 0 or 1")
    return int(value)


Number = Annotated[float, BeforeValidator(_number)]
Finite = Annotated[float, BeforeValidator(_finite)]
Flag = Annotated[int, BeforeValidator(_flag)]


class SequenceRow(BaseModel):
    """One sequence; every list has one entry per token, `advantage` stands for all of them or is such a list."""

    model_config = ConfigDict(extra="forbid")
    log_probs: list[Number]
    old_log_probs: list[Number] | None = None
    rollout_log_probs: list[Number] | None = None
    ref_log_probs: list[Number] | None = None
    entropy: list[Number] | None = None
    varentropy: list[Number] | None = None
    values: list[Number] | None = None
    old_values: list[Number] | None = None
    returns: list[Number] | None = None
    advantage: Number | list[Number] = 0.0
    loss_mask: list[Flag] | None = None
    name: str | None = None

    def mask(self) -> list[int]:
        """The loss mask, all ones when the file has none."""
        return self.loss_mask if self.loss_mask is not None else [1] * len(self.log_probs)

    def columns(self) -> dict[str, list[float]]:
        """Every per-token list that the sequence has."""
        columns = {name: getattr(self, name) for name in _TOKEN_COLUMNS if getattr(self, name) is not None}
        spread = self.advantage if isinstance(self.advantage, list) else [self.advantage] * len(self.log_probs)
        return {**columns, "advantages": spread}


class Case(BaseModel):
    """What all kinds share."""

    model_config = ConfigDict(extra="ignore", arbitrary_types_allowed=True)
    name: str
    kind: str
    tolerance: float = Field(1e-9, ge=0)
    expect: dict[str, Any]
    path: str = ""


class PolicyCase(Case):
    """A loss with its gradient norm and metrics."""

    QUANTITIES: ClassVar[tuple[str, ...]] = ("loss", "grad_norm", "metrics")
    set: str
    config: dict[str, Any]
    sequences: list[SequenceRow] = []
    objective: Objective | ValueLoss = Objective()


class AdvantageCase(Case):
    """Rewards [group][sample], or [group][sample][component] for gdpo."""

    QUANTITIES: ClassVar[tuple[str, ...]] = ("advantages",)
    config: dict[str, Any]
    estimator: Any = None
    rewards: list[list[Finite | list[Finite]]]
    lengths: list[list[int]] | None = None
    baselines: list[Finite | list[Finite]] | None = None

    def flat_lengths(self) -> list[int]:
        """Trainable tokens of each sample, 1 when the file has none."""
        return (
            [1 for group in self.rewards for _ in group] if self.lengths is None else [number for group in self.lengths for number in group]
        )

    def flat_baselines(self) -> list[float]:
        """One baseline per sample; a number stands for its whole group."""
        rows = zip(self.rewards, self.baselines or [], strict=True)
        return [number for group, base in rows for number in (base if isinstance(base, list) else [base] * len(group))]


class GAEConfig(BaseModel):
    """Discounts."""

    model_config = ConfigDict(extra="forbid")
    gamma: float = Field(1.0, ge=0, le=1)
    lam: float = Field(1.0, ge=0, le=1)
    whiten: bool = False


class GAECase(Case):
    """Generalised advantage estimation with gaps."""

    QUANTITIES: ClassVar[tuple[str, ...]] = ("advantages", "returns")
    config: GAEConfig
    token_rewards: list[list[Number]]
    values: list[list[Number]]
    loss_mask: list[list[Flag]]
    bootstrap: list[Finite] | None = None


class EntropyConfig(BaseModel):
    """Temperature, and the number of real columns when the rest is padding."""

    model_config = ConfigDict(extra="forbid")
    temperature: float = Field(1.0, gt=0)
    vocab_size: int | None = Field(None, ge=1)


class EntropyCase(Case):
    """Rows of logits."""

    QUANTITIES: ClassVar[tuple[str, ...]] = ("entropy", "varentropy", "log_probs")
    config: EntropyConfig = EntropyConfig()
    logits: list[list[Number]]
    targets: list[int] | None = None


class EntropyControllerCase(Case):
    """A trace of entropies."""

    QUANTITIES: ClassVar[tuple[str, ...]] = ("applied", "after")
    config: dict[str, Any]
    entropies: list[Finite]
    settings: Entropy | None = None
    clip_high: float = 0.0


class KLControllerConfig(BaseModel):
    """The adaptive KL coefficient."""

    model_config = ConfigDict(extra="forbid")
    initial: float
    target: float = Field(gt=0)
    horizon: float = Field(gt=0)


class KLControllerCase(Case):
    """A trace of (KL, sequences)."""

    QUANTITIES: ClassVar[tuple[str, ...]] = ("after",)
    config: KLControllerConfig
    steps: list[tuple[Finite, int]]

    @property
    def control(self) -> KLControl:
        """The settings of the controller."""
        return KLControl(target=self.config.target, horizon=self.config.horizon)


KINDS: Mapping[str, type[Case]] = {
    "policy": PolicyCase,
    "advantage": AdvantageCase,
    "gae": GAECase,
    "entropy": EntropyCase,
    "entropy_controller": EntropyControllerCase,
    "kl_controller": KLControllerCase,
}


def json_path(parts: tuple[Any, ...]) -> str:
    """`$.cases[3].config.clip_low`."""
    return "$" + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts)


def _validated(kind: Any, value: Any, parts: tuple[Any, ...], flat: Mapping[str, Any] | None = None) -> Any:
    """Return `value` as `kind`. Raises MalformedError with its place below `parts`, or below a `flat` config that it was made of."""
    try:
        return TypeAdapter(kind).validate_python(value)
    except ValidationError as error:
        first = error.errors()[0]
        # Names of union members are no part of the file.
        inner = tuple(part for part in first["loc"] if isinstance(part, int) or str(part).isidentifier())
        if flat is not None:
            places = {"off_policy": "off_policy_correction"}
            inner = inner[-1:] if inner[-1:] and inner[-1] in flat else tuple(places.get(str(part), part) for part in inner)
            raise MalformedError(f"{json_path(inner).removeprefix('$')}: {first['msg']}") from error
        raise MalformedError(f"{json_path((*parts, *inner))}: {first['msg']}") from error


def read_file(path: Path) -> list[Case]:
    """The cases of the file. Raises MalformedError with the JSON path of the first fault, OSError or json.JSONDecodeError."""
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise MalformedError(f"$.format: got {content.get('format') if isinstance(content, dict) else content!r}, needs {FORMAT!r}")
    sets = {}
    for name, entry in _validated(dict[str, dict[str, Any]], content.get("sets", {}), ("sets",)).items():
        rows = _validated(list[SequenceRow], entry.get("sequences"), ("sets", name, "sequences"))
        for number, row in enumerate(rows):
            _check_row(row, ("sets", name, "sequences", number), rows[0])
        sets[name] = rows
    cases = _validated(list[dict[str, Any]], content.get("cases"), ("cases",))
    return [_case(case, ("cases", number), sets) for number, case in enumerate(cases)]


def _check_row(row: SequenceRow, parts: tuple[Any, ...], first: SequenceRow) -> None:
    mask = row.mask()
    if len(mask) != len(row.log_probs):
        raise MalformedError(f"{json_path((*parts, 'loss_mask'))}: got {len(mask)} entries, needs {len(row.log_probs)}")
    if set(row.columns()) != set(first.columns()):
        missing = sorted(set(row.columns()) ^ set(first.columns()))
        raise MalformedError(f"{json_path((*parts, missing[0]))}: only some sequences of the set have it, needs all or none")
    for name, numbers in row.columns().items():
        where = (*parts, "advantage" if name == "advantages" else name)
        if len(numbers) != len(mask):
            raise MalformedError(f"{json_path(where)}: got {len(numbers)} entries, needs {len(mask)}")
        for position, (number, flag) in enumerate(zip(numbers, mask, strict=True)):
            if flag and not math.isfinite(number):
                raise MalformedError(f"{json_path((*where, position))}: got {number} at a trainable position, needs a finite number")


def _case(case: dict[str, Any], parts: tuple[Any, ...], sets: Mapping[str, list[SequenceRow]]) -> Case:
    kind = case.get("kind")
    if kind not in KINDS:
        raise MalformedError(f"{json_path((*parts, 'kind'))}: got {kind!r}, needs one of {', '.join(KINDS)}")
    parsed: Any = _validated(KINDS[kind], case, parts)
    unknown = [name for name in parsed.expect if name not in parsed.QUANTITIES]
    if unknown or not parsed.expect:
        got = repr(unknown[0]) if unknown else "nothing"
        raise MalformedError(f"{json_path((*parts, 'expect'))}: got {got}, needs some of {', '.join(parsed.QUANTITIES)}")
    update: dict[str, Any] = {"path": json_path(parts), "expect": _numbers(parsed.expect, (*parts, "expect"))}
    config = (*parts, "config")
    if isinstance(parsed, PolicyCase):
        if parsed.set not in sets:
            raise MalformedError(f"{json_path((*parts, 'set'))}: got {parsed.set!r}, needs one of {', '.join(sets) or 'none in the file'}")
        try:
            objective = neutral_objective(**parsed.config)
        except MalformedError as error:
            raise MalformedError(f"{json_path(config)}{error}") from error
        update |= {"sequences": sets[parsed.set], "objective": objective}
    elif isinstance(parsed, AdvantageCase):
        update |= {"estimator": _validated(Advantages, advantage_choice(parsed.config), config)}
        _check_shape(parsed.lengths, parsed.rewards, (*parts, "lengths"))
    elif isinstance(parsed, EntropyControllerCase):
        choices = dict(parsed.config)
        update |= {"clip_high": _validated(float, choices.pop("clip_high", 0.0), (*config, "clip_high"))}
        update |= {"settings": _validated(Entropy, entropy_choice({"entropy_control": choices}), config)}
    elif isinstance(parsed, GAECase):
        _check_shape(parsed.values, parsed.token_rewards, (*parts, "values"))
        _check_shape(parsed.loss_mask, parsed.token_rewards, (*parts, "loss_mask"))
    return parsed.model_copy(update=update)


def neutral_objective(**flat: Any) -> Objective | ValueLoss:
    """Return the objective of a neutral, flat config. Raises MalformedError, which begins with the path below it."""
    try:
        preset = expand_preset({"preset": flat.get("preset")})
    except ValueError as error:
        raise MalformedError(f".preset: {error}") from error
    same = ("aggregation", "distillation_coef", "zero_variance", "top_entropy_fraction")
    made: dict[str, Any] = {name: flat[name] for name in same if name in flat}
    aggregation = made.get("aggregation", preset["aggregation"])
    if aggregation == "sequence_mean_token_sum_norm":
        made["max_response_length"] = flat.get("max_response_length")
    loss = _policy_loss(flat, preset["policy_loss"])
    if loss["kind"] == "value":
        return ValueLoss(**{**made, **{key: value for key, value in loss.items() if key == "value_clip"}})
    made["policy_loss"] = loss
    if "advantage" in flat:
        made["advantage"] = advantage_choice(flat["advantage"])
    control = {} if flat.get("kl_control") is None else {"control": flat["kl_control"]}
    if flat.get("kl_loss_coef"):
        kl = {"coef": flat["kl_loss_coef"], "estimator": flat.get("kl_estimator"), "unbiased": flat.get("kl_unbiased"), **control}
        made["kl"] = {key: value for key, value in kl.items() if value is not None}
    if flat.get("kl_reward_coef"):
        made["kl_reward"] = {"coef": flat["kl_reward_coef"], "estimator": flat.get("kl_reward_estimator", "k1"), **control}
    made["off_policy"] = flat.get("off_policy_correction")
    made["entropy"] = entropy_choice(flat)
    return _validated(Objective, expand_preset({**made, "preset": flat.get("preset")}), (), flat)


def _policy_loss(flat: Mapping[str, Any], preset: Mapping[str, Any]) -> dict[str, Any]:
    """Return the policy loss with its arguments: clip distances are 0.2 unless a preset has others."""
    kind = flat.get("policy_loss", preset["kind"])
    loss: dict[str, Any] = dict(preset) if kind == preset["kind"] else {"kind": kind}
    for side in ("low", "high"):
        if f"clip_{side}" in flat:
            loss[side] = flat[f"clip_{side}"]
        elif kind in _CLIPPED and "preset" not in flat:
            loss[side] = 0.2
    known = {"value_clip"} if kind == "value" else {"low", "high", *_arguments(kind)}
    for name, value in flat.items():
        if name not in _OWN:
            short = name.removeprefix(f"{kind}_")
            short = short if short in known else name
            loss[f"covariance_{short}" if kind == "clip_cov" and short in ("low", "high") else short] = value
    return loss


def _arguments(kind: str) -> set[str]:
    """Return the names of the arguments of the policy loss of this kind."""
    losses = {kind_of: loss for loss in get_args(get_args(PolicyLosses)[0]) for kind_of in get_args(get_type_hints(loss)["kind"])}
    return {item.name for item in fields(losses[kind])} if kind in losses else set()


def advantage_choice(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return an estimator's choice from its neutral name and arguments."""
    estimator = config.get("estimator", "grpo")
    choice = {**_ESTIMATORS.get(estimator, {"kind": estimator}), **{key: value for key, value in config.items() if key != "estimator"}}
    if "scale" in choice:
        choice["scale"] = {"group": "std", "batch": "batch_std"}.get(choice["scale"], choice["scale"])
    return choice


def entropy_choice(flat: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the choice of entropy from the neutral coefficient, mode and control; None without any."""
    if flat.get("entropy_control") is None and not flat.get("entropy_coef"):
        return None
    entropy = {"coef": flat.get("entropy_coef", 0.0), "mode": flat.get("entropy_mode", "absolute")}
    if flat.get("entropy_control") is None:
        return entropy
    control = dict(flat["entropy_control"])
    rule = "clip_high" if control.pop("actuator", "coefficient") == "clip_high" else control.pop("rule", "trl")
    if rule != "clip_high":
        entropy["coef"] = control.pop("initial", 0.0)
    return {**entropy, "control": {"kind": rule, **control}}


def _check_shape(rows: list[list[Any]] | None, like: list[list[Any]], parts: tuple[Any, ...]) -> None:
    """Refuse `rows` whose nesting differs from that of `like`."""
    if rows is None:
        return
    if len(rows) != len(like):
        raise MalformedError(f"{json_path(parts)}: got {len(rows)} entries, needs {len(like)}")
    for number, (row, other) in enumerate(zip(rows, like, strict=True)):
        if len(row) != len(other):
            raise MalformedError(f"{json_path((*parts, number))}: got {len(row)} entries, needs {len(other)}")


def _numbers(value: Any, parts: tuple[Any, ...]) -> Any:
    """`value` with every leaf a number or null."""
    if isinstance(value, Mapping):
        return {key: _numbers(entry, (*parts, key)) for key, entry in value.items()}
    if isinstance(value, list):
        return [_numbers(entry, (*parts, number)) for number, entry in enumerate(value)]
    return None if value is None else _validated(Number, value, parts)
