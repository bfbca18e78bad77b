"""Transformations outside `rlx.jit`: traced at every call, compiled once for each graph.

A function that is transformed, such as the one in `rlx.grad(f)(x)`, must be traced. Outside a
jitted function that happens anew at every call, so that what the function closes over is what it is
now. The executable is found by the structure of the graph. Under `rlx.jit` neither happens: there a
transformation is part of the trace.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rlx.ir.graph import Graph
from rlx.numpy.array import Array
from rlx.numpy.device import current_device
from rlx.numpy.dispatch import as_array
from rlx.numpy.jit import JitFunction
from rlx.numpy.trace import recording_trace
from rlx.numpy.tree import flatten, unflatten
from rlx.runtime.compiled import CompiledGraph
from rlx.runtime.session import Session

_LIMIT = 256
_compiled: dict[Any, CompiledGraph] = {}
_lock = threading.Lock()


class _Retraced(JitFunction[..., Any]):
    """A function that is traced at every call."""

    def _call(self, args: tuple[Any, ...], named: Mapping[str, Any], bound: bool = False) -> Any:
        call = self._arguments(args, named)
        return self._fresh(call).bind(call.shapes)(call.datas)

    def _compile(self, graph: Graph) -> CompiledGraph:
        key = (current_device(), graph.structure())
        with _lock:
            found = _compiled.get(key)
        if found is None:
            found = Session(current_device()).compile(graph)
            with _lock:
                if len(_compiled) >= _LIMIT:
                    _compiled.clear()
                found = _compiled.setdefault(key, found)
        return found


def run_traced(
    name: str, function: Callable[..., Any], args: Sequence[Any], named: Mapping[str, Any],
    traced: Callable[[int], bool] = lambda argument: False,
) -> Any:  # fmt: skip
    """`function(*args, **named)` inside a trace: the one that is recorded, or one of its own.

    Arrays among the arguments are traced. Other leaves, such as numbers, are passed as they are,
    but for the positional arguments for which `traced` says otherwise.
    """
    if recording_trace() is not None:
        return function(*args, **named)
    leaves, structure = flatten((tuple(args), dict(named)))
    counts = [len(flatten(x)[0]) for x in args]
    owners = [i for i, n in enumerate(counts) for _ in range(n)]
    owners += [-1] * (len(leaves) - len(owners))
    at = [
        i for i, (x, owner) in enumerate(zip(leaves, owners, strict=True))
        if isinstance(x, (Array, np.ndarray, np.generic)) or (owner >= 0 and traced(owner))
    ]  # fmt: skip
    arrays = [as_array(leaves[i]) for i in at]

    def run(*given: Any) -> Any:
        all_leaves = list(leaves)
        for i, x in zip(at, given, strict=True):
            all_leaves[i] = x
        new_args, new_named = unflatten(structure, all_leaves)
        return function(*new_args, **new_named)

    run.__name__ = name
    return _Retraced(run)(*arrays)
