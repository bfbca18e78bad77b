"""MIR: a DAG of tensor ops as a topologically sorted list of nodes, and its builder.

A `Node` applies an op to values and has one `Value` per result. A `Graph` is the list of nodes and
the output values. HIR has the same structure; some of its ops are blocks.

Every registered op is a builder method: `g.softmax(x, axis=-1)`, `g.add(a, b)`. Tensors come first,
then attributes, by position or by name. `name=` names the result; `shape=` is the expected shape,
which is checked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from rlx.errors import InputError, NameConflictError, OptionError, RlxError, ShapeError, StageError
from rlx.ir.attrs import Data
from rlx.ir.methods import OpMethods, ValueMethods
from rlx.ir.node import Node, Operand, Origin, Value, caller, infer, symbols_of
from rlx.ir.op import REGISTRY, Op, lookup, on_register
from rlx.ir.shape import Shape

if TYPE_CHECKING:
    from rlx.ir.phase import Phase


class UnknownMethod(OptionError, AttributeError):
    """No op of that name; an AttributeError too, so that `hasattr` works."""


class Builder(OpMethods):
    """Appends nodes; has a method for every op, also for ops registered later."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        # registered ops are real methods; this is an unknown name or an op of a device
        if name.startswith("_"):
            raise AttributeError(name)
        if f"hir.{name}" in REGISTRY:
            raise StageError(
                f"{name} is an HIR block", where=name, got="a MIR graph", expected="an HIR module",
                hint="build it with GraphModule.hir(name) or GraphModule.define(name, build)",
            )  # fmt: skip
        try:
            lookup(name)
        except OptionError as e:
            raise UnknownMethod(e.what, got=e.got, hint=e.hint) from None
        if not hasattr(OpMethods, name):  # a source, which has a method of its own
            raise AttributeError(name)
        made: Callable[..., Any] = getattr(super(), name)
        return made

    def apply(self, op: str, *args: Any, **attributes: Any) -> Any:
        """Build the op called `op`."""
        return getattr(self, op)(*args, **attributes)

    def append(
        self, op: Op, operands: Sequence[Any] = (), name: str = "", shape: object = None
    ) -> Any:
        """Add the op record `op` applied to `operands`."""
        raise NotImplementedError


def _install(cls: type[Op]) -> None:
    if not cls.is_source and not cls.is_block:
        setattr(OpMethods, cls.name, cls.builder(_method(cls)))
        install_value_method(cls.name, cls)


def install_value_method(name: str, cls: type[Op]) -> None:
    """Make `x.name(…)` build `g.name(x, …)`: the block at HIR, the op at MIR."""
    if not cls.num_required or hasattr(ValueMethods, name):
        return

    def build(self: Value, *args: Any, **attributes: Any) -> Any:
        return getattr(self.graph, name)(self, *args, **attributes)

    build.__name__, build.__doc__ = name, described(name, cls)
    setattr(ValueMethods, name, build)


def described(name: str, cls: type[Op]) -> str:
    """The docstring of a builder method: its signature and the docstring of the op."""
    tensors = [n if i < cls.num_required else f"{n}=None" for i, n in enumerate(cls.input_names)]
    more = ["*tensors"] if cls.variadic else []
    given = [f for f in cls.fields if not (cls.is_block and f.startswith("has_"))]
    fields = [f"{f}={cls.defaults[f]!r}" if f in cls.defaults else f for f in given]
    return f"{name}({', '.join([*tensors, *more, *fields])})\n\n{cls.__doc__ or ''}"


def _method(cls: type[Op]) -> Callable[..., Any]:
    required, fixed = cls.num_required, cls.num_required + cls.num_optional
    fields, variadic, names = cls.fields, cls.variadic, cls.input_names
    plain = None if cls.fields else cls()

    def build(
        self: Builder, *args: Any, name: str = "", shape: object = None, **attributes: Any
    ) -> Any:
        if len(args) <= fixed and not attributes and plain is not None:
            return self.append(plain, args, name, shape)
        if shape is not None and "shape" in fields:  # the attribute, not the expected shape
            attributes["shape"], shape = shape, None
        if attributes and not variadic and not attributes.keys().isdisjoint(names):
            args = _by_name(cls, args, attributes)
        operands, rest = _variadic(args) if variadic else _split(args, required, fixed)
        if len(rest) > len(fields):
            raise InputError(
                "too many arguments", where=cls.name, got=len(args), expected=_usage(cls)
            )
        attributes.update(zip(fields, rest, strict=False))
        return self.append(record(cls, attributes), operands, name, shape)

    build.__name__, build.__doc__ = cls.name, described(cls.name, cls)
    return build


def _by_name(cls: type[Op], args: tuple[Any, ...], attributes: dict[str, Any]) -> tuple[Any, ...]:
    """Positional arguments with the tensors given by name, which leave `attributes`."""
    given = list(args)
    for name in cls.input_names[len(args) :]:
        if name not in attributes:
            break
        given.append(attributes.pop(name))
    return tuple(given)


def _usage(cls: type[Op]) -> str:
    tensors = [*cls.input_names, *(["…"] if cls.variadic else [])]
    return f"{cls.name}({', '.join(tensors)}; {', '.join(cls.fields)})"


_records: dict[tuple[Any, ...], Op] = {}


def record(cls: type[Op], attributes: dict[str, Any]) -> Op:
    """The op with these attributes, from a cache: layers repeat."""
    # types are part of the key: 1, 1.0 and True are equal but different attributes
    key = (cls, *attributes.items(), *map(_type_key, attributes.values()))
    try:
        found = _records.get(key)
    except TypeError:  # a list or an array among them
        return _new_record(cls, attributes)
    if found is None:
        if len(_records) > 100_000:
            _records.clear()
        found = _records[key] = _new_record(cls, attributes)
    return found


def _type_key(value: object) -> object:
    if type(value) is float:
        return repr(value)  # distinguishes -0.0 from 0.0
    return tuple(map(_type_key, value)) if type(value) is tuple else type(value)


def _new_record(cls: type[Op], attributes: dict[str, Any]) -> Op:
    unknown = [a for a in attributes if a not in cls.fields]
    if unknown:
        raise InputError(
            "unknown argument", where=cls.name, got=", ".join(unknown), expected=_usage(cls)
        )
    missing = [f for f in cls.fields if f not in attributes and f not in cls.defaults]
    if missing:
        raise InputError(
            "missing argument", where=cls.name, got=f"no {', '.join(missing)}", expected=_usage(cls)
        )
    return cls(**attributes)


def _variadic(args: tuple[Any, ...]) -> tuple[Sequence[Any], Sequence[Any]]:
    """Tensors, or one list of them, then attributes."""
    if args and isinstance(args[0], (list, tuple)):
        return args[0], args[1:]
    count = len(args)
    while count and not isinstance(args[count - 1], (Value, np.ndarray)):
        count -= 1
    return args[:count], args[count:]


def _split(
    args: tuple[Any, ...], required: int, tensors: int
) -> tuple[Sequence[Any], Sequence[Any]]:
    """Positional arguments as (tensors, attributes).

    Optional tensors must be values or arrays, or None when absent; a number is an attribute.
    """
    count = min(required, len(args))
    while count < min(tensors, len(args)) and isinstance(args[count], (Value, np.ndarray)):
        count += 1
    rest = args[count:]
    skipped = 0
    while skipped < min(tensors - count, len(rest)) and rest[skipped] is None:
        skipped += 1
    return args[:count], rest[skipped:]


on_register(_install)


_NUMERIC = ("int", "uint", "float", "complex")


class Graph(Builder):
    """An ordered list of nodes and the values it returns."""

    # entry points of GraphModule, set by its module
    define: ClassVar[Callable[..., Any]]
    hir: ClassVar[Callable[..., Any]]

    def __init__(self, name: str = "graph") -> None:
        if not isinstance(name, str):
            raise InputError("not a name", where="graph", got=repr(name), expected="a str")
        self.name = name
        self.nodes: list[Node] = []
        self.outputs: list[Value] = []
        self.output_names: list[str] = []
        self.dynamic: dict[str, int] = {}  # symbols whose size each run gives → upper bounds
        self.given_phases: dict[Node, Phase] = {}  # of a schedule that was given, not derived
        self._sources: dict[str, Node] = {}
        self._block = ""
        self._origin: Origin | None = None

    @property
    def live(self) -> dict[str, int]:
        """Alias of `dynamic`."""
        return self.dynamic

    @live.setter
    def live(self, bounds: dict[str, int]) -> None:
        self.dynamic = bounds

    # -- sources ------------------------------------------------------------------------------

    def input(self, name: str, shape: object, dtype: object = None) -> Value:
        """A tensor given with every run."""
        return self._source("input", name, Shape.of(shape, dtype))

    def param(self, name: str, shape: object, dtype: object = None) -> Value:
        """A weight: given once, shared by all variants."""
        return self._source("param", name, Shape.of(shape, dtype))

    def state(self, name: str, shape: object, dtype: object = None) -> Value:
        """A named buffer that survives runs and is updated in place by `state_update`."""
        return self._source("state", name, Shape.of(shape, dtype))

    def constant(self, value: Any, dtype: object = None, name: str = "") -> Value:
        """A tensor known now. Python floats are f32, ints i32, unless a dtype is given."""
        if isinstance(value, Data):
            data = value
        else:
            if dtype is None and not isinstance(value, (np.ndarray, np.generic)):
                array = np.asarray(value)
                dtype = {"f": "f32", "i": "i32"}.get(array.dtype.kind)
            data = Data(value, dtype)
        return self.append(lookup("constant")(data=data), (), name)  # type: ignore[no-any-return]

    def _source(self, op: str, name: str, shape: Shape) -> Value:
        if not isinstance(name, str) or not name:
            raise InputError(f"a {op} needs a name", got=repr(name))
        if name in self._sources:
            raise NameConflictError(
                "name already taken",
                where=op,
                got=repr(name),
                origin=self._sources[name].origin,
                hint="inputs, params and states share one set of names",
            )
        return self.append(record(lookup(op), {"shape": shape}), (), name)  # type: ignore[no-any-return]

    # -- nodes --------------------------------------------------------------------------------

    def append(
        self, op: Op, operands: Sequence[Operand] = (), name: str = "", shape: object = None
    ) -> Any:
        """Append a node; returns its value, or a tuple when the op has several results."""
        node = self.append_node(op, operands, name)
        if shape is not None:
            self._check_stated(node, Shape.of(shape))
        outputs = node.outputs
        return outputs[0] if len(outputs) == 1 else outputs

    def _check_stated(self, node: Node, expected: Shape) -> None:
        found = node.outputs[0].shape
        if not (found.same_dims(expected) and found.dtype is expected.dtype):
            self.nodes.pop()
            raise ShapeError(
                "not the stated shape",
                where=node.op.name,
                got=found,
                expected=expected,
                origin=node.origin,
            )

    def current_op(self, op: Op) -> Op:
        """`op` with the symbols that this graph has; a trace replaces them as it grows."""
        return op

    def append_node(self, op: Op, operands: Sequence[Operand] = (), name: str = "") -> Node:
        inputs = tuple(operands)
        for v in inputs:
            if type(v) is not Value or v.node.graph is not self:
                inputs = self._operands(op, inputs)
                break
        origin = self._origin or caller(self._block)
        try:
            shapes = infer(op, tuple([v.shape for v in inputs]))
        except RlxError as e:
            shown = ", ".join(f"{v.name} {v.shape}" for v in inputs)
            raise e.located(op.name, f"{name or op.name}({shown}) {origin}".strip()) from None
        node = Node(self, len(self.nodes), op, inputs, name, origin)
        node.outputs = tuple([Value(node, i, s) for i, s in enumerate(shapes)])
        self.nodes.append(node)
        if op.is_source and name:
            self._sources[name] = node
        return node

    def _operands(self, op: Op, operands: Sequence[Operand]) -> tuple[Value, ...]:
        """Numbers and arrays become constants; numbers take the dtype of the other operands."""
        known = [v for v in operands if isinstance(v, Value)]
        for v in known:
            if v.graph is not self:
                raise InputError(
                    "a value of another graph", where=op.name, got=f"{v!r} of {v.graph.name}"
                )
        made = []
        for v in operands:
            if isinstance(v, Value):
                made.append(v)
            elif isinstance(v, (bool, int, float, np.ndarray, np.generic, list)):
                made.append(self._literal(v, known))
            else:
                raise InputError(
                    "not a tensor", where=op.name, got=f"{v!r} ({type(v).__name__})",
                    expected="a value of this graph, a number or an array",
                )  # fmt: skip
        return tuple(made)

    def _literal(self, value: Any, neighbours: Sequence[Value]) -> Value:
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            holds = ("float", "complex") if isinstance(value, float) else _NUMERIC
            for v in neighbours:  # not always the first operand: that of `where` is the condition
                if v.shape.dtype.kind in holds:
                    return self.constant(value, v.shape.dtype)
        return self.constant(value)

    # -- scopes and origin ---------------------------------------------------------------------

    @contextmanager
    def block(self, name: str) -> Iterator[Graph]:
        """Nodes built inside belong to the block `name`, nested in the blocks around it."""
        outer = self._block
        self._block = f"{outer}.{name}" if outer else name
        try:
            yield self
        finally:
            self._block = outer

    @contextmanager
    def origin(self, origin: Origin) -> Iterator[None]:
        """Nodes built inside have `origin` instead of the caller's line."""
        outer = self.set_origin(origin)
        try:
            yield
        finally:
            self.set_origin(outer)

    def set_origin(self, origin: Origin | None) -> Origin | None:
        """The origin of nodes built from now on, by default the caller's line; returns the one
        before."""
        outer, self._origin = self._origin, origin
        return outer

    # -- results ------------------------------------------------------------------------------

    def set_outputs(self, *values: Any, names: Sequence[str] = ()) -> Graph:
        """What a run returns: values, one list of values, or a mapping of names to values."""
        if len(values) == 1 and isinstance(values[0], Mapping):
            names, values = list(values[0]), tuple(values[0].values())
        flat: list[Value] = []
        for v in values:
            flat.extend(v if isinstance(v, (list, tuple)) else [v])
        for v in flat:
            if not isinstance(v, Value) or v.graph is not self:
                raise InputError("not a value of this graph", where="set_outputs", got=repr(v))
        if names and len(names) != len(flat):
            raise InputError(
                "names and outputs differ in number", got=len(names), expected=len(flat)
            )
        self.outputs = flat
        self.output_names = list(names) or _default_names(flat)
        if len(set(self.output_names)) != len(self.output_names):
            raise NameConflictError("two outputs of one name", got=self.output_names)
        return self

    # -- queries ------------------------------------------------------------------------------

    def sources(self, op: str) -> list[Node]:
        """The `input`, `param` or `state` nodes, in order."""
        return [n for n in self.nodes if n.op.name == op]

    def find(self, name: str) -> Value:
        """The input, param or state of that name."""
        if name not in self._sources:
            raise InputError("no such source", got=name, expected=", ".join(self._sources))
        return self._sources[name].output

    def symbols(self) -> frozenset[str]:
        """Every symbol in shapes, attributes and nested graphs."""
        return symbols_of(self.nodes)

    def users(self) -> dict[Value, list[Node]]:
        """Each value's users, once per operand position; outputs are not users."""
        table: dict[Value, list[Node]] = {v: [] for n in self.nodes for v in n.outputs}
        for node in self.nodes:
            for v in node.inputs:
                table[v].append(node)
        return table

    def structure(self) -> tuple[Any, ...]:
        """The structure as a comparable tuple: ops, edges, names, shapes, outputs."""
        rows = tuple(
            (
                n.op,
                tuple([(v.node.id, v.index) for v in n.inputs]),
                n.name,
                tuple([v.shape for v in n.outputs]),
            )
            for n in self.nodes
        )
        outs = tuple((v.node.id, v.index) for v in self.outputs)
        return (rows, outs, tuple(self.output_names), tuple(sorted(self.dynamic.items())))

    def same_as(self, other: Graph) -> bool:
        """Whether the structures are equal; graph names and node origins do not count."""
        return self.structure() == other.structure()

    def _empty(self) -> Self:
        """A graph of the same kind and name, without nodes."""
        return type(self)(self.name)

    def copy(self) -> Self:
        """A copy with the same nodes, ids, names and origins."""
        return self.rebuild([(n.op, tuple([v.shape for v in n.outputs])) for n in self.nodes])

    def rebuild(self, changed: Iterable[tuple[Op, tuple[Shape, ...]]]) -> Self:
        """A copy with other ops and result shapes, one pair for each node; ids, edges and names
        unchanged."""
        new = self._empty()
        nodes, values = new.nodes, dict[Value, Value]()
        pairs = zip(self.nodes, changed, strict=True)
        for position, (old, (op, shapes)) in enumerate(pairs):
            outputs = old.outputs
            inputs = tuple([values[v] for v in old.inputs])
            node = Node(new, position, op, inputs, old.name, old.origin)
            if len(outputs) == 1 == len(shapes):
                made = values[outputs[0]] = Value(node, 0, shapes[0])
                node.outputs = (made,)
            else:
                node.outputs = tuple([Value(node, i, s) for i, s in enumerate(shapes)])
                values.update(zip(outputs, node.outputs, strict=True))
            nodes.append(node)
            if op.is_source and old.name:
                new._sources[old.name] = node
        new.outputs = [values[v] for v in self.outputs]
        new.output_names = list(self.output_names)
        new.dynamic = dict(self.dynamic)
        if self.given_phases:
            new.given_phases = {nodes[n.id]: p for n, p in self.given_phases.items()}
        return new

    def __len__(self) -> int:
        return len(self.nodes)

    def __iter__(self) -> Iterator[Node]:
        return iter(self.nodes)

    def __repr__(self) -> str:
        return f"<Graph {self.name}: {len(self.nodes)} nodes, {len(self.outputs)} outputs>"


def _default_names(values: Iterable[Value]) -> list[str]:
    names: list[str] = []
    for i, v in enumerate(values):
        name = v.node.name if v.index == 0 else ""
        names.append(name if name and name not in names else f"output_{i}")
    return names
