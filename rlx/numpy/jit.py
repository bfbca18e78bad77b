"""`rlx.jit`: a Python function on arrays, traced once with symbolic sizes and compiled.

The first call traces the function: it runs on arrays that have symbolic shapes and no elements, and
what it computes is recorded as a graph. A call with other sizes uses the same trace. Another trace
is made only for other element types, ranks, trees or static arguments, or where a guard fails: a
size of 1 (it broadcasts), sizes that had to be equal, or a size that Python code looked at.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from rlx.backends.timing import Profile
from rlx.errors import InputError, OptionError, ShapeError
from rlx.ir.dim import Dim, evaluate, sym
from rlx.ir.module import GraphModule
from rlx.ir.shape import Shape
from rlx.numpy.array import Array, Tracer
from rlx.numpy.device import current_device
from rlx.numpy.dispatch import as_array
from rlx.numpy.trace import Guard, Size, Trace
from rlx.numpy.tree import LEAF, Structure, flatten, leaf_names, unflatten
from rlx.runtime.compiled import CompiledGraph
from rlx.runtime.session import Session

Shapes = tuple[tuple[int, ...], ...]
_LIMIT = 4096


class Variant(NamedTuple):
    """One trace of a jitted function: `f.variants()` lists them."""

    reason: str
    arguments: tuple[str, ...]
    guards: tuple[str, ...]
    calls: int

    def __str__(self) -> str:
        lines = [f"{', '.join(self.arguments)}: {self.calls} calls; {self.reason}"]
        return "\n".join([*lines, *[f"  guard {g}" for g in self.guards]])


class _Traced:
    """A trace with its compiled graph."""

    def __init__(
        self, trace: Trace, shapes: Sequence[Shape], result: tuple[list[Any], Structure],
        reason: str, session: Session,
    ) -> None:  # fmt: skip
        self.trace, self.shapes, self.reason = trace, shapes, reason
        self.captured = [x.data for x in trace.captured]
        inputs = trace.graph.sources("input")
        self.checked = [n.output.shape for n in inputs]  # those of captured arrays too
        self.guards: list[Guard] = trace.guards
        leaves, self.structure = result
        self.leaves = leaves  # Tracers where a result is computed, else the result itself
        self.has_sizes = any(isinstance(leaf, Size) for leaf in leaves)
        self.calls = 0
        self.compiled: CompiledGraph | None = None
        if any(isinstance(leaf, Tracer) for leaf in leaves):
            self.compiled = session.compile(trace.graph)

    def serves(self, shapes: Shapes) -> bool:
        """Whether arguments of these shapes fit the trace and its guards."""
        sizes = self.sizes(shapes)
        return sizes is not None and all(guard.holds(sizes) for guard in self.guards)

    def sizes(self, shapes: Shapes) -> dict[str, int] | None:
        """The size of each symbol; None where the shapes do not fit."""
        sizes: dict[str, int] = {}
        given = [*shapes, *[a.shape for a in self.captured]]
        for expected, found in zip(self.checked, given, strict=True):
            for dim, n in zip(expected.dims, found, strict=True):
                if isinstance(dim, int):
                    if dim != n:
                        return None
                elif sizes.setdefault(str(dim), n) != n:
                    return None
        return sizes

    def run(self, arrays: Sequence[np.ndarray[Any, Any]]) -> Any:
        self.calls += 1
        leaves = self.leaves
        if self.compiled is not None:
            given = [*arrays, *self.captured] if self.captured else arrays
            results = iter(self.compiled.run_in_order(given))
            leaves = [Array(next(results)) if type(x) is Tracer else x for x in leaves]
        if self.has_sizes:
            sizes = self.sizes(tuple([a.shape for a in arrays])) or {}
            leaves = [evaluate(x.dim, sizes) if type(x) is Size else x for x in leaves]
        if self.structure is LEAF:
            return leaves[0]
        return unflatten(self.structure, leaves)

    def describe(self) -> Variant:
        inputs = self.trace.graph.sources("input")[: len(self.shapes)]
        shown = [f"{n.name} {n.output.shape}" for n in inputs]
        return Variant(self.reason, tuple(shown), tuple(map(str, self.guards)), self.calls)


class JitFunction:
    """What `rlx.jit` returns: call it like the function it was made of."""

    def __init__(
        self, function: Callable[..., Any], static: Sequence[str], fixed: Sequence[str],
        device: str | None,
    ) -> None:  # fmt: skip
        functools.update_wrapper(self, function)
        self._function, self._session = function, Session(device or current_device())
        self._signature = inspect.signature(function)
        names = list(self._signature.parameters)
        for given, what in ((static, "static"), (fixed, "fixed")):
            for name in given:
                if name not in names:
                    raise OptionError(
                        f"no such argument to be {what}", where=self._name, got=name,
                        expected=", ".join(names),
                    )  # fmt: skip
        self._static, self._fixed = frozenset(static), frozenset(fixed)
        self._exact: dict[Any, _Traced] = {}
        self._traces: dict[Any, list[_Traced]] = {}
        self._lock = threading.RLock()

    @property
    def _name(self) -> str:
        return str(getattr(self._function, "__name__", "function"))

    def __repr__(self) -> str:
        return f"<rlx.jit {self._name}: {len(self.variants())} traces>"

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def __call__(self, *args: Any, **named: Any) -> Any:
        traced, arrays = self._find(args, named)
        return traced.run(arrays)

    # -- arguments ----------------------------------------------------------------------------

    def _find(self, args: Any, named: Any) -> tuple[_Traced, list[np.ndarray[Any, Any]]]:
        """The trace that serves a call, and its arrays."""
        static: tuple[Any, ...] = ()
        dynamic: Any = (args, named) if named else args
        if self._static:
            dynamic, static = self._split(args, named)
        leaves, structure = flatten(dynamic)
        arrays = [x.data if type(x) is Array else self._leaf(x).data for x in leaves]
        shapes = tuple([a.shape for a in arrays])
        key = (structure, bool(named), static, shapes, tuple([a.dtype for a in arrays]))
        try:
            found = self._exact.get(key)
        except TypeError as error:
            raise InputError(
                "a static argument must be hashable", where=self._name, got=repr(static)
            ) from error
        if found is None:
            with self._lock:
                found = self._match(key, dynamic, named, arrays)
                if len(self._exact) >= _LIMIT:
                    self._exact.clear()
                self._exact[key] = found
        return found, arrays

    def _leaf(self, x: Any) -> Array:
        if isinstance(x, Tracer):
            raise InputError(
                "a jitted function was called while another is traced", where=self._name,
                got=repr(x), hint="call the plain function: f.__wrapped__",
            )  # fmt: skip
        try:
            return as_array(x)
        except Exception as error:
            raise InputError(
                "not an array", where=self._name, got=f"{x!r:.60} ({type(x).__name__})",
                expected="arrays, numbers, or trees of them",
                hint="name it in static= to pass it by value",
            ) from error  # fmt: skip

    def _split(self, args: Any, named: Any) -> tuple[Any, tuple[Any, ...]]:
        bound = self._signature.bind(*args, **named)
        static = tuple([(n, v) for n, v in bound.arguments.items() if n in self._static])
        return {n: v for n, v in bound.arguments.items() if n not in self._static}, static

    # -- traces -------------------------------------------------------------------------------

    def _match(
        self, key: Any, dynamic: Any, named: Any, arrays: Sequence[np.ndarray[Any, Any]]
    ) -> _Traced:
        structure, has_names, static, shapes, types = key
        ranks = tuple([len(s) for s in shapes])
        known = self._traces.setdefault((structure, has_names, static, types, ranks), [])
        for traced in known:
            if traced.serves(shapes):
                return traced
        reason = "first call" if not self._exact else "new types, ranks, tree or static arguments"
        if known:
            reason = "no trace so far fits the sizes or their guards"
        try:
            made = self._trace(key, dynamic, arrays, False, reason)
        except ShapeError:  # perhaps sizes that must be equal: let equal ones share a symbol
            made = self._trace(key, dynamic, arrays, True, f"{reason}; equal sizes are one symbol")
        known.append(made)
        return made

    def _trace(
        self, key: Any, dynamic: Any, arrays: Sequence[np.ndarray[Any, Any]], shared: bool,
        reason: str,
    ) -> _Traced:  # fmt: skip
        structure, has_names, static, _, _ = key
        trace = Trace(self._name)
        names = self._leaf_names(dynamic, has_names)
        shapes = _symbolic_shapes(names, arrays, self._fixed, trace, shared)
        tracers = [
            Tracer(trace, trace.graph.input(name, shape))
            for name, shape in zip(names, shapes, strict=True)
        ]
        given = unflatten(structure, tracers)
        try:
            if self._static:
                result = self._function(**given, **dict(static))
            elif has_names:
                result = self._function(*given[0], **given[1])
            else:
                result = self._function(*given)
            leaves, found = flatten(result)
            outputs = [self._output(trace, leaf) for leaf in leaves]
            computed = [x.value for x in outputs if isinstance(x, Tracer)]
            if computed:
                trace.graph.set_outputs(*computed, names=[f"y{i}" for i in range(len(computed))])
        finally:
            trace.open = False
        return _Traced(trace, shapes, (outputs, found), reason, self._session)

    def _output(self, trace: Trace, leaf: Any) -> Any:
        if isinstance(leaf, Tracer):
            leaf.trace.require_open()
            node = leaf.value.node
            if node.op.is_source:  # a result that is an argument
                return Tracer(trace, trace.graph.contiguous(leaf.value))
        return leaf

    def _leaf_names(self, dynamic: Any, has_names: bool) -> list[str]:
        """Names of inputs, by the names of the arguments."""
        if self._static:
            raw = leaf_names(dynamic)
        else:
            args, named = dynamic if has_names else (dynamic, {})
            bound = self._signature.bind_partial(*args, **named).arguments
            order = [*[(n, v) for n, v in bound.items() if n not in named],
                     *[(n, named[n]) for n in sorted(named)]]  # fmt: skip
            raw = [name for n, v in order for name in leaf_names(v, n)]
        made: list[str] = []
        for name in raw:
            clean = "".join(c if c.isalnum() or c == "_" else "_" for c in name)
            clean = clean if clean.isidentifier() else f"x_{clean}"
            while clean in made:
                clean += "_"
            made.append(clean)
        return made

    # -- looking inside -----------------------------------------------------------------------

    def lower(self, *args: Any, **named: Any) -> GraphModule:
        """The graph of a call with these arguments, with symbolic sizes."""
        return GraphModule.from_graph(self._find(args, named)[0].trace.graph)

    def inspect(self, *args: Any, **named: Any) -> str:
        """The graph of a call with these arguments as text."""
        return self.lower(*args, **named).inspect()

    def profile(self, *args: Any, **named: Any) -> Profile:
        """Time, GB/s and GFLOP/s of every kernel of a call."""
        traced, arrays = self._find(args, named)
        if traced.compiled is None:
            raise InputError("the function computes nothing", where=self._name)
        given = [*arrays, *traced.captured]
        return traced.compiled.profile(dict(zip(traced.compiled.input_names, given, strict=True)))

    def variants(self) -> list[Variant]:
        """The traces so far: why each was made, its arguments, its guards, how often it ran."""
        return [traced.describe() for known in self._traces.values() for traced in known]


def _symbolic_shapes(
    names: Sequence[str], arrays: Sequence[np.ndarray[Any, Any]], fixed: frozenset[str],
    trace: Trace, shared: bool,
) -> list[Shape]:  # fmt: skip
    """Shapes with a symbol for each size but 0 and 1; where `shared`, one for equal sizes."""
    shapes = []
    for name, array in zip(names, arrays, strict=True):
        dims: list[Dim] = []
        for axis, n in enumerate(array.shape):
            if n < 2 or name in fixed:
                dims.append(n)
                continue
            made = trace.symbols.get(n)
            if made is None:
                made = sym(f"{name}_{axis}")
                trace.hints[f"{name}_{axis}"] = n
            if shared:
                trace.symbols[n] = made
            dims.append(made)
        shapes.append(Shape(dims, array.dtype))
    return shapes


def jit(
    function: Callable[..., Any] | None = None, *, static: str | Sequence[str] = (),
    fixed: str | Sequence[str] = (), device: str | None = None,
) -> Any:  # fmt: skip
    """Compile a function on arrays: `@rlx.jit`, or `rlx.jit(f, static=["mode"])`.

    Arguments and results are trees of arrays. Arguments named in `static` are passed by value, and
    each value has a trace of its own. Sizes are symbolic: a new shape costs milliseconds. The sizes
    of arguments named in `fixed` are constants instead, and every new one is traced anew.
    """
    statics = [static] if isinstance(static, str) else list(static)
    fixes = [fixed] if isinstance(fixed, str) else list(fixed)
    if function is None:
        return lambda f: JitFunction(f, statics, fixes, device)
    if not callable(function):
        raise OptionError("not a function", where="rlx.jit", got=repr(function))
    return JitFunction(function, statics, fixes, device)
