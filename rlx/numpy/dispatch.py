"""Applying an op to arrays: at once from a cached kernel, or as a node of the graph being traced.

Every function of `rlx.numpy` that computes is a builder, `build(g, *values, *options)`, which
appends ops to a graph. `apply` calls it on the graph of a trace when an operand is traced.
Otherwise it builds a small graph with symbolic sizes, compiles it, and keeps it by its function,
options, element types and the pattern of its sizes. Another shape of the same pattern costs no
compilation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rlx.errors import InputError
from rlx.ir.dim import Dim, sym
from rlx.ir.dtype import DType, bool_, c64, f32, i64
from rlx.ir.graph import Graph
from rlx.ir.node import Value
from rlx.ir.shape import Shape
from rlx.numpy.array import Array, Tracer
from rlx.runtime.compiled import CompiledGraph
from rlx.runtime.session import Session

Build = Callable[..., Any]

_exact: dict[Any, CompiledGraph] = {}  # by shapes: the next call of the same sizes
_patterns: dict[Any, CompiledGraph] = {}  # by the pattern of sizes: no compilation
_LIMIT = 8192


def as_array(x: Any) -> Array:
    """`x` as an array, without a copy where it is one of NumPy's or another library's."""
    if isinstance(x, Array):
        return x
    if isinstance(x, np.ndarray):
        return Array(_supported(x))
    if isinstance(x, (bool, int, float, complex)):
        return Array(np.asarray(x, scalar_type(x).numpy))
    if hasattr(x, "__dlpack__"):
        return Array(_supported(np.from_dlpack(x)))
    found = np.asarray(x)
    if found.dtype == np.float64 and not isinstance(x, np.generic):
        found = found.astype(np.float32)  # a list of Python floats
    return Array(_supported(found))


def _supported(data: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    if not data.dtype.isnative:
        data = data.astype(data.dtype.newbyteorder("="))
    DType.of(data.dtype)
    return data


def scalar_type(x: Any) -> DType:
    """The default element type of a Python number."""
    if isinstance(x, bool):
        return bool_
    return i64 if isinstance(x, int) else f32 if isinstance(x, float) else c64


def with_scalars(*operands: Any) -> list[Array]:
    """Operands as arrays: a Python number takes the element type of the arrays beside it, or the
    default type of its own kind where theirs cannot hold it."""
    arrays = [x for x in operands if isinstance(x, (Array, np.ndarray, np.generic))]
    if not arrays:
        return [as_array(x) for x in operands]
    first = as_array(arrays[0]).dtype
    made = []
    for x in operands:
        if isinstance(x, (bool, int, float, complex)) and not isinstance(x, np.generic):
            made.append(_scalar(x, first))
        else:
            made.append(as_array(x))
    return made


_RANKS = ("bool", "uint", "int", "float", "complex")


def _scalar(x: Any, beside: DType) -> Array:
    own = scalar_type(x)
    holds = own is bool_ or _RANKS.index(beside.kind) >= _RANKS.index(
        "uint" if own is i64 else own.kind
    )
    element = beside if holds else own
    try:
        return Array(np.asarray(x, element.numpy))
    except OverflowError as error:
        raise InputError(
            "a number out of range", got=x, expected=f"a value of {element}"
        ) from error


def apply(build: Build, operands: Sequence[Array], *options: Any) -> Array:
    """The one result of `build` applied to the operands. Options are hashable."""
    return apply_many(build, operands, *options)[0]


def apply_many(build: Build, operands: Sequence[Array], *options: Any) -> tuple[Array, ...]:
    """All results of `build` applied to the operands."""
    for x in operands:
        if isinstance(x, Tracer):
            return _traced(x, build, operands, options)
    datas = [x.data for x in operands]
    key = (build, options, *[(d.shape, d.dtype) for d in datas])
    found = _exact.get(key)
    if found is None:
        found = _compiled(build, operands, options)
        if len(_exact) >= _LIMIT:
            _exact.clear()
        _exact[key] = found
    return tuple([Array(r) for r in found.run_in_order(datas)])


def _compiled(build: Build, operands: Sequence[Array], options: Any) -> CompiledGraph:
    symbols: dict[int, Dim] = {}
    shapes = []
    for x in operands:
        dims: list[Dim] = []
        for n in x.data.shape:
            if n > 1 and n not in symbols:
                symbols[n] = sym(f"n{len(symbols)}")
            dims.append(n if n < 2 else symbols[n])
        shapes.append(Shape(dims, x.dtype))
    key = (build, options, tuple(shapes))
    found = _patterns.get(key)
    if found is None:
        graph = Graph(getattr(build, "__name__", "op"))
        values = [graph.input(f"x{i}", shape) for i, shape in enumerate(shapes)]
        graph.set_outputs(build(graph, *values, *options))
        if len(_patterns) >= _LIMIT:
            _patterns.clear()
        found = _patterns[key] = Session("cpu").compile(graph)
    return found


def value_of(x: Array, tracer: Tracer) -> Value:
    """The value of an operand in the graph of a trace."""
    if not isinstance(x, Tracer):
        data = x.data
        if data.ndim == 0:
            return tracer.trace.graph.constant(data, x.dtype)
        return tracer.trace.capture(x)
    x.trace.require_open()
    if x.trace is not tracer.trace:
        raise InputError(
            "arrays of two traces meet", got=f"{x.trace.name} and {tracer.trace.name}",
            hint="a jitted function takes what it needs as arguments",
        )  # fmt: skip
    return x.value


def _traced(
    tracer: Tracer, build: Build, operands: Sequence[Array], options: Any
) -> tuple[Array, ...]:
    trace = tracer.trace
    trace.require_open()
    result = build(trace.graph, *[value_of(x, tracer) for x in operands], *options)
    values = result if isinstance(result, tuple) else (result,)
    return tuple([Tracer(trace, v) for v in values])
