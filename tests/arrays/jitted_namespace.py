"""`rlx.numpy` with every function that takes arrays jitted, for the conformance suite.

python tests/arrays/run_conformance.py PATH/TO/array-api-tests --jit --max-examples 5
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import rlx
import rlx.numpy as rnp

# results whose size depends on elements have none in a trace
BY_ELEMENTS = {"nonzero", "unique_all", "unique_counts", "unique_inverse", "unique_values"}
TRACED = {"repeat": 1}  # leading arguments that are: its counts decide the size of the result
NO_FUNCTIONS = {"from_dlpack", "item_assignment", "einsum"}


def jitted(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, traced anew for each call with its arrays as arguments."""

    @functools.wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        arrays: list[rlx.Array] = []

        def lift(x: Any) -> Any:
            """What makes the argument again from the traced arrays."""
            if isinstance(x, rlx.Array):
                arrays.append(x)
                at = len(arrays) - 1
                return lambda traced: traced[at]
            if isinstance(x, (list, tuple)):
                parts = [lift(item) for item in x]
                return lambda traced: type(x)([part(traced) for part in parts])
            return lambda traced: x

        def keep(x: Any) -> Any:
            return lambda traced: x

        count = TRACED.get(function.__name__, len(args))
        given = [lift(x) if i < count else keep(x) for i, x in enumerate(args)]
        options = {name: lift(x) for name, x in named.items()}

        def body(traced: list[rlx.Array]) -> Any:
            return function(
                *[g(traced) for g in given], **{n: g(traced) for n, g in options.items()}
            )

        return rlx.jit(body)(arrays) if arrays else function(*args, **named)

    return call


def _wrapped(source: ModuleType, target: dict[str, Any]) -> None:
    for name in source.__all__:
        value = getattr(source, name)
        plain = isinstance(value, type) or name.startswith("__") or name in NO_FUNCTIONS
        if callable(value) and not plain and name not in BY_ELEMENTS:
            value = jitted(value)
        target[name] = value


_wrapped(rnp, globals())
linalg, fft = ModuleType("linalg"), ModuleType("fft")
_wrapped(rnp.linalg, vars(linalg))
_wrapped(rnp.fft, vars(fft))
__array_api_version__ = rnp.__array_api_version__
