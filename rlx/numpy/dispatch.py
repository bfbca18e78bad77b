"""Applying an op to arrays: at once from a cached kernel, or as a node of the graph being traced.

Every function of `rlx.numpy` that computes is a builder, `build(g, *values, *options)`, which
appends ops to a graph. `apply` calls it on the graph of a trace when an operand is traced.
Otherwise it builds a small graph, compiles it, and keeps it by its function, options, element types
and the pattern of its operands (see `canonical`). Another shape of the same pattern costs no
compilation.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rlx.errors import (
    ArrayTypeError,
    ArrayValueError,
    AttributeValueError,
    InputError,
    OptionError,
    ShapeError,
    UnsupportedError,
)
from rlx.ir.binding import DimBinding, UpTo
from rlx.ir.dim import Dim, sym
from rlx.ir.dtype import DType, bool_, c64, f32, i64, promote
from rlx.ir.graph import Graph
from rlx.ir.node import Value
from rlx.ir.shape import Shape
from rlx.numpy import canonical, dlpack
from rlx.numpy.array import Array, Tracer
from rlx.numpy.canonical import Data, Form, View, broadcast_shape
from rlx.numpy.device import current_device
from rlx.numpy.trace import Size, Trace
from rlx.runtime.compiled import CompiledGraph
from rlx.runtime.session import Session
from rlx.specialize.options import CompileOptions

Build = Callable[..., Any]


def as_array(x: Any) -> Array:
    """`x` as an array, without a copy where it is one of NumPy's or another library's."""
    if isinstance(x, Array):
        return x
    if isinstance(x, np.ndarray):
        return Array(supported(x))
    if isinstance(x, np.generic):  # np.float64 is a Python float too
        return Array(supported(np.asarray(x)))
    if isinstance(x, (bool, int, float, complex)):
        return _scalar(x, scalar_type(x))
    if isinstance(x, Size):
        return x.as_array()
    if isinstance(x, (list, tuple)):
        return _from_sequence(x)
    if hasattr(x, "__dlpack__"):
        return Array(supported(dlpack.take(x, None)))
    try:
        return Array(supported(np.asarray(memoryview(x) if isinstance(x, bytes) else x)))
    except (ValueError, TypeError) as error:
        raise ArrayTypeError("not an array", got=f"{x!r:.60} ({type(x).__name__})") from error


def _from_sequence(items: Sequence[Any]) -> Array:
    """Nested lists: of Python numbers in their default type, of arrays as they promote."""
    if has_arrays(items):
        from rlx.numpy.manipulation import stack

        return stack(with_scalars(*[x if not isinstance(x, (list, tuple)) else as_array(x)
                                    for x in items]))  # fmt: skip
    try:
        found = np.asarray(items)
    except (ValueError, OverflowError) as error:
        raise ArrayValueError("not an array of numbers", got=f"{items!r:.60}") from error
    narrow = {np.dtype(np.float64): f32, np.dtype(np.complex128): c64}.get(found.dtype)
    if narrow is not None:
        found = np.asarray(items, narrow.numpy)
    return Array(supported(found))


def has_arrays(items: Sequence[Any]) -> bool:
    """Whether nested lists hold arrays, not Python numbers alone."""
    for x in items:
        if isinstance(x, (Array, np.ndarray, np.generic, Size)):
            return True
        if isinstance(x, (list, tuple)) and has_arrays(x):
            return True
    return False


def supported(data: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    if not data.dtype.isnative:
        data = data.astype(data.dtype.newbyteorder("="))
    try:
        DType.of(data.dtype)
    except OptionError as error:
        raise ArrayTypeError(
            "no element type of arrays", got=data.dtype, expected="numbers or bools"
        ) from error
    return data


def scalar_type(x: Any) -> DType:
    """The default element type of a Python number."""
    if isinstance(x, bool):
        return bool_
    return i64 if isinstance(x, int) else f32 if isinstance(x, float) else c64


def with_scalars(*operands: Any) -> list[Array]:
    """Operands as arrays: a Python number takes the element type of the arrays beside it, or the
    default type of its own kind where theirs cannot hold it."""
    if all(isinstance(x, Array) for x in operands):
        return list(operands)
    arrays = [x for x in operands if isinstance(x, (Array, np.ndarray, np.generic))]
    if not arrays:
        return [as_array(x) for x in operands]
    first = as_array(arrays[0]).dtype
    made = []
    for x in operands:
        if isinstance(x, (bool, int, float, complex, Size)) and not isinstance(x, np.generic):
            made.append(_scalar(x, first))
        else:
            made.append(as_array(x))
    return made


_RANKS = ("bool", "uint", "int", "float", "complex")


def _scalar(x: Any, beside: DType) -> Array:
    if isinstance(x, Size):
        return x.as_array(i64 if beside.kind in ("bool", "complex") else beside)
    own = scalar_type(x)
    holds = own is bool_ or _RANKS.index(beside.kind) >= _RANKS.index(
        "uint" if own is i64 else own.kind
    )
    element = beside if holds else promote(beside, own)
    try:
        return Array(np.asarray(x, element.numpy))
    except OverflowError as error:
        raise ArrayValueError(
            "a number out of range", got=x, expected=f"a value of {element}"
        ) from error


class EagerCall:
    """How an op runs on operands of certain shapes, strides and types."""

    __slots__ = ("_axes", "_run", "_shape", "_views")

    def __init__(
        self, compiled: CompiledGraph, datas: list[Data], form: Form | None = None
    ) -> None:
        shapes = [d.shape for d in datas] if form is None else [o.sizes for o in form.operands]
        self._run = compiled.caller(tuple(shapes))
        self._views: Sequence[View | None] | None = None
        self._shape: tuple[int, ...] | None = None
        self._axes: tuple[int, ...] | None = None
        if form is not None:
            self._views = form.views if any(form.views) else None
            self._shape = None if (form.shape == form.sizes and not form.reduced) else form.shape
            self._axes = form.axes

    def __call__(self, datas: list[Data]) -> tuple[Array, ...]:
        if self._views is not None:
            pairs = zip(self._views, datas, strict=True)
            datas = [d if view is None else view(d) for view, d in pairs]
        results = self._run(datas)
        if self._shape is not None:
            shape = self._shape
            results = tuple([r.reshape(shape) for r in results])
        if self._axes is not None:
            results = tuple([r.transpose(self._axes) for r in results])
        return tuple([Array(r) for r in results])


class NoElements:
    """An op whose results are empty: no kernel runs."""

    __slots__ = ("_results",)

    def __init__(self, values: Sequence[Value], shape: tuple[int, ...]) -> None:
        self._results = [(shape, v.shape.dtype.numpy) for v in values]

    def __call__(self, datas: list[Data]) -> tuple[Array, ...]:
        return tuple([Array(np.empty(*result)) for result in self._results])


_Call = Callable[[list[Data]], tuple[Array, ...]]
_calls: dict[Any, _Call] = {}  # by shapes, strides and types: the next call of the same
_compiled: dict[Any, CompiledGraph] = {}  # by pattern
_LIMIT = 8192
_lock = threading.RLock()


def apply(
    build: Build, operands: Sequence[Array], *options: Any, elementwise: bool = False
) -> Array:
    """The one result of `build` applied to the operands. Options are hashable. `elementwise`:
    each element of the result depends on the operands' elements there alone, and operands
    broadcast."""
    return apply_many(build, operands, *options, elementwise=elementwise)[0]


def apply_many(
    build: Build, operands: Sequence[Array], *options: Any, elementwise: bool = False
) -> tuple[Array, ...]:
    """All results of `build` applied to the operands."""
    datas = []
    for x in operands:
        if isinstance(x, Tracer):
            return _traced(x, build, operands, options)
        datas.append(x.data)
    key: list[Any] = [build, options, current_device()]
    for d in datas:
        key += (d.shape, d.strides, d.dtype)
    exact = tuple(key)
    found = _calls.get(exact)
    if found is None:
        make = _elementwise_call if elementwise else _plain_call
        found = _remember(_calls, exact, make(build, datas, options))
    return found(datas)


def apply_reduction(
    build: Build, x: Array, axes: tuple[int, ...], keepdims: bool, *options: Any
) -> Array:
    """The result of `build(g, x, axes, keepdims, *options)`, which reduces `axes` (at least one,
    not negative). The order of the elements that are reduced does not matter, unless there is one
    axis."""
    if isinstance(x, Tracer):
        return _traced(x, build, [x], (axes, keepdims, *options))[0]
    d = x.data
    exact = (build, axes, keepdims, options, current_device(), d.shape, d.strides, d.dtype)
    found = _calls.get(exact)
    if found is None:
        made = _reduction_call(build, d, axes, keepdims, options)
        found = _remember(_calls, exact, made)
    return found([d])[0]


def apply_along(build: Build, x: Array, axis: int, *options: Any, more: int = 0) -> Array:
    """The result of `build(g, x, axis, *options)`, whose elements depend on those along an axis;
    that axis of the result has `more` elements."""
    if isinstance(x, Tracer):
        return _traced(x, build, [x], (axis, *options))[0]
    d = x.data
    exact = (build, axis, options, current_device(), d.shape, d.strides, d.dtype)
    found = _calls.get(exact)
    if found is None:
        if d.size:
            form = canonical.along(d, axis, more)
            graph = _compile_form(build, [d], form, (*form.reduced, *options))
            made = EagerCall(graph, [d], form)
        else:
            made = _plain_call(build, [d], (axis, *options))
        found = _remember(_calls, exact, made)
    return found([d])[0]


def _remember(cache: dict[Any, Any], key: Any, value: Any) -> Any:
    with _lock:
        if len(cache) >= _LIMIT:
            cache.clear()
        return cache.setdefault(key, value)


def _elementwise_call(build: Build, datas: list[Data], options: Any) -> _Call:
    shape = broadcast_shape(datas)
    if 0 in shape:
        shapes = [Shape([0] if d.size != 1 else [], d.dtype) for d in datas]
        return NoElements(_graph(build, shapes, options).outputs, shape)
    form = canonical.elementwise(datas, shape)
    return EagerCall(_compile_form(build, datas, form, options), datas, form)


def _reduction_call(
    build: Build, d: Data, axes: tuple[int, ...], keepdims: bool, options: Any
) -> _Call:
    shape = [1 if a in axes else n for a, n in enumerate(d.shape) if keepdims or a not in axes]
    if 0 in shape:
        graph = _graph(build, [Shape([1] * d.ndim, d.dtype)], (axes, keepdims, *options))
        return NoElements(graph.outputs, tuple(shape))
    form = canonical.reduction(d, axes, keepdims)
    made = _compile_form(build, [d], form, (form.reduced, False, *options))
    return EagerCall(made, [d], form)


def _compile_form(build: Build, datas: list[Data], form: Form, options: Any) -> CompiledGraph:
    """The graph of a canonical form, compiled with dynamic sizes: each symbol is an axis, whether
    or not two sizes happen to be equal."""
    bounds = form.bounds()
    dims: list[Dim] = [sym(f"n{i}") for i in range(len(form.sizes))]
    if form.fixed:
        dims[-1] = form.sizes[-1]
    shapes, orders = [], []
    for d, operand in zip(datas, form.operands, strict=True):
        axes = operand.axes or tuple(range(len(operand.sizes)))
        memory = [axes.index(i) for i in range(len(axes))]
        here = zip(operand.sizes, memory, strict=True)
        shapes.append(Shape([1 if n == 1 != form.sizes[i] else dims[i] for n, i in here], d.dtype))
        orders.append(operand.axes)
    small = form.is_small
    key = (build, options, tuple(shapes), tuple(orders), bounds, small, current_device())
    found: CompiledGraph | None = _compiled.get(key)
    if found is None:
        pairs = zip(dims, bounds, strict=True)
        binding = DimBinding({str(s): UpTo(b) for s, b in pairs if b and not isinstance(s, int)})
        with _lock:
            graph = _graph(build, shapes, options, orders)
            threads = 1 if small else None  # a barrier would cost more
            chosen = CompileOptions(binding=binding, threads=threads)
            made = Session(current_device()).compile(graph, chosen)
        found = _remember(_compiled, key, made)
    return found


def _plain_call(build: Build, datas: list[Data], options: Any) -> EagerCall:
    """The call of an op that looks at shapes: equal sizes share a symbol. An op that needs numbers
    gets them."""
    try:
        return _sized_call(build, datas, options, True)
    except (AttributeValueError, ShapeError, UnsupportedError):
        return _sized_call(build, datas, options, False)


def _sized_call(build: Build, datas: list[Data], options: Any, symbolic: bool) -> EagerCall:
    symbols: dict[int, Dim] = {}
    shapes = []
    for d in datas:
        dims: list[Dim] = []
        for n in d.shape:
            if n > 1 and n not in symbols:
                symbols[n] = sym(f"n{len(symbols)}")
            dims.append(n if n < 2 or not symbolic else symbols[n])
        shapes.append(Shape(dims, d.dtype))
    key = (build, options, tuple(shapes), current_device())
    found: CompiledGraph | None = _compiled.get(key)
    if found is None:
        with _lock:
            made = Session(current_device()).compile(_graph(build, shapes, options))
        found = _remember(_compiled, key, made)
    return EagerCall(found, datas)


def _graph(
    build: Build, shapes: Sequence[Shape], options: Any,
    orders: Sequence[tuple[int, ...] | None] | None = None,
) -> Graph:  # fmt: skip
    graph = Graph(getattr(build, "__name__", "op"))
    values: list[Any] = [graph.input(f"x{i}", shape) for i, shape in enumerate(shapes)]
    if orders is not None:
        pairs = zip(values, orders, strict=True)
        values = [v if axes is None else graph.transpose(v, axes) for v, axes in pairs]
    result = build(graph, *values, *options)
    graph.set_outputs(*(result if isinstance(result, tuple) else (result,)))
    return graph


def trace_among(items: Sequence[object]) -> Trace | None:
    """The trace of the first traced array or symbolic size."""
    for x in items:
        if isinstance(x, (Tracer, Size)):
            return x.trace.innermost()
    return None


def value_in(x: Array, trace: Trace) -> Value:
    """The value of an operand in the graph of a trace."""
    if not isinstance(x, Tracer):
        data = x.data
        return trace.scalar(data) if data.ndim == 0 else trace.capture(x)
    x.home.require_open()
    if x.trace is not trace:
        raise InputError(
            "arrays of two traces meet", got=f"{x.trace.name} and {trace.name}",
            hint="a jitted function takes what it needs as arguments",
        )  # fmt: skip
    return x.value


def _traced(
    tracer: Tracer, build: Build, operands: Sequence[Array], options: Any
) -> tuple[Array, ...]:
    trace = tracer.trace
    trace.require_open()
    result = build(trace.graph, *[value_in(x, trace) for x in operands], *options)
    values = result if isinstance(result, tuple) else (result,)
    return tuple([Tracer(trace, v) for v in values])
