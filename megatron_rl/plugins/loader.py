"""The loader of plug-ins, found as `package.module:name`, checked here without a call."""

import difflib
import functools
import importlib
import inspect
import json
import os
import signal
import sys
import threading
import typing
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType, MappingProxyType, ModuleType
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, PydanticSchemaGenerationError, ValidationError, create_model
from pydantic_core import ErrorDetails

from megatron_rl.errors import UserError
from megatron_rl.plugins.environment import Environment
from megatron_rl.plugins.kinds import AGENT, BUILT_IN_REWARDS, GROUP_REWARD, KINDS, Kind, PluginKind
from megatron_rl.system.deadlines import PLUGIN_IMPORT_S


def load(path: str, *, kind: PluginKind, args: Mapping[str, Any] = MappingProxyType({}), as_agent: bool = False) -> Callable[..., Any]:
    """Return the plug-in at `path` with `args` filled in; the kind's arguments remain, by keyword.

    A rollout `as_agent` has the arguments of an agent instead.

    Searched on PYTHONPATH, then in the current directory. Raises UserError for a failed import, a
    mismatch with the arguments of the kind, or refused `args`.
    """
    spec = AGENT if as_agent else KINDS[kind]
    function = _find(path, setting=spec.setting)
    if kind == "reward" and _takes_group(function, path):
        spec = GROUP_REWARD
    if kind == "environment" and not (inspect.isclass(function) and issubclass(function, Environment)):
        raise UserError(f"{spec.setting} {path} is no subclass of megatron_rl.Environment; write `class Name(Environment)`")
    own = _own_parameters(function, path=path, spec=spec)
    if kind == "rollout" and not inspect.iscoroutinefunction(function):
        raise UserError(f"{spec.setting} {path} is not an async function; write `async def`, or other prompts would wait for it")
    if kind == "data_source" and not (inspect.isclass(function) and "next_rows" in dir(function)):
        got = "has no method next_rows" if inspect.isclass(function) else f"is a {type(function).__name__}"
        raise UserError(f"{spec.setting} {path} {got}, needs a class with next_rows(count) and the attribute state")
    values = _argument_values(own, args, function=function, path=path, spec=spec)
    return functools.partial(function, **values) if values else function


class _TimeIsOver(BaseException):
    """Not an Exception, because user code may catch an Exception."""


@contextmanager
def without_exits(name: str, *, doing: str, timeout_s: float | None = None) -> Iterator[None]:
    """Run the code of the plug-in `name`, in the body; the user's interrupt ends it as ever.

    Raises UserError for an exit, an own interrupt and, in the main thread, after `timeout_s`.
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
    """Return the kind whose arguments the plug-in at `path` takes by name. Raises UserError."""
    function = _find(path, setting="plug-in")
    named = _signature(function, path=path, setting="plug-in").parameters.keys()
    if inspect.isclass(function) and issubclass(function, Environment):
        return "environment"
    if is_agent(path):
        return "rollout"
    if _takes_group(function, path):
        return "reward"
    # A data source is the only other class; `seed` may be an own argument of a function.
    kinds = {kind: spec for kind, spec in KINDS.items() if inspect.isclass(function) == (kind == "data_source") and spec.arguments}
    fitting: list[PluginKind] = [kind for kind, spec in kinds.items() if named >= set(spec.arguments)]
    if len(fitting) != 1:
        forms = "; ".join(f"{kind}({', '.join(spec.arguments)})" for kind, spec in (*KINDS.items(), ("rollout", AGENT)))
        fix = "write `class Name(Environment)`, or give --kind" if inspect.isclass(function) else "or give --kind"
        raise UserError(f"plug-in {path} takes {', '.join(named) or 'nothing'}, needs the arguments of one kind: {forms}; {fix}")
    return fitting[0]


def is_agent(path: str) -> bool:
    """Return True where the rollout at `path` takes an agent's arguments by name. Raises UserError."""
    function = _find(path, setting="plug-in")
    return not inspect.isclass(function) and _signature(function, path=path, setting="plug-in").parameters.keys() >= set(AGENT.arguments)


def _takes_group(function: Callable[..., Any], path: str) -> bool:
    names = _signature(function, path=path, setting=GROUP_REWARD.setting).parameters.keys()
    return names >= set(GROUP_REWARD.arguments) and "sample" not in names


def _signature(function: Callable[..., Any], *, path: str, setting: str) -> inspect.Signature:
    try:
        return inspect.signature(function)
    except ValueError as error:
        raise UserError(f"{setting} {path} does not say what it takes ({error}); write a function around it") from error


def _find(path: str, *, setting: str) -> Callable[..., Any]:
    is_reward = setting == GROUP_REWARD.setting
    module_name, colon, name = (BUILT_IN_REWARDS.get(path, path) if is_reward else path).partition(":")
    if not (module_name and colon and name):
        own = f", or one of the names {', '.join(BUILT_IN_REWARDS)}" if is_reward else ""
        raise UserError(f"{setting} is {path!r}, needs the form package.module:function{own}")
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
    own = [name for name, value in vars(module).items() if inspect.isroutine(value) or inspect.isclass(value)]
    return [name for name in own if not name.startswith("_") and vars(module)[name].__module__ == module.__name__]


def _own_parameters(function: Callable[..., Any], *, path: str, spec: Kind) -> dict[str, inspect.Parameter]:
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


def _argument_values(
    own: Mapping[str, inspect.Parameter], args: Mapping[str, Any], *, function: Callable[..., Any], path: str, spec: Kind
) -> dict[str, Any]:
    """Return `args` as read by the annotations of the `own` parameters; defaults stay away."""
    model = arguments_model(own, function, owner=f"{spec.setting} {path}")
    try:
        # Through JSON, as settings are: strict mode then takes strings as paths and lists as tuples.
        read = model.model_validate_json(json.dumps(dict(args)), strict=True)
    except ValidationError as error:
        sentences = [_sentence(details, own, owner=path, setting=spec.args_setting) for details in error.errors(include_url=False)]
        raise UserError("; ".join(sentences)) from None
    return {name: vars(read)[f"own_{name}"] for name in own if f"own_{name}" in read.model_fields_set}


def arguments_model(own: Mapping[str, inspect.Parameter], function: Callable[..., Any], *, owner: str) -> type[BaseModel]:
    """Return a model of these parameters, in fields `own_NAME` with the alias NAME.

    Raises UserError, beginning with `owner`, for an annotation without a check.
    """
    # Only the own annotations, because the kind's may name imports for type checkers only.
    holder = type("Own", (), {"__annotations__": {name: parameter.annotation for name, parameter in own.items()}})
    fields: dict[str, Any] = {}
    try:
        hints = typing.get_type_hints(holder, globalns=vars(sys.modules[function.__module__]), include_extras=True)
        for name, parameter in own.items():
            required = parameter.default is inspect.Parameter.empty
            # Prefixed to differ from a model's own attributes, such as `copy`.
            fields[f"own_{name}"] = (hints[name], Field(... if required else parameter.default, alias=name))
        return create_model("Own", __config__=ConfigDict(extra="forbid", allow_inf_nan=False), **fields)
    except (NameError, PydanticSchemaGenerationError) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(f"{owner} has an annotation that no value can be checked by ({reason}), needs plain types such as float") from error


def _sentence(details: ErrorDetails, own: Mapping[str, inspect.Parameter], *, owner: str, setting: str) -> str:
    name = str(details["loc"][0])
    path = ".".join([setting, *map(str, details["loc"])])
    if details["type"] == "extra_forbidden" and name not in own:
        close = difflib.get_close_matches(name, list(own), n=1)
        meant = f"did you mean {setting}.{close[0]}?" if close else f"its own arguments are: {', '.join(own) or 'none'}"
        return f"{path} is no argument of {owner}; {meant}"
    annotation = own[name].annotation
    # A module with postponed annotations has strings.
    wanted = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    if details["type"] == "missing" and len(details["loc"]) == 1:
        return f"{path} is missing, {owner} needs {name}: {wanted}; set {path}=VALUE"
    message, got = details["msg"], details["input"]
    fix = ""
    if details["type"] == "string_type" and isinstance(got, bool | int | float) and len(details["loc"]) == 1:
        fix = f"; put quotes around it if it is meant as text: {name}='\"{json.dumps(got)}\"'"
    return f"{path} is {got!r}, {owner} needs {name}: {wanted} ({message[0].lower()}{message[1:]}){fix}"
