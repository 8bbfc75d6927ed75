"""Plug-ins: your own code in six places of a run, found as `package.module:name`.

Calls are by keyword only. A plug-in takes the arguments of its kind and further keyword arguments
with annotations. The settings give the further arguments as a mapping: `reward: {function:
my.module:score, args: {threshold: 0.5}}` calls `score(sample=.., threshold=0.5)`. `load` checks as
much as possible without a call: a working import, the arguments of the kind, and the existence and
annotated type of each further argument. `megatron-rl check-plugin` also calls the plug-in.

Legend: B trajectories of a batch; each counts once, whatever the number of samples.
"""

import difflib
import functools
import importlib
import inspect
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType, MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any, Literal, Protocol

from megatron_rl.deadlines import PLUGIN_IMPORT_S
from megatron_rl.errors import UserError
from megatron_rl.typed_arguments import argument_values

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from megatron_rl.algorithms.objective import Objective
    from megatron_rl.algorithms.policy_loss import PolicyLossTerms, PolicyTerms
    from megatron_rl.engines.client import Generation
    from megatron_rl.engines.sampling import Sampling
    from megatron_rl.types import Group, Ints, Prompt, Sample

PluginKind = Literal["reward", "rollout", "filter", "advantage", "policy_loss", "data_source"]


class Reward(Protocol):
    """`reward.function`: the quality of a sample. Runs in worker processes, sync or async."""

    def __call__(self, *, sample: "Sample") -> float | Mapping[str, float]:
        """Return a finite number, or a mapping with the key `reward`; other items are components.

        Components are recorded. `sample` has text and ids of prompt and response, `truncated`,
        `num_turns`, label and metadata; its experts are not sent. `sample` is the last of a
        trajectory's samples, and the result is the reward of all. The rollout puts needed facts
        about earlier samples into the last sample's metadata.
        """
        ...


class Generator(Protocol):
    """The engines, from a rollout's side."""

    @property
    def context(self) -> int:
        """Tokens of a prompt and response together: in an engine, and in a trainer's micro-batch.

        A sample with more is a failure of the rollout, as is a call whose prompt leaves no room for
        `sampling.max_tokens`.
        """
        ...

    async def generate(
        self, token_ids: "Ints", *, sampling: "Sampling", num_samples: int = 1, session: str | None = None
    ) -> "tuple[Generation, ...]":
        """Return `num_samples` responses to `token_ids` [P], from one engine.

        Each call is a separate request. The request occupies an engine only until the answer, goes
        to another engine on failure, and is aborted when the awaiting task is cancelled. Calls may
        run at the same time. Give the requests of one conversation the same `session`, any name
        unique among the names of this prompt. Such requests prefer the engine with the computed
        earlier turns, and their seeds do not depend on the duration of other conversations' tools.
        """
        ...


class Rollout(Protocol):
    """`rollout.function`, an async function: from one prompt to samples.

    `megatron_rl.rollout.groups:single_turn` is one.
    """

    def __call__(
        self,
        *,
        prompt: "Prompt",
        generator: Generator,
        sampling: "Sampling",
        num_samples: int,
        tokenizer: "PreTrainedTokenizerBase",
    ) -> "Awaitable[Sequence[Sample]]":
        """Return samples of `num_samples` trajectories from `prompt`.

        Each has a `group_id`, an `index` (0, 1, ... over all) and response text. Token ids are from
        `generator`, never from text tokenized again. A trajectory is one sample, unless several
        have the same number in `trajectory`; the last by `index` is the end. A turn with another
        history than the tokens before say is a sample with a prompt of its own,
        `dataclasses.replace(prompt, token_ids=.., text=..)`.

        A call that raises, takes longer than `rollout.timeout_s` or returns another type is
        repeated for each trajectory alone, with `num_samples` 1. A trajectory with repeated
        failures is left out and counted by cause.
        """
        ...


class Filter(Protocol):
    """`rollout.filter.function`: selection of the groups for a step.

    Called once for each group, after the group and its rewards are finished.
    """

    def __call__(self, *, group: "Group") -> str | None:
        """Return None to keep the group, or a reason for the buffer to note beside the group.

        `group` has a sample whose reward has a value, and was not left out by
        objective.zero_variance.
        """
        ...


class Advantage(Protocol):
    """`objective.advantage` of kind plug_in: from rewards to advantages."""

    def __call__(self, *, rewards: "Tensor", group_ids: "Tensor", lengths: "Tensor") -> "Tensor":
        """Return one advantage per trajectory, [B] float64, for all its tokens.

        `rewards` [B] float64; `group_ids` [B], equal for trajectories of one prompt, in any order;
        `lengths` [B], trainable tokens. Also called for one group alone, to find groups with all
        advantages 0.
        """
        ...


class PolicyLoss(Protocol):
    """`objective.policy_loss` of kind plug_in: the minimised value per token."""

    def __call__(self, *, objective: "Objective", terms: "PolicyTerms") -> "PolicyLossTerms":
        """Return the losses [T] of the policy term, before any mean, and the events to count."""
        ...


class DataSource(Protocol):
    """`data.source`, a class: the endless source of training rows.

    Only the driver has one, whatever the arrangement of ranks. Rows follow from the seed and the
    arguments alone, and do not depend on the number of rows in a request.
    """

    state: Any
    """The position, as a value with a form in JSON.

    A source set to an earlier position, also another process's, goes on from that position.
    """

    def __init__(self, *, seed: int) -> None:
        """Start at the first row. `seed` is run.seed."""

    def next_rows(self, count: int) -> Sequence[Mapping[str, Any]]:
        """Return the next `count` rows, each with the fields of a line of data.train.

        Fields are prompt, label, for supervised training response, and others, given to reward
        functions as metadata.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One kind of plug-in: settings for name and own arguments, and the arguments of a call."""

    setting: str
    args_setting: str
    arguments: tuple[str, ...]


KINDS: Mapping[PluginKind, Kind] = MappingProxyType({
    "reward": Kind(setting="reward.function", args_setting="reward.args", arguments=("sample",)),
    "rollout": Kind(
        setting="rollout.function", args_setting="rollout.args",
        arguments=("prompt", "generator", "sampling", "num_samples", "tokenizer"),
    ),
    "filter": Kind(setting="rollout.filter.function", args_setting="rollout.filter.args", arguments=("group",)),
    "advantage": Kind(
        setting="objective.advantage", args_setting="objective.advantage.args", arguments=("rewards", "group_ids", "lengths"),
    ),
    "policy_loss": Kind(setting="objective.policy_loss", args_setting="objective.policy_loss.args", arguments=("objective", "terms")),
    "data_source": Kind(setting="data.source", args_setting="data.args", arguments=("seed",)),
})  # fmt: skip


def load(path: str, *, kind: PluginKind, args: Mapping[str, Any] = MappingProxyType({})) -> Callable[..., Any]:
    """Return the plug-in at `path` with `args` filled in; the kind's arguments remain, by keyword.

    Searched on PYTHONPATH, then in the current directory. The import runs the user's module. Raises
    UserError for a failed import, a mismatch with the arguments of the kind, or refused `args`.
    """
    spec = KINDS[kind]
    function = _find(path, setting=spec.setting)
    own = _own_parameters(function, path=path, spec=spec)
    if kind == "rollout" and not inspect.iscoroutinefunction(function):
        raise UserError(f"{spec.setting} {path} is not an async function; write `async def`, or other prompts would wait for it")
    if kind == "data_source":
        _check_class(function, path=path, setting=spec.setting)
    values = argument_values(own, args, function=function, owner=path, setting=spec.args_setting, named=spec.setting)
    return functools.partial(function, **values) if values else function


def _check_class(found: Callable[..., Any], *, path: str, setting: str) -> None:
    """Raise UserError for a data source other than a class with rows."""
    if not inspect.isclass(found) or "next_rows" not in dir(found):
        got = "has no method next_rows" if inspect.isclass(found) else f"is a {type(found).__name__}"
        raise UserError(f"{setting} {path} {got}, needs a class with next_rows(count) and the attribute state")


class _TimeIsOver(BaseException):
    """Not an Exception, because user code may catch an Exception."""


@contextmanager
def without_exits(name: str, *, doing: str, timeout_s: float | None = None) -> Iterator[None]:
    """Run the code of the plug-in `name`, in the body.

    An interrupt by the user ends the body as ever. Raises UserError where the code exits,
    interrupts itself or, in the main thread, takes longer than `timeout_s` seconds.
    """
    in_main = threading.current_thread() is threading.main_thread()
    interrupts: list[int] = []

    def interrupted(number: int, frame: FrameType | None) -> None:
        interrupts.append(number)
        if callable(before):
            before(number, frame)

    def over(number: int, frame: FrameType | None) -> None:
        raise _TimeIsOver

    before = signal.getsignal(signal.SIGINT)
    if in_main:
        signal.signal(signal.SIGINT, interrupted)
        alarm = signal.signal(signal.SIGALRM, over)
        signal.setitimer(signal.ITIMER_REAL, timeout_s or 0.0)
    try:
        yield
    except _TimeIsOver:
        raise UserError(f"{name} has not ended {doing} after {timeout_s:g} s, needs less; move slow work to where it is used") from None
    except (SystemExit, KeyboardInterrupt) as error:
        if interrupts:
            raise
        raise UserError(f"{name} raised {type(error).__name__} while {doing}, needs to return, or to raise an Exception") from error
    finally:
        if in_main:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            signal.signal(signal.SIGALRM, alarm)
            signal.signal(signal.SIGINT, before)


def kind_of(path: str) -> PluginKind:
    """Return the kind whose arguments the plug-in at `path` takes by name.

    Raises UserError without such a kind, and for a failed import.
    """
    function = _find(path, setting="plug-in")
    named = _signature(function, path=path, setting="plug-in").parameters.keys()
    # A data source is the only class among the kinds; `seed` may be an own argument of a function.
    kinds = {kind: spec for kind, spec in KINDS.items() if inspect.isclass(function) == (kind == "data_source")}
    fitting: list[PluginKind] = [kind for kind, spec in kinds.items() if named >= set(spec.arguments)]
    if len(fitting) != 1:
        forms = "; ".join(f"{kind}({', '.join(spec.arguments)})" for kind, spec in KINDS.items())
        raise UserError(f"plug-in {path} takes {', '.join(named) or 'nothing'}, needs the arguments of one kind: {forms}; or give --kind")
    return fitting[0]


def _signature(function: Callable[..., Any], *, path: str, setting: str) -> inspect.Signature:
    try:
        return inspect.signature(function)
    except ValueError as error:
        raise UserError(f"{setting} {path} does not say what it takes ({error}); write a function around it") from error


def _find(path: str, *, setting: str) -> Callable[..., Any]:
    module_name, colon, name = path.partition(":")
    if not (module_name and colon and name):
        raise UserError(f"{setting} is {path!r}, needs the form package.module:function")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        with without_exits(f"{setting} {path}", doing="being imported", timeout_s=PLUGIN_IMPORT_S):
            module = importlib.import_module(module_name)
    except UserError:
        raise
    except Exception as error:  # a user's module can fail in any way while it is imported
        reason = f"{type(error).__name__}: {error}"
        raise UserError(f"{setting} {path} cannot be imported ({reason}); it is looked for on PYTHONPATH and in {os.getcwd()}") from error
    found = vars(module).get(name)
    if found is None:
        names = _public_names(module)
        close = difflib.get_close_matches(name, names, n=1)
        meant = f"; did you mean {module_name}:{close[0]}?" if close else ""
        known = ", ".join(names) or "no functions"
        raise UserError(f"{setting} {path} does not exist: {module_name} has no {name}; it has: {known}{meant}")
    if not callable(found):
        raise UserError(f"{setting} {path} is a {type(found).__name__}, needs a function")
    return found


def _public_names(module: ModuleType) -> list[str]:
    """Return the names of functions and classes defined in `module` itself."""
    own = [name for name, value in vars(module).items() if inspect.isroutine(value) or inspect.isclass(value)]
    return [name for name in own if not name.startswith("_") and vars(module)[name].__module__ == module.__name__]


def _own_parameters(function: Callable[..., Any], *, path: str, spec: Kind) -> dict[str, inspect.Parameter]:
    """Return the parameters of `function` besides the arguments of its kind, by name."""
    signature = _signature(function, path=path, setting=spec.setting)
    by_name = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    own = {name: parameter for name, parameter in signature.parameters.items() if name not in spec.arguments and parameter.kind in by_name}
    try:
        signature.bind(**dict.fromkeys([*spec.arguments, *own]))
    except TypeError as error:
        wanted = ", ".join([f"{name}=.." for name in spec.arguments])
        raise UserError(
            f"{spec.setting} {path} has the signature {signature} but is called as ({wanted}): {error}; take exactly these arguments, and "
            f"your own, which {spec.args_setting} gives, by keyword"
        ) from error
    bare = [name for name, parameter in own.items() if parameter.annotation is inspect.Parameter.empty]
    if bare:
        raise UserError(
            f"{spec.setting} {path} takes {bare[0]}, which is no argument of its kind ({', '.join(spec.arguments)}) and has no annotation, "
            f"needs one such as `{bare[0]}: float`, by which {spec.args_setting}.{bare[0]} is checked"
        )
    return own
