"""`rlx.jit`: a Python function on arrays, traced once with symbolic sizes and compiled.

The first call traces the function: it runs on arrays that have symbolic shapes and no elements, and
what it computes is recorded as a graph. A call with other sizes uses the same trace. Another trace
is made only for other element types, ranks, trees or static arguments, or where a guard fails: a
size of 0 or 1, sizes that had to be equal, or a size that Python code looked at.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, overload

from rlx.backends.timing import Profile
from rlx.errors import (
    AttributeValueError,
    BindingError,
    InputError,
    OptionError,
    ShapeError,
    UnsupportedError,
)
from rlx.ir.dim import Dim, sym
from rlx.ir.graph import Graph
from rlx.ir.module import GraphModule
from rlx.ir.shape import Shape
from rlx.numpy import debug as debug
from rlx.numpy import donation
from rlx.numpy.arguments import (
    Arguments,
    Data,
    Parameters,
    name_of,
    parameter_names,
)
from rlx.numpy.array import Array, Tracer
from rlx.numpy.compiled_trace import CompiledTrace, Output, Served, Variant, finish
from rlx.numpy.device import current_device
from rlx.numpy.quick_key import NoQuickKeyError, key_of, order_of
from rlx.numpy.trace import Trace
from rlx.numpy.tree import flatten, is_tree, leaf_names
from rlx.runtime.compiled import CompiledGraph
from rlx.runtime.session import Session
from rlx.specialize.options import CompileOptions
from rlx.support.gc_pause import without_gc

P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")
T = TypeVar("T")

_LIMIT = 4096
_TRACING = threading.RLock()  # one trace at a time: jitted functions may call each other
_NEED_NUMBERS = (ShapeError, UnsupportedError, AttributeValueError, BindingError)


class JitFunction(Generic[P, R]):
    """What `rlx.jit` returns: call it like the function it was made of."""

    def __init__(
        self, function: Callable[P, R], static: Sequence[str] = (), fixed: Sequence[str] = (),
        donate: Sequence[str] = (), device: str | None = None,
    ) -> None:  # fmt: skip
        functools.update_wrapper(self, function)
        self._function, self._session = function, Session(device or current_device())
        self._name, names = name_of(function), parameter_names(function)
        for given, what in ((static, "static"), (fixed, "fixed"), (donate, "donated")):
            for name in given:
                if name not in names or (given is donate and name in static):
                    raise OptionError(
                        f"no such argument to be {what}", where=self._name, got=name,
                        expected=", ".join(names),
                    )  # fmt: skip
        self._parameters = Parameters(self._name, names, frozenset(static), frozenset(donate))
        self._fixed, self._is_plain = frozenset(fixed), not (static or donate)
        # by the shapes and types of arrays that are given by position: the shortest way
        self._quick: dict[Any, Callable[[Sequence[Data]], R]] = {}
        # by the key of `quick_key`, with the order of the leaves where it is another
        self._trees: dict[Any, tuple[Callable[[Sequence[Data]], R], list[int] | None]] = {}
        self._exact: dict[Any, CompiledTrace] = {}
        self._donated: dict[Any, list[bool]] = {}  # by the structure of arguments, for each leaf
        self._traces: dict[Any, list[CompiledTrace]] = {}

    def __repr__(self) -> str:
        return f"<rlx.jit {self._name}: {len(self.variants())} traces>"

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> JitFunction[P, R]: ...
    @overload
    def __get__(
        self: JitFunction[Concatenate[T, Q], R], instance: T, owner: type | None = None
    ) -> BoundFunction[Q, R]: ...
    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else BoundFunction(self, instance)

    def __call__(self, *args: P.args, **named: P.kwargs) -> R:
        if self._is_plain and not named:
            datas = []
            for x in args:
                if type(x) is not Array:
                    break
                datas.append(x.data)
            else:
                found = self._quick.get(tuple([(d.shape, d.dtype) for d in datas]))
                if found is not None:
                    return found(datas)
        return self._call(args, named)

    def _call(self, args: tuple[Any, ...], named: Mapping[str, Any], bound: bool = False) -> R:
        datas: list[Data] = []
        key, found = None, None
        if not bound and not self._parameters.donated:
            try:
                key = key_of(self._parameters, args, named, datas)
                found = self._trees.get(key)
            except (NoQuickKeyError, TypeError):  # other leaves, or a key that cannot be hashed
                key = None
        if found is not None:
            run, order = found
            return run([datas[i] for i in order] if order else datas)
        call = Arguments(self._parameters, args, named, bound)
        if call.traced:
            return self._inline(call)
        run = self._find(call).bind(call.shapes)
        if self._parameters.donated:
            return self._run_donated(call, run)
        if key is not None:
            self._remember(key, run, datas, call, named)
        return run(call.datas)

    def _remember(
        self, key: Any, run: Callable[[Sequence[Data]], R], datas: list[Data], call: Arguments,
        named: Mapping[str, Any],
    ) -> None:  # fmt: skip
        """Let calls with this key find `run` at once."""
        if len(self._trees) >= _LIMIT:
            self._trees.clear()
            self._quick.clear()
        order = order_of(self._parameters, call.given, named)
        pairs = zip([datas[i] for i in order], call.datas, strict=True)
        if any(a.dtype != b.dtype or a.shape != b.shape for a, b in pairs):
            return  # an array that is converted first
        self._trees[key] = run, None if order == sorted(order) else order
        if self._is_plain and not named and all(type(x) is Array for x in call.given):
            self._quick[tuple([(d.shape, d.dtype) for d in datas])] = run

    def _run_donated(self, call: Arguments, run: Callable[[Sequence[Data]], R]) -> R:
        """Run with donated arguments, which nobody can use any more."""
        flags = self._donated.get(call.structure)
        if flags is None:
            names = [argument for argument, _ in call.names()]
            flags = [name in self._parameters.donated for name in names]
            self._donated[call.structure] = flags
        donation.take(call.leaves, call.datas, flags)
        try:
            return run(call.datas)
        finally:
            for leaf, is_donated in zip(call.leaves, flags, strict=True):
                if is_donated:
                    donation.give_up(leaf)

    def _inline(self, call: Arguments) -> R:
        """Called while another function is traced: the body becomes part of that trace."""
        args, named = call.rebuilt(call.leaves)
        return self._function(*args, **named)

    # -- traces -------------------------------------------------------------------------------

    def _find(self, call: Arguments) -> CompiledTrace:
        """The trace that serves a call."""
        key = (call.structure, call.static, call.shapes, tuple([d.dtype for d in call.datas]))
        try:
            found = self._exact.get(key)
        except TypeError as error:
            raise InputError(
                "a static argument must be hashable", where=self._name,
                got=", ".join(f"{name}={value!r:.60}" for name, value in call.static_values),
            ) from error  # fmt: skip
        if found is None:
            with _TRACING:
                found = self._match(call, key)
                if len(self._exact) >= _LIMIT:
                    self._exact.clear()
                self._exact[key] = found
        return found

    def _match(self, call: Arguments, key: Any) -> CompiledTrace:
        structure, static, shapes, types = key
        ranks = tuple([len(s) for s in shapes])
        known = self._traces.setdefault((structure, static, types, ranks), [])
        for traced in known:
            if traced.served.holds(shapes):
                return traced
        made = self._fresh(call, self._reason(call, known))
        known.append(made)
        return made

    def _arguments(self, args: tuple[Any, ...], named: Mapping[str, Any]) -> Arguments:
        return Arguments(self._parameters, args, named)

    def _fresh(self, call: Arguments, reason: str = "") -> CompiledTrace:
        """A new trace for a call; with numbers for sizes where symbols will not do."""
        with _TRACING, without_gc():
            try:
                return self._trace(call, False, reason)
            except _NEED_NUMBERS as error:
                if hasattr(error, "is_final"):  # the numbers of this call do not fit either
                    raise
                why = f"{reason}; needs numbers for sizes: {error.what}"
                return self._trace(call, True, why)

    def _reason(self, call: Arguments, known: Sequence[CompiledTrace]) -> str:
        """Why another trace is made, in words."""
        if not any(self._traces.values()):
            return "first call"
        if not known:
            return "other types, ranks, trees or static arguments than before"
        failed = []
        for traced in known:
            sizes = traced.served.sizes(call.shapes)
            if sizes is None:
                failed.append("a size of 0, 1 or a fixed one differs")
            else:
                guard = next(g for g in traced.served.guards if not g.holds(sizes))
                failed.append(f"guard {guard} failed")
        return "; ".join(dict.fromkeys(failed[-3:]))

    def _trace(self, call: Arguments, numbers: bool, reason: str) -> CompiledTrace:
        trace = Trace(self._name)
        names = call.names()
        shapes = self._symbolic_shapes(call, names, trace, numbers)
        pairs = list(zip([name for _, name in names], shapes, strict=True))
        tracers = [Tracer(trace, trace.graph.input(name, shape)) for name, shape in pairs]
        args, named = call.rebuilt(tracers)
        with trace.recording():
            try:
                result = self._function(*args, **named)
            except RecursionError as error:
                raise InputError(
                    "the function calls itself without an end while it is traced",
                    where=self._name,
                    hint="Python recursion must end by static arguments or sizes; else use "
                    "rlx.while_loop",
                ) from error  # fmt: skip
            finally:
                call.require_untraced()
            leaves, structure = flatten(result)
            graph, found = finish(trace, leaves, structure)
        served = Served(
            tuple([name for name, _ in pairs]), tuple(shapes), tuple(trace.guards),
            tuple(trace.quotients.items()),
        )  # fmt: skip
        compiled = None
        if graph is not None:
            given = [name for argument, name in names if argument in self._parameters.donated]
            named_leaves = zip(leaf_names(result), found.leaves, strict=True)
            paths = [path for path, x in named_leaves if type(x) is Output]
            donated = donation.pairs(graph, given, paths) if given else None
            compiled = (
                self._session.compile(graph, donated=donated) if donated else self._compile(graph)
            )
        captured = [x.data for x in trace.captured]
        return CompiledTrace(self._name, served, found, reason, captured, compiled, graph)

    def _compile(self, graph: Graph) -> CompiledGraph:
        return self._session.compile_kept(graph)

    def _symbolic_shapes(
        self, call: Arguments, names: Sequence[tuple[str, str]], trace: Trace, numbers: bool
    ) -> list[Shape]:
        """Shapes with a symbol for every size but 0 and 1."""
        shapes = []
        for (argument, name), data in zip(names, call.datas, strict=True):
            dims: list[Dim] = []
            for axis, n in enumerate(data.shape):
                if n < 2 or numbers or argument in self._fixed:
                    dims.append(n)
                    continue
                symbol = f"{name}_{axis}"
                trace.hints[symbol] = n
                dims.append(sym(symbol))
            shapes.append(Shape(dims, data.dtype))
        return shapes

    # -- looking inside -----------------------------------------------------------------------

    def lower(self, *args: P.args, **named: P.kwargs) -> GraphModule:
        """The graph of a call with these arguments, with symbolic sizes."""
        return self._graph(Arguments(self._parameters, args, named))

    def _graph(self, call: Arguments) -> GraphModule:
        graph = self._find(call).graph
        if graph is None:
            raise InputError("the function computes nothing", where=self._name)
        return GraphModule.from_graph(graph)

    def inspect(self, *args: Any, stage: str = "mir", **named: Any) -> str:
        """A call with these arguments at a stage of the compiler, as text: "mir" (the graph),
        "lir" (optimised, with its memory plan), "program", "llvm" or "asm"."""
        from rlx.runtime.stages import STAGES, Stages

        if stage not in STAGES:
            raise OptionError(
                "no such stage", where=self._name, got=repr(stage), expected=", ".join(STAGES)
            )
        call = Arguments(self._parameters, args, named)
        module, options = self._graph(call), CompileOptions()
        if stage == "mir":
            return module.inspect()
        sizes = self._find(call).served.sizes(call.shapes) or {}
        used = module.into_graph().symbols()
        options = CompileOptions.of({"binding": {s: n for s, n in sizes.items() if s in used}})
        return Stages(module, self._session.device.backend, options).text(stage)

    def profile(self, *args: P.args, **named: P.kwargs) -> Profile:
        """Time, GB/s and GFLOP/s of every kernel of a call."""
        call = Arguments(self._parameters, args, named)
        traced = self._find(call)
        compiled = traced.compiled
        if not isinstance(compiled, CompiledGraph):
            raise InputError("the function computes nothing", where=self._name)
        given = [*call.datas, *traced.captured]
        return compiled.profile(dict(zip(compiled.input_names, given, strict=True)))

    def variants(self) -> list[Variant]:
        """The traces so far: why each was made, its arguments, its guards, how often it ran."""
        return [traced.describe() for known in self._traces.values() for traced in known]

    def save(self, path: str | os.PathLike[str], *, up_to: Mapping[str, int] | None = None) -> Path:
        """Write all traces so far, with machine code for all sizes they ran with, to a file for
        `rlx.load_function`.

        `up_to` names sizes as `variants` shows them, and has one program serve all up to these:
        `f.save(path, up_to={"x_0": 512})`. It takes the memory of the largest."""
        from rlx.numpy.function_file import write_function  # late: a start does without it

        rows = [(key, traced) for key, traces in self._traces.items() for traced in traces]
        return write_function(path, self._parameters, rows, self._session.device, up_to or {})

    def clear_cache(self) -> None:
        """Forget all traces; the next call traces again."""
        with _TRACING:
            self._traces.clear()
            self._exact.clear()
            self._quick.clear()
            self._trees.clear()


class BoundFunction(Generic[Q, R]):
    """A jitted method of an instance.

    An instance that is a tree (a dataclass) is an argument like others. Any other is passed by
    identity: arrays in its attributes are captured, and it is traced again once one of its
    attributes was assigned anew.
    """

    def __init__(self, function: JitFunction[Any, R], instance: object) -> None:
        functools.update_wrapper(self, function._function)
        self.function, self.instance = function, instance

    def __call__(self, *args: Q.args, **named: Q.kwargs) -> R:
        return self.function._call((self.instance, *args), named, not is_tree(self.instance))

    def __repr__(self) -> str:
        return f"<method {self.function!r} of {self.instance!r}>"


@overload
def jit(
    function: Callable[P, R], *, static: str | Sequence[str] = (), fixed: str | Sequence[str] = (),
    donate: str | Sequence[str] = (), device: str | None = None,
) -> JitFunction[P, R]: ...  # fmt: skip
@overload
def jit(
    function: None = None, *, static: str | Sequence[str] = (), fixed: str | Sequence[str] = (),
    donate: str | Sequence[str] = (), device: str | None = None,
) -> Callable[[Callable[P, R]], JitFunction[P, R]]: ...  # fmt: skip
def jit(
    function: Callable[..., Any] | None = None, *, static: str | Sequence[str] = (),
    fixed: str | Sequence[str] = (), donate: str | Sequence[str] = (), device: str | None = None,
) -> Any:  # fmt: skip
    """Compile a function on arrays: `@rlx.jit`, or `rlx.jit(f, static=["mode"])`.

    Arguments and results are trees of arrays. Arguments named in `static` are passed by value, and
    each value has a trace of its own. Sizes are symbolic: a new shape costs milliseconds. The sizes
    of arguments named in `fixed` are constants instead, and every new one is traced anew. Arrays of
    arguments named in `donate` cannot be used after a call: results of their type and shape take
    their memory, and are computed in place where that is safe.
    """
    statics = [static] if isinstance(static, str) else list(static)
    fixes = [fixed] if isinstance(fixed, str) else list(fixed)
    gifts = [donate] if isinstance(donate, str) else list(donate)
    if function is None:
        return lambda f: jit(f, static=statics, fixed=fixes, donate=gifts, device=device)
    if not callable(function):
        raise OptionError("not a function", where="rlx.jit", got=repr(function))
    return JitFunction(function, statics, fixes, gifts, device)
