"""Which lines wait until a GPU has done what it was given: each stops the queue of kernels that a rank keeps ahead of its GPU.

On a pretended GPU a wait is told by its function: reading a number out of a tensor, an index by a mask, whose size the host has to know,
and a copy from or to host memory that is not page-locked.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from pretended_gpu import is_locked, on_host
from torch.overrides import TorchFunctionMode

_READS = frozenset(
    ("item", "tolist", "numpy", "equal", "allclose", "nonzero", "masked_select", "unique", "__bool__", "__int__", "__float__", "__index__")
)
_COPIES = frozenset(("to", "cuda", "cpu", "tensor", "as_tensor"))
_TORCH, _HERE = str(Path(torch.__file__).parent), Path(__file__).parent


def _is_copied_as_it_is(one: Any, other: Any) -> bool:
    """Return whether the side in host memory is page-locked and needs no copy in pageable memory, for its strides or the dtype."""
    sides = (one, other)
    return (
        all(isinstance(side, torch.Tensor) for side in sides)
        and one.dtype == other.dtype
        and any(is_locked(side) and side.is_contiguous() for side in sides)
    )


class _Waits(TorchFunctionMode):
    def __init__(self, lines: Counter[str], root: Path) -> None:
        super().__init__()
        self._lines = lines
        self._root = root

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run `func`, and count the line that called it where it waits."""
        kwargs, name = dict(kwargs or {}), getattr(func, "__name__", "")
        result = func(*args, **kwargs)
        if self._waits(name, args, kwargs, result) and (line := self._caller()):
            self._lines[line] += 1
        return result

    def _waits(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> bool:
        source = args[0] if args else None
        if name in _COPIES:
            # What is made of numbers comes from host memory.
            comes_from_host = on_host(source) if isinstance(source, torch.Tensor) else True
            return comes_from_host != on_host(result) and not (kwargs.get("non_blocking") and _is_copied_as_it_is(source, result))
        if name == "copy_" and on_host(source) != on_host(args[1]):
            return not (kwargs.get("non_blocking") and _is_copied_as_it_is(source, args[1]))
        if not isinstance(source, torch.Tensor) or on_host(source):
            return False
        if name in ("__getitem__", "__setitem__"):
            filled = name == "__setitem__" and not isinstance(args[2], torch.Tensor)
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            return not filled and any(isinstance(one, torch.Tensor) and one.dtype == torch.bool for one in index)
        if name == "repeat_interleave":
            return isinstance(args[1] if len(args) > 1 else kwargs.get("repeats"), torch.Tensor) and "output_size" not in kwargs
        return name in _READS

    def _caller(self) -> str | None:
        """The line of the package that is nearest to the call, None where it is nobody's of it: upstream's own waits are not ours."""
        frame = sys._getframe(2)
        while frame is not None:
            path = Path(frame.f_code.co_filename)
            if not str(path).startswith(_TORCH) and _HERE not in path.parents:
                return f"{path.relative_to(self._root)}:{frame.f_lineno}" if self._root in path.parents else None
            frame = frame.f_back  # type: ignore[assignment]
        return None


@contextmanager
def counted_waits(root: Path) -> Iterator[Counter[str]]:
    """How often each line below `root` waits for the GPU inside, as `file:line`. Call after `pretended_gpu.pretend`."""
    lines: Counter[str] = Counter()
    with _Waits(lines, root):
        yield lines
