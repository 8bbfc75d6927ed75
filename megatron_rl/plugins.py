"""Plug-ins: your own code in six places of a run, each found as `package.module:name` and called by keyword only.

A plug-in takes the arguments of its kind and, as further keyword arguments with annotations, its own, which the settings give as a
mapping: `reward: {function: my.module:score, args: {threshold: 0.5}}` calls `score(sample=.., threshold=0.5)`. Everything that can be
known without a call is checked by `load`: that the module can be imported, that the arguments of the kind can be given, and that each
own argument exists and has its annotated type. `megatron-rl check-plugin` calls it as well.

Legend: B trajectories of a batch; each counts once, whatever number of samples it has.
"""

import difflib
import functools
import importlib
import inspect
import os
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any, Literal, Protocol

from megatron_rl.errors import UserError
from megatron_rl.typed_arguments import argument_values

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from megatron_rl.algorithms.objective import Objective
    from megatron_rl.algorithms.policy_terms import PolicyLossTerms, PolicyTerms
    from megatron_rl.rollout.client import Generation
    from megatron_rl.rollout.sampling import Sampling
    from megatron_rl.types import Group, Ints, Prompt, Sample

PluginKind = Literal["reward", "rollout", "filter", "advantage", "policy_loss", "data_source"]


class Reward(Protocol):
    """`reward.function`: how good a sample is. Runs in worker processes, sync or async."""

    def __call__(self, *, sample: "Sample") -> float | Mapping[str, float]:
        """A finite number, or a mapping with the key `reward`, whose other items are recorded as its components.

        `sample` has text and ids of prompt and response, `truncated`, `num_turns`, label and metadata; of its experts nothing is sent. Of a
        trajectory of several samples it is the last one, and what is returned is the reward of all of them; what it has to know of those
        before, the rollout puts into the last one's metadata.
        """
        ...


class Generator(Protocol):
    """What a rollout may ask of the engines."""

    async def generate(
        self, token_ids: "Ints", *, sampling: "Sampling", num_samples: int = 1, session: str | None = None
    ) -> "tuple[Generation, ...]":
        """`num_samples` responses to `token_ids` [P], which one engine gives.

        Each call is a request of its own: it occupies an engine only until it is answered, goes to another engine when its engine
        fails, and is aborted when the task that awaits it is cancelled. Calls may run at the same time. Give the requests of one
        conversation the same `session`, any name that is unique among those of this prompt: they prefer the engine that has computed
        the earlier turns, and their seeds do not depend on how long the tools of others take.
        """
        ...


class Rollout(Protocol):
    """`rollout.function`, an async function: how one prompt becomes samples. `megatron_rl.rollout.single_turn:single_turn` is one."""

    def __call__(
        self,
        *,
        prompt: "Prompt",
        generator: Generator,
        sampling: "Sampling",
        num_samples: int,
        tokenizer: "PreTrainedTokenizerBase",
    ) -> "Awaitable[Sequence[Sample]]":
        """Samples of `num_samples` trajectories from `prompt`, each with its `group_id`, `index` (0, 1, ... over all) and response text.

        Their token ids are those that `generator` returned, never text that was tokenized again. A trajectory is one sample, unless several
        have the same number in `trajectory`, the last by `index` being its end. A turn that saw another history than what the tokens before
        it say is a sample with a prompt of its own, `dataclasses.replace(prompt, token_ids=.., text=..)`.
        """
        ...


class Filter(Protocol):
    """`rollout.filter.function`: which groups a step trains on. Called once for each group, when it and its rewards are finished."""

    def __call__(self, *, group: "Group") -> str | None:
        """None to keep the group, or why not, which the buffer notes beside it.

        `group` has a sample whose reward has a value, and was not left out by objective.zero_variance.
        """
        ...


class Advantage(Protocol):
    """`objective.advantage.estimator`: how rewards become advantages."""

    def __call__(self, *, rewards: "Tensor", group_ids: "Tensor", lengths: "Tensor") -> "Tensor":
        """One advantage per trajectory, [B] float64, for all its tokens.

        `rewards` [B] float64, `group_ids` [B] equal for those of one prompt, which need not stand together, `lengths` [B] their trainable
        tokens. It is also called for one group alone, to find those whose advantages are all 0.
        """
        ...


class PolicyLoss(Protocol):
    """`objective.policy_loss`: what is minimised, per token."""

    def __call__(self, *, objective: "Objective", terms: "PolicyTerms") -> "PolicyLossTerms":
        """Losses [T] of the policy term, before any mean, and the events to be counted."""
        ...


class DataSource(Protocol):
    """`data.source`, a class: where training rows come from, without end. Only the driver has one, whatever the arrangement of ranks.

    What comes follows from the seed and the arguments alone, and does not depend on how many rows are asked for at once.
    """

    state: Any
    """Where it stands, as a value that JSON can hold. Set to an earlier value, also of another process, it goes on from there."""

    def __init__(self, *, seed: int) -> None:
        """At the first row. `seed` is run.seed."""

    def next_rows(self, count: int) -> Sequence[Mapping[str, Any]]:
        """The next `count` rows, each with the fields that a line of data.train would have: prompt, label, for supervised training
        response, and others, which reward functions get as metadata.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One kind of plug-in: the settings that name it and its own arguments, and what it is called with."""

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
        setting="objective.advantage.estimator", args_setting="objective.advantage.args", arguments=("rewards", "group_ids", "lengths"),
    ),
    "policy_loss": Kind(setting="objective.policy_loss", args_setting="objective.loss_args", arguments=("objective", "terms")),
    "data_source": Kind(setting="data.source", args_setting="data.args", arguments=("seed",)),
})  # fmt: skip


def load(path: str, *, kind: PluginKind, args: Mapping[str, Any] = MappingProxyType({})) -> Callable[..., Any]:
    """The plug-in at `path` with its own arguments `args` filled in: what is left to give are the arguments of its kind, by keyword.

    Looked for on PYTHONPATH, then in the current directory. Importing it runs the user's module.

    Raises:
        UserError: it cannot be imported, cannot be called with the arguments of its kind, or does not take `args`.
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
    """Raise UserError where a data source is no class that gives rows."""
    if not inspect.isclass(found) or "next_rows" not in dir(found):
        got = "has no method next_rows" if inspect.isclass(found) else f"is a {type(found).__name__}"
        raise UserError(f"{setting} {path} {got}, needs a class with next_rows(count) and the attribute state")


def kind_of(path: str) -> PluginKind:
    """The kind whose arguments the plug-in at `path` takes by name. Raises UserError when there is none, or it cannot be imported."""
    function = _find(path, setting="plug-in")
    named = _signature(function, path=path, setting="plug-in").parameters.keys()
    # A data source is the only class among them; `seed` may be an own argument of a function.
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
        module = importlib.import_module(module_name)
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
    """Functions and classes that `module` itself defines."""
    own = [name for name, value in vars(module).items() if inspect.isroutine(value) or inspect.isclass(value)]
    return [name for name in own if not name.startswith("_") and vars(module)[name].__module__ == module.__name__]


def _own_parameters(function: Callable[..., Any], *, path: str, spec: Kind) -> dict[str, inspect.Parameter]:
    """What `function` takes besides the arguments of its kind, by name."""
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
