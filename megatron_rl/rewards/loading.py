"""User functions by path: `package.module:function`, found on the Python path or in the current directory."""

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from megatron_rl.errors import UserError


def load_function(path: str, *, setting: str) -> Callable[..., Any]:
    """The function at `path`; `setting` is named in errors. Importing it runs the user's module.

    Raises:
        UserError: the path has another form, the module does not exist or fails to import, or it has no such function.
    """
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
    function = vars(module).get(name)
    if function is None:
        own = [known for known, value in vars(module).items() if inspect.isfunction(value) and value.__module__ == module.__name__]
        functions = [known for known in own if not known.startswith("_")]
        raise UserError(f"{setting} {path} does not exist: {module_name} has no {name}; it has: {', '.join(functions) or 'no functions'}")
    if not callable(function):
        raise UserError(f"{setting} {path} is a {type(function).__name__}, needs a function")
    return function


def check_arguments(function: Callable[..., Any], *, path: str, setting: str, positional: int, names: Sequence[str]) -> None:
    """Check that `function` can be called with `positional` positional arguments and the keyword arguments `names`.

    Raises:
        UserError: it cannot; the message shows both signatures.
    """
    signature = inspect.signature(function)
    try:
        signature.bind(*[None] * positional, **dict.fromkeys(names))
    except TypeError as error:
        wanted = ", ".join([f"argument {index + 1}" for index in range(positional)] + [f"{name}=.." for name in names])
        raise UserError(
            f"{setting} {path} has the signature {signature} but is called as ({wanted}): {error}; take exactly these arguments"
        ) from error
