"""The vector file: typed, with the JSON path of whatever is wrong in it.

Numbers may be written "nan", "inf" and "-inf"; NaN and infinities are refused where they would take part in a result.
"""

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError

from megatron_rl.algorithms.arguments import ESTIMATOR_ARGUMENTS, LOSS_ARGUMENTS, Arguments, ControlArguments
from megatron_rl.algorithms.objective import AdvantageSettings, EntropyControl, KLControl, Objective
from megatron_rl.algorithms.presets import expand_preset

FORMAT = "objective-vectors/1"
_NAMED = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_ALIASES = {"pass_at_k": "pass@k", "passk": "pass@k"}
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
    objective: Objective = Objective()


class AdvantageCase(Case):
    """Rewards [group][sample], or [group][sample][component] for gdpo."""

    QUANTITIES: ClassVar[tuple[str, ...]] = ("advantages",)
    config: dict[str, Any]
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
    settings: EntropyControl = EntropyControl()
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


def _validated(kind: Any, value: Any, parts: tuple[Any, ...]) -> Any:
    try:
        return TypeAdapter(kind).validate_python(value)
    except ValidationError as error:
        first = error.errors()[0]
        # Names of union members are no part of the file.
        inner = tuple(part for part in first["loc"] if isinstance(part, int) or str(part).isidentifier())
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
        update |= {"sequences": sets[parsed.set], "objective": _objective(parsed.config, config)}
    elif isinstance(parsed, AdvantageCase):
        choices = _advantage(parsed.config)
        _validated(AdvantageSettings, choices, config)
        update |= {"config": choices}
        _check_shape(parsed.lengths, parsed.rewards, (*parts, "lengths"))
    elif isinstance(parsed, EntropyControllerCase):
        choices = dict(parsed.config)
        update |= {"clip_high": _validated(float, choices.pop("clip_high", 0.0), (*config, "clip_high"))}
        if choices.pop("actuator", "coefficient") == "clip_high":
            choices["rule"] = "clip_high"
        update |= {"settings": _validated(EntropyControl, _with_args(choices, ControlArguments, "args"), config)}
    elif isinstance(parsed, GAECase):
        _check_shape(parsed.values, parsed.token_rewards, (*parts, "values"))
        _check_shape(parsed.loss_mask, parsed.token_rewards, (*parts, "loss_mask"))
    return parsed.model_copy(update=update)


def _objective(config: dict[str, Any], parts: tuple[Any, ...]) -> Objective:
    try:
        flat = expand_preset(config)
    except ValueError as error:
        raise MalformedError(f"{json_path((*parts, 'preset'))}: {error}") from error
    loss = flat.get("policy_loss", "clip")
    nested = _with_args(flat, LOSS_ARGUMENTS.get(loss, Arguments), "loss_args", prefix=f"{loss}_")
    return _validated(Objective, nested if "advantage" not in nested else {**nested, "advantage": _advantage(nested["advantage"])}, parts)


def _advantage(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of an estimator, whose arguments stand beside its name in a file."""
    named = {key: _ALIASES.get(value, value) if key == "estimator" else value for key, value in config.items()}
    return _with_args(named, ESTIMATOR_ARGUMENTS.get(named.get("estimator", "grpo"), Arguments), "args")


def _with_args(config: Mapping[str, Any], kind: type[Arguments], home: str, *, prefix: str = "") -> dict[str, Any]:
    """`config` with the arguments of `kind`, with or without `prefix`, below `home`: a file has them beside the name of what takes them."""
    names = {name: item.name for item in dataclasses.fields(kind) for name in (item.name, f"{prefix}{item.name}")}
    args = {names[key]: value for key, value in config.items() if key in names}
    rest = {key: value for key, value in config.items() if key not in names}
    return {**rest, home: {**rest.get(home, {}), **args}} if args else rest


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
