"""`rlx.jit`: a Python function on arrays, traced once with symbolic sizes and compiled.

The first call traces the function: it runs on arrays that have symbolic shapes and no elements, and
what it computes is recorded as a graph. A call with other sizes uses the same trace. Another trace
is made only for other element types, ranks, trees or static arguments, or where a guard fails: a
size of 0 or 1, sizes that had to be equal, or a size that Python code looked at.
"""

from __future__ import annotations

import functools
import inspect
import re
import threading
from collections.abc import Callable, Mapping, Sequence
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
from rlx.ir.module import GraphModule
from rlx.ir.shape import Shape
from rlx.numpy import debug as debug
from rlx.numpy.array import Array, Tracer
from rlx.numpy.compiled_trace import CompiledTrace, Data, Served, Shapes, Variant, finish
from rlx.numpy.device import current_device
from rlx.numpy.dispatch import as_array
from rlx.numpy.trace import Trace
from rlx.numpy.tree import flatten, is_tree, leaf_names, unflatten
from rlx.runtime.session import Session
from rlx.specialize.options import CompileOptions

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
        device: str | None = None,
    ) -> None:  # fmt: skip
        functools.update_wrapper(self, function)
        self._function, self._session = function, Session(device or current_device())
        self._name = _name_of(function)
        self._parameters = _parameters(function)
        for given, what in ((static, "static"), (fixed, "fixed")):
            for name in given:
                if name not in self._parameters:
                    raise OptionError(
                        f"no such argument to be {what}", where=self._name, got=name,
                        expected=", ".join(self._parameters),
                    )  # fmt: skip
        self._static, self._fixed = frozenset(static), frozenset(fixed)
        self._static_at = {i: n for i, n in enumerate(self._parameters) if n in self._static}
        # by the shapes and types of arrays that are given by position: the shortest way
        self._quick: dict[Any, Callable[[Sequence[Data]], R]] = {}
        self._exact: dict[Any, CompiledTrace] = {}
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
        if not named:
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
        call = _Arguments(self, args, named, bound)
        if call.traced:
            return self._inline(call)
        run = self._find(call).bind(call.shapes)
        if not named and not self._static and all(type(x) is Array for x in args):
            if len(self._quick) >= _LIMIT:
                self._quick.clear()
            self._quick[tuple([(d.shape, d.dtype) for d in call.datas])] = run
        return run(call.datas)  # type: ignore[no-any-return]

    def _inline(self, call: _Arguments) -> R:
        """Called while another function is traced: the body becomes part of that trace."""
        args, named = call.rebuilt(call.leaves)
        return self._function(*args, **named)

    # -- traces -------------------------------------------------------------------------------

    def _find(self, call: _Arguments) -> CompiledTrace:
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

    def _match(self, call: _Arguments, key: Any) -> CompiledTrace:
        structure, static, shapes, types = key
        ranks = tuple([len(s) for s in shapes])
        known = self._traces.setdefault((structure, static, types, ranks), [])
        for traced in known:
            if traced.served.holds(shapes):
                return traced
        reason = self._reason(call, known)
        try:
            made = self._trace(call, False, reason)
        except _NEED_NUMBERS as error:
            if hasattr(error, "is_final"):  # the numbers of this call do not fit either
                raise
            made = self._trace(call, True, f"{reason}; needs numbers for sizes: {error.what}")
        known.append(made)
        return made

    def _reason(self, call: _Arguments, known: Sequence[CompiledTrace]) -> str:
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

    def _trace(self, call: _Arguments, numbers: bool, reason: str) -> CompiledTrace:
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
        compiled = None if graph is None else self._session.compile(graph)
        captured = [x.data for x in trace.captured]
        return CompiledTrace(self._name, served, found, reason, captured, compiled, graph)

    def _symbolic_shapes(
        self, call: _Arguments, names: Sequence[tuple[str, str]], trace: Trace, numbers: bool
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
        return self._graph(_Arguments(self, args, named))

    def _graph(self, call: _Arguments) -> GraphModule:
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
        call = _Arguments(self, args, named)
        module, options = self._graph(call), CompileOptions()
        if stage == "mir":
            return module.inspect()
        sizes = self._find(call).served.sizes(call.shapes) or {}
        used = module.into_graph().symbols()
        options = CompileOptions.of({"binding": {s: n for s, n in sizes.items() if s in used}})
        return Stages(module, self._session.device.backend, options).text(stage)

    def profile(self, *args: P.args, **named: P.kwargs) -> Profile:
        """Time, GB/s and GFLOP/s of every kernel of a call."""
        call = _Arguments(self, args, named)
        traced = self._find(call)
        if traced.compiled is None:
            raise InputError("the function computes nothing", where=self._name)
        given = [*call.datas, *traced.captured]
        return traced.compiled.profile(dict(zip(traced.compiled.input_names, given, strict=True)))

    def variants(self) -> list[Variant]:
        """The traces so far: why each was made, its arguments, its guards, how often it ran."""
        return [traced.describe() for known in self._traces.values() for traced in known]

    def clear_cache(self) -> None:
        """Forget all traces; the next call traces again."""
        with _TRACING:
            self._traces.clear()
            self._exact.clear()
            self._quick.clear()


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


class _Instance:
    """An instance by identity, with what its attributes are now."""

    def __init__(self, instance: object) -> None:
        self.instance = instance
        self.attributes = dict(getattr(instance, "__dict__", {}))

    def __hash__(self) -> int:
        return id(self.instance)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Instance) or other.instance is not self.instance:
            return False
        mine, others = self.attributes, other.attributes
        return mine.keys() == others.keys() and all(others[k] is v for k, v in mine.items())


class _Arguments:
    """The arguments of a call: leaves of arrays, their structure, and static values."""

    def __init__(
        self, function: JitFunction[Any, Any], args: tuple[Any, ...], named: Mapping[str, Any],
        bound: bool = False,
    ) -> None:  # fmt: skip
        self.function, self.bound = function, bound
        self.static_values: list[tuple[str, Any]] = []
        self._args, self._named = args, named
        positions = function._static_at
        self._instance = _Instance(args[0]) if bound else None
        if positions or bound:
            at = {0: "self", **positions} if bound else positions
            self.static_values += [(at[i], args[i]) for i in at if i < len(args)]
            self.static_values += [(n, v) for n, v in named.items() if n in function._static]
            args = tuple([x for i, x in enumerate(args) if i not in at])
            named = {n: v for n, v in named.items() if n not in function._static}
        self.static = self._static_key()
        self.dynamic = (args, dict(named))
        leaves, self.structure = flatten(self.dynamic)
        self.leaves = [x if type(x) is Array else function_leaf(function, x) for x in leaves]
        self.traced = any(type(x) is Tracer for x in self.leaves)
        self.datas: list[Data] = [] if self.traced else [x.data for x in self.leaves]
        self.shapes: Shapes = tuple([d.shape for d in self.datas])

    def _static_key(self) -> tuple[Any, ...]:
        key = [(name, _exact_value(value)) for name, value in self.static_values]
        if self._instance is not None:
            key[0] = ("self", self._instance)
        return tuple(sorted(key, key=lambda item: item[0]))

    def rebuilt(self, leaves: Sequence[Array]) -> tuple[list[Any], dict[str, Any]]:
        """Positional and named arguments with other leaves. Containers are copies."""
        given, named = unflatten(self.structure, leaves)
        rest = iter(given)
        at = self.function._static_at
        args = [
            x if i in at or (self.bound and i == 0) else next(rest)
            for i, x in enumerate(self._args)
        ]
        return args, named | {n: v for n, v in self._named.items() if n in self.function._static}

    def names(self) -> list[tuple[str, str]]:
        """The argument of each leaf, and a name of its own for it: `params`, `params_w`."""
        parameters = [
            n for i, n in enumerate(self.function._parameters)
            if i not in self.function._static_at and not (self.bound and i == 0)
        ]  # fmt: skip
        args, named = self.dynamic
        rows = [
            (parameters[i] if i < len(parameters) else f"arg{i}", x) for i, x in enumerate(args)
        ]
        rows += [(n, named[n]) for n in sorted(named)]
        found: list[tuple[str, str]] = []
        taken: set[str] = set()
        for argument, tree in rows:
            for name in leaf_names(tree, argument):
                clean = re.sub("[^A-Za-z0-9_]", "_", name)
                clean = clean if clean.isidentifier() else f"x_{clean}"
                while clean in taken:
                    clean += "_"
                taken.add(clean)
                found.append((argument, clean))
        return found

    def require_untraced(self) -> None:
        """Raise if a method stored a traced array in its instance; the attributes are restored."""
        if self._instance is None:
            return
        now = getattr(self._instance.instance, "__dict__", {})
        for name, value in list(now.items()):
            if any(isinstance(leaf, Tracer) for leaf in flatten(value)[0]):
                now.clear()
                now.update(self._instance.attributes)
                raise InputError(
                    "a method stored a traced array in its instance", where=self.function._name,
                    got=f"self.{name}", hint="return the array, and assign it outside",
                )  # fmt: skip


def function_leaf(function: JitFunction[Any, Any], x: Any) -> Array:
    """A leaf of the arguments as an array."""
    if isinstance(x, Tracer):
        x.home.require_open()
        return x
    try:
        return as_array(x)
    except Exception as error:
        raise InputError(
            "not an array", where=function._name, got=f"{x!r:.60} ({type(x).__name__})",
            expected="arrays, numbers, or trees of them",
            hint="name it in static= to pass it by value",
        ) from error  # fmt: skip


def _exact_value(value: Any) -> Any:
    """A static value that equals no value of another type: 1, 1.0 and True differ."""
    if isinstance(value, tuple):
        return (type(value), *[_exact_value(item) for item in value])
    return type(value), value.hex() if type(value) is float else value


def _parameters(function: Callable[..., Any]) -> list[str]:
    """The names of parameters that an argument can have."""
    try:
        found = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a builtin
        return []
    return [p.name for p in found if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


def _name_of(function: Callable[..., Any]) -> str:
    inner = function.func if isinstance(function, functools.partial) else function
    return str(getattr(inner, "__name__", type(inner).__name__))


@overload
def jit(
    function: Callable[P, R], *, static: str | Sequence[str] = (), fixed: str | Sequence[str] = (),
    device: str | None = None,
) -> JitFunction[P, R]: ...  # fmt: skip
@overload
def jit(
    function: None = None, *, static: str | Sequence[str] = (), fixed: str | Sequence[str] = (),
    device: str | None = None,
) -> Callable[[Callable[P, R]], JitFunction[P, R]]: ...  # fmt: skip
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
        return lambda f: jit(f, static=statics, fixed=fixes, device=device)
    if not callable(function):
        raise OptionError("not a function", where="rlx.jit", got=repr(function))
    return JitFunction(function, statics, fixes, device)
