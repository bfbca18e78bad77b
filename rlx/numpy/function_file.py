"""A jitted function in a file: `f.save(path)` and `rlx.load_function(path)`.

The file is a bundle: machine code for each combination of sizes that the function ran with, or for
all sizes up to given ones, the arrays that it captured, and a table of its traces (guards, trees,
static values, results). Loading needs no compiler and traces nothing. Like every bundle it is code:
load only files you trust. What is in the table is checked, and nothing in it is imported or
unpickled.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rlx.backends.registry import Device
from rlx.errors import FormatError, InputError, RlxError, UnsupportedError
from rlx.ir.binding import UpTo, infer_sizes
from rlx.ir.dim import Expr, evaluate
from rlx.ir.dtype import DType
from rlx.ir.serial.reader import Reader
from rlx.ir.serial.writer import Writer
from rlx.ir.shape import Shape
from rlx.numpy.arguments import Arguments, Data, Parameters, Shapes, exact_value
from rlx.numpy.array import Array
from rlx.numpy.compiled_trace import CompiledTrace, Output, Result, Served, SizeOf, Variant
from rlx.numpy.guard import Guard
from rlx.numpy.tree import LEAF, Structure
from rlx.runtime.bundle import Bundle, load_bundle, write_bundle
from rlx.runtime.compiled import CompiledGraph

_TABLE, _FORMAT = "function", 2
_COMPARISONS = ("==", "<", "<=", ">", ">=")
_CONTAINERS: dict[str, type[Any]] = {
    "None": type(None), "dict": dict, "list": list, "tuple": tuple,
}  # fmt: skip
_NAMES = {kind: name for name, kind in _CONTAINERS.items()}


# -- writing --------------------------------------------------------------------------------------


def write_function(
    path: str | os.PathLike[str], parameters: Parameters,
    traces: Sequence[tuple[Any, CompiledTrace]], device: Device, up_to: Mapping[str, int],
) -> Path:  # fmt: skip
    """Write the traces of a function, each with the key that calls find it by. `up_to` has the
    largest of some sizes, by their symbols."""
    _require_symbols(parameters, traces, up_to)
    artifacts, arrays, rows = {}, dict[str, Data](), []
    for i, (key, traced) in enumerate(traces):
        compiled, programs = traced.compiled, _programs(i, traced, up_to)
        if isinstance(compiled, CompiledGraph):
            captured = _shapes(traced.captured)
            for program in programs:
                shapes = (*program.shapes, *captured)
                artifacts[program.name] = _artifact(compiled, shapes, program.bounds)
        table = tuple([(p.name, p.shapes, tuple(p.bounds.items())) for p in programs])
        rows.append(_row(i, key, traced, table, arrays))
    if not artifacts:
        raise InputError(
            "nothing to save", where=parameters.function, got="no call that computed anything",
            hint="call the function with the sizes it is to serve, then save it",
        )  # fmt: skip
    about = (
        _FORMAT, parameters.function, parameters.names, tuple(sorted(parameters.static)),
        device.name, tuple(rows),
    )  # fmt: skip
    return write_bundle(path, artifacts, params=arrays, extras={_TABLE: Writer().value(about)})


class _Program(NamedTuple):
    """The code of a trace for some sizes: those of `shapes`, but any up to its bound where a symbol
    has one."""

    name: str
    shapes: Shapes
    bounds: Mapping[str, int]

    def serves(self, own: Mapping[str, int], sizes: Mapping[str, int]) -> bool:
        """Whether it computes `sizes`; `own` are those of its shapes."""
        bounds = self.bounds
        return all(n <= bounds[s] if s in bounds else n == own[s] for s, n in sizes.items())


def _require_symbols(
    parameters: Parameters, traces: Iterable[tuple[Any, CompiledTrace]], up_to: Mapping[str, int]
) -> None:
    known = {s for _, traced in traces for shape in traced.served.shapes for s in shape.symbols}
    unknown = sorted(up_to.keys() - known)
    if unknown:
        raise InputError(
            "up_to names no size of the arguments", where=parameters.function,
            got=", ".join(unknown), expected=f"some of {', '.join(sorted(known)) or 'none'}",
            hint="f.variants() shows the arguments with their sizes",
        )  # fmt: skip


def _programs(number: int, traced: CompiledTrace, up_to: Mapping[str, int]) -> list[_Program]:
    """The programs that serve the sizes that a trace ran with, and all up to the given ones."""
    served, found = traced.served, list[_Program]()
    for shapes in traced.bound_shapes:
        own = served.sizes(shapes) or {}
        bounds = _with_equals({s: up_to[s] for s in own if s in up_to}, served)
        for symbol, bound in bounds.items():
            if own[symbol] > bound:
                raise InputError(
                    "it ran with a larger size than it is saved for", where=traced.name,
                    got=f"{symbol} = {own[symbol]}", expected=f"at most {bound}",
                )  # fmt: skip
        most = {**own, **bounds}
        for symbol, dim in served.quotients:
            if isinstance(dim, Expr) and bounds.keys() & dim.symbols:
                bounds[symbol] = max(evaluate(dim, most), own[symbol])
        known = (p.serves(served.sizes(p.shapes) or {}, own) for p in found)
        if not any(known):
            found.append(_Program(f"{number}.{len(found)}", shapes, bounds))
    return found


def _with_equals(bounds: dict[str, int], served: Served) -> dict[str, int]:
    """The bounds, and the same for symbols that guards hold equal to one that has one."""
    equal = [
        (str(g.left), str(g.right)) for g in served.guards if g.comparison == "==" and g.answer
    ]
    known = {s for shape in served.shapes for s in shape.symbols}
    pairs = [pair for pair in equal if known.issuperset(pair)]
    for _ in pairs:  # each may reach one more
        for a, b in (*pairs, *[(b, a) for a, b in pairs]):
            if a in bounds:
                bounds.setdefault(b, bounds[a])
    return bounds


def _artifact(compiled: CompiledGraph, shapes: Shapes, bounds: Mapping[str, int]) -> Any:
    from rlx.runtime.pipeline import Specialized
    from rlx.runtime.template import Template

    found: Any = compiled.template  # or what makes it when it is needed
    template = found if isinstance(found, Template) else found.template
    assert isinstance(template, Template)
    named = zip(template.signature.inputs.items(), shapes, strict=True)
    sizes = infer_sizes([(name, shape, dims) for (name, shape), dims in named])
    binding = template.options.binding
    for symbol in template.open_symbols:
        size = UpTo(bounds[symbol]) if symbol in bounds else sizes[symbol]
        binding = binding.with_size(symbol, size)
    plain = replace(template, donated={})  # what is saved changes no argument
    fixed = plain.with_options(replace(template.options, binding=binding))
    return Specialized(fixed, fixed.plan({})).artifact()


def _shapes(arrays: Iterable[Data]) -> Shapes:
    return tuple([a.shape for a in arrays])


def _row(
    number: int, key: Any, traced: CompiledTrace, names: tuple[Any, ...], arrays: dict[str, Data]
) -> tuple[Any, ...]:
    structure, static, types, _ = key
    served, result = traced.served, traced.result
    if result.prints:
        raise UnsupportedError(
            "a function that prints is not saved", where=traced.name, got="debug.print",
            hint="return the values instead",
        )  # fmt: skip

    def kept(array: Data) -> str:
        name = f"{number}.{len(arrays)}"
        arrays[name] = np.ascontiguousarray(array)
        return name

    captured = tuple([kept(a) for a in traced.captured])
    leaves = tuple([_leaf_row(leaf, kept, traced.name) for leaf in result.leaves])
    guards = tuple([tuple(g) for g in served.guards])
    statics = tuple([_static_row(n, value, traced.name) for n, value in static])
    return (
        _structure_row(structure), statics,
        tuple([DType.of(t) for t in types]), served.names, served.shapes, guards,
        served.quotients, leaves, _structure_row(result.structure), captured, names,
        traced.compiled is not None, traced.reason,
    )  # fmt: skip


def _structure_row(structure: Structure) -> Any:
    if structure is LEAF:
        return LEAF
    kind, keys, parts = structure
    name = _NAMES.get(kind) or f"{kind.__module__}.{kind.__qualname__}"
    for key in keys:
        if not isinstance(key, (str, int, float, bool)):
            raise UnsupportedError("a dict key that is not saved", where="save", got=repr(key))
    return (name, tuple(keys), tuple([_structure_row(part) for part in parts]))


def _static_row(name: str, key: Any, function: str) -> tuple[str, Any]:
    value = _plain_value(key)
    if value is _NO_VALUE:
        raise UnsupportedError(
            "a static argument that is not saved", where=function, got=f"{name}: {key!r:.80}",
            expected="numbers, strings, None, element types, or tuples of them",
        )  # fmt: skip
    return name, value


_NO_VALUE = object()


def _plain_value(key: Any) -> Any:
    """The static value of a key that `exact_value` made."""
    if not isinstance(key, tuple):
        return _NO_VALUE
    kind, *items = key
    if kind is tuple:
        values = tuple([_plain_value(item) for item in items])
        return _NO_VALUE if any(v is _NO_VALUE for v in values) else values
    if kind is float:
        return float.fromhex(items[0])
    return items[0] if kind in (bool, int, str, type(None), DType) else _NO_VALUE


def _leaf_row(leaf: Any, kept: Callable[[Data], str], function: str) -> tuple[str, Any]:
    """A leaf of the results, by its kind."""
    if isinstance(leaf, Output):
        return "output", leaf.number
    if isinstance(leaf, SizeOf):
        return "size", leaf.dim
    if isinstance(leaf, Array):
        return "array", kept(leaf.data)
    if isinstance(leaf, np.ndarray):
        return "numpy", kept(leaf)
    if leaf is None or type(leaf) in (bool, int, float, str, DType):
        return "value", leaf
    raise UnsupportedError(
        "a result that is not saved", where=function, got=f"{leaf!r:.60}",
        expected="arrays, sizes, numbers and strings",
    )  # fmt: skip


# -- reading --------------------------------------------------------------------------------------


class LoadedFunction:
    """A jitted function that was loaded from a file: it serves the calls that were saved."""

    def __init__(
        self, parameters: Parameters, traces: dict[Any, list[CompiledTrace]],
        saved: dict[CompiledTrace, _Saved],
    ) -> None:  # fmt: skip
        self.__name__ = parameters.function
        self._parameters, self._traces, self._saved = parameters, traces, saved
        self._exact: dict[Any, Callable[[Sequence[Data]], Any]] = {}

    def __call__(self, *args: object, **named: object) -> Any:
        call = Arguments(self._parameters, args, named)
        if call.traced:
            raise UnsupportedError(
                "a loaded function has no body to trace", where=self.__name__,
                got="a call inside rlx.jit",
            )  # fmt: skip
        key = (call.structure, call.static, call.shapes, tuple([d.dtype for d in call.datas]))
        run = self._exact.get(key)
        if run is None:
            run = self._exact[key] = self._find(call).bind(call.shapes)
        return run(call.datas)

    def _find(self, call: Arguments) -> CompiledTrace:
        types = tuple([d.dtype for d in call.datas])
        ranks = tuple([d.ndim for d in call.datas])
        for traced in self._traces.get((call.structure, call.static, types, ranks), ()):
            if self._saved[traced].find(call.shapes) is not None:
                return traced
        given = ", ".join([str(Shape(d.shape, d.dtype)) for d in call.datas])
        static = "".join([f", {name}={value!r}" for name, value in call.static_values])
        raise InputError(
            "no saved variant serves this call", where=self.__name__, got=f"{given}{static}",
            expected=f"one of {'; '.join(self._shown())}",
            hint="call the function with these before you save it, or save it up to larger sizes: "
            "f.save(path, up_to=…)",
        )  # fmt: skip

    def _shown(self) -> list[str]:
        """The calls that were saved, in words."""
        found = []
        for (_, static, types, _), traces in self._traces.items():
            for traced in traces:
                saved = self._saved[traced]
                for program in sorted(saved.programs, key=lambda p: p.shapes):
                    rows = zip(saved.served.names, saved.shown(program), types, strict=True)
                    shown = [f"{n} {Shape(s, t)}" for n, s, t in rows]
                    sizes = {s for shape in saved.served.shapes for s in shape.symbols}
                    shown += [f"{s} <= {n}" for s, n in program.bounds.items() if s in sizes]
                    shown += [f"{name}={_plain_value(key)!r}" for name, key in static]
                    found.append(", ".join(shown))
        return found

    def variants(self) -> list[Variant]:
        """The traces that were saved."""
        return [traced.describe() for known in self._traces.values() for traced in known]

    def __repr__(self) -> str:
        return f"<loaded function {self.__name__}: {len(self.variants())} traces>"


class _Saved:
    """The saved programs of a trace, by the shapes of arguments."""

    def __init__(self, bundle: Bundle, served: Served, programs: Sequence[_Program]) -> None:
        self.bundle, self.served, self.programs = bundle, served, programs
        self._own = [served.sizes(p.shapes) for p in programs]

    def find(self, shapes: Shapes) -> _Program | None:
        """The program that serves a call."""
        sizes = self.served.sizes(shapes)
        if sizes is None or not self.served.holds(shapes):
            return None
        for program, own in zip(self.programs, self._own, strict=True):
            if own is not None and program.serves(own, sizes):
                return program
        return None

    def shown(self, program: _Program) -> list[tuple[Any, ...]]:
        """The shapes that a program serves: sizes, or symbols where they have bounds."""
        pairs = zip(self.served.shapes, program.shapes, strict=True)
        return [
            tuple([d if str(d) in program.bounds else n for d, n in zip(shape, ran, strict=True)])
            for shape, ran in pairs
        ]

    def caller(self, shapes: Shapes) -> Callable[..., Sequence[Data]]:
        program = self.find(shapes[: len(self.served.shapes)])
        assert program is not None  # calls that none serves are refused before
        return self.bundle[program.name].caller(shapes)


def load_function(
    path: str | os.PathLike[str], *, types: Sequence[type[Any]] = ()
) -> LoadedFunction:
    """Load a function that `f.save(path)` wrote. `types` are the dataclasses and named tuples in
    its arguments and results."""
    bundle = load_bundle(path)
    where = Path(path).name
    if _TABLE not in bundle.extras:
        raise FormatError("not a saved function", where=where, expected="a file of f.save(path)")
    known = dict(_CONTAINERS)
    known |= {f"{kind.__module__}.{kind.__qualname__}": kind for kind in types}
    try:
        reader = Reader(bundle.extras[_TABLE])
        table = reader.value()
        reader.finish()
        return _Loader(bundle, known).load(table)
    except RlxError as error:
        raise error.located(where) from None
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise FormatError("a damaged table of traces", where=where, got=str(error)) from error


class _Loader:
    """Makes a function of a table, which may hold anything."""

    def __init__(self, bundle: Bundle, types: dict[str, type[Any]]) -> None:
        self.bundle, self.types = bundle, types

    def load(self, table: Any) -> LoadedFunction:
        version, name, names, static, _, rows = table
        if version != _FORMAT:
            raise FormatError("another version of the format", got=version, expected=_FORMAT)
        parameters = Parameters(_text(name), tuple(map(_text, names)), frozenset(static))
        traces: dict[Any, list[CompiledTrace]] = {}
        found: dict[CompiledTrace, _Saved] = {}
        for row in rows:
            key, traced, saved = self._trace(parameters.function, row)
            traces.setdefault(key, []).append(traced)
            found[traced] = saved
        return LoadedFunction(parameters, traces, found)

    def _trace(self, name: str, row: Any) -> tuple[Any, CompiledTrace, _Saved]:
        (
            structure, static, types, names, shapes, guards, quotients, leaves, of_result,
            captured, programs, computes, reason,
        ) = row  # fmt: skip
        arrays = [self._array(n) for n in captured]
        served = Served(
            tuple(map(_text, names)), tuple([Shape.of(_shape(s)) for s in shapes]),
            tuple([_guard(g) for g in guards]),
            tuple([(_text(s), _dim(d)) for s, d in quotients]),
        )  # fmt: skip
        saved = _Saved(self.bundle, served, [_program(*given) for given in programs])
        result = Result([self._leaf(*leaf) for leaf in leaves], self._structure(of_result), [])
        runs = saved if computes else None
        traced = CompiledTrace(name, served, result, _text(reason), arrays, runs, None)
        key = (
            self._structure(structure),
            tuple([(_text(n), exact_value(value)) for n, value in static]),
            tuple([DType.of(t).numpy for t in types]),
            tuple([s.rank for s in served.shapes]),
        )
        return key, traced, saved

    def _structure(self, row: Any) -> Structure:
        if row == LEAF:
            return LEAF
        name, keys, parts = row
        kind = self.types.get(name)
        if kind is None:
            raise InputError(
                "a class of the function's trees is not known", got=name,
                hint=f"load_function(path, types=[{str(name).rpartition('.')[2]}])",
            )  # fmt: skip
        return (kind, keys, tuple([self._structure(part) for part in parts]))

    def _leaf(self, kind: Any, value: Any) -> Any:
        if kind == "output":
            return Output(_index(value))
        if kind == "size":
            return SizeOf(_dim(value))
        if kind in ("array", "numpy"):
            array = self._array(value)
            return Array(array) if kind == "array" else array
        if kind != "value":
            raise FormatError("unknown kind of a result", got=repr(kind))
        return value

    def _array(self, name: Any) -> Data:
        found: Data = self.bundle.params.get(_text(name))
        return found


def _guard(row: Any) -> Guard:
    left, comparison, right, answer, where, why = row
    if comparison not in _COMPARISONS or not isinstance(answer, bool):
        raise FormatError("not a guard", got=repr(row))
    return Guard(_dim(left), comparison, _dim(right), answer, _text(where), _text(why))


def _program(name: Any, shapes: Any, bounds: Any) -> _Program:
    return _Program(_text(name), _sizes(shapes), {_text(s): _index(n) for s, n in bounds})


def _shape(value: Any) -> Shape:
    if not isinstance(value, Shape):
        raise FormatError("not a shape", got=repr(value))
    return value


def _dim(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, (int, Expr)):
        raise FormatError("not a size", got=repr(value))
    return value


def _index(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise FormatError("not a number of a result", got=repr(value))
    return value


def _sizes(value: Any) -> Shapes:
    return tuple([tuple([_index(n) for n in shape]) for shape in value])


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise FormatError("not a text", got=repr(value))
    return value
