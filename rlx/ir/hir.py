"""HIR: graphs of blocks (linear, attention, norm, …) and their lowering to MIR.

A block is a record of attributes with two lowerings. `direct` builds fused ops, `fusable` builds
primitives that the passes fuse; both compute the same function. The signature of `fusable` after
the graph is the signature of the block: tensors with a default of None may be left out.

    @block("rms_norm")
    class RmsNorm(Block):
        '''x · rsqrt(mean(x²) + eps) · gamma'''
        eps: float = 1e-6

        def fusable(self, g: Graph, x: Value, gamma: Value) -> Value: ...
        def direct(self, g: Graph, x: Value, gamma: Value) -> Value: ...

An optional tensor that may be absent while a later one is given needs a bool attribute
`has_<tensor>`, which the builder sets.

Lowering replaces each block by the ops of its lowering. A block is lowered once per attributes and
operand shapes, to a template; repeated layers copy the nodes of the template without inference.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, ClassVar, NamedTuple, TypeVar, dataclass_transform

import numpy as np

from rlx.errors import InputError, OptionError, RlxError, VerifyError
from rlx.ir.attrs import Body
from rlx.ir.dim import Dim
from rlx.ir.dtype import DType
from rlx.ir.graph import Graph, described, install_value_method, record
from rlx.ir.interp import evaluate
from rlx.ir.methods import BlockMethods
from rlx.ir.node import UNKNOWN, Node, Origin, Value, caller, infer
from rlx.ir.op import Array, Cost, Inferred, Op, lookup, on_register, op
from rlx.ir.shape import Shape


class FusionPolicy(Enum):
    """How blocks are lowered: DIRECT to fused ops, FUSABLE to primitives that passes fuse."""

    DIRECT = "direct"
    FUSABLE = "fusable"

    @staticmethod
    def of(value: object) -> FusionPolicy:
        """The policy itself, or the one of that name."""
        try:
            return value if isinstance(value, FusionPolicy) else FusionPolicy(str(value).lower())
        except ValueError:
            known = ", ".join(p.value for p in FusionPolicy)
            raise OptionError("unknown fusion policy", got=repr(value), expected=known) from None

    def __str__(self) -> str:
        return self.value


class Template(NamedTuple):
    """A lowered block: its graph and the placeholders of its operands."""

    graph: Graph
    operands: tuple[Value, ...]

    @property
    def nodes(self) -> Sequence[Node]:
        return self.graph.nodes[len(self.operands) :]

    @property
    def outputs(self) -> list[Value]:
        return self.graph.outputs


_templates: dict[tuple[Any, ...], Template] = {}
_MOST_TEMPLATES = 10_000


def template(
    block: Block, shapes: tuple[Shape, ...], policy: FusionPolicy, states: tuple[bool, ...] = ()
) -> Template:
    """The cached lowering of `block`; `states` flags operands that are states, updated in place."""
    key = (block, shapes, policy, states if any(states) else ())
    found = _templates.get(key)
    if found is None:
        if len(_templates) >= _MOST_TEMPLATES:
            _templates.clear()
        found = _templates[key] = _lowered(block, shapes, policy, states)
    return found


def _lowered(
    block: Block, shapes: tuple[Shape, ...], policy: FusionPolicy, states: tuple[bool, ...]
) -> Template:
    g = Graph(block.label)
    names = block.operand_names(len(shapes))
    with g.origin(UNKNOWN):
        operands = []
        for i, (name, shape) in enumerate(zip(names, shapes, strict=True)):
            source = g.state if any(states[i : i + 1]) else g.input
            operands.append(source(name, shape))
        method = block.direct if policy is FusionPolicy.DIRECT else block.fusable
        results = method(g, *block.spread(operands))
    g.set_outputs(*(results if isinstance(results, tuple) else (results,)))
    return Template(g, tuple(operands))


def _require_agreement(block: Block, direct: Template, fusable: Template) -> None:
    got, expected = ([v.shape for v in t.outputs] for t in (direct, fusable))
    agree = len(got) == len(expected) and all(
        a.same_dims(b) and a.dtype is b.dtype for a, b in zip(got, expected, strict=True)
    )
    if not agree:
        raise VerifyError(
            "the two lowerings of a block differ in their results", where=block.label,
            got=f"direct {got}", expected=f"fusable {expected}",
        )  # fmt: skip


def is_state(value: Value) -> bool:
    """Whether a value is a state or the result of a state update."""
    return value.node.op.name in ("state", "state_update")


def lower(
    graph: Graph, policy: FusionPolicy = FusionPolicy.DIRECT, starts: list[int] | None = None
) -> Graph:
    """Lower an HIR graph, subgraphs included, to MIR; names, order and outputs are kept. `starts`
    gets the id of the first node that each node of `graph` became."""
    return _Lowering(graph, policy, starts).run()


def has_blocks(graph: Graph) -> bool:
    """Whether a graph has blocks, or subgraphs, which may have some: without, it is MIR already."""
    ops = {id(n.op): n.op for n in graph.nodes}.values()
    return any(op.is_block or _nests(op) for op in ops)


class _Lowering:
    def __init__(self, graph: Graph, policy: FusionPolicy, starts: list[int] | None) -> None:
        self.graph, self.policy, self.starts = graph, policy, [] if starts is None else starts
        self.new = Graph(graph.name)
        self.values: dict[Value, Value] = {}
        self.constants: dict[Op, Value] = {}  # of lowered blocks, deduplicated
        self.bodies: dict[Body, Body] = {}

    def run(self) -> Graph:
        new = self.new
        for node in self.graph.nodes:
            self.starts.append(len(new.nodes))
            if node.op.is_block:
                results: Sequence[Value] = self._instantiate(node)
            else:
                results = self._copy(node)
            for old, value in zip(node.outputs, results, strict=True):
                self.values[old] = value
        new.outputs = [self.values[v] for v in self.graph.outputs]
        new.output_names = list(self.graph.output_names)
        new.dynamic = dict(self.graph.dynamic)
        return new

    def _copy(self, node: Node) -> Sequence[Value]:
        """Copy a node that is not a block."""
        inputs = tuple([self.values[v] for v in node.inputs])
        op = self._with_lowered_bodies(node.op)
        # equal dims may have another form after lowering: `rows` for `batch * seq`
        results = self._add(
            op, inputs, infer(op, tuple([v.shape for v in inputs])), node.name, node.origin
        )
        if op.is_source and node.name:
            self.new._sources[node.name] = results[0].node
        return results

    def _add(
        self, op: Op, inputs: tuple[Value, ...], shapes: Sequence[Shape], name: str, origin: Origin
    ) -> tuple[Value, ...]:
        node = Node(self.new, len(self.new.nodes), op, inputs, name, origin)
        node.outputs = tuple([Value(node, i, s) for i, s in enumerate(shapes)])
        self.new.nodes.append(node)
        return node.outputs

    def _instantiate(self, block_node: Node) -> list[Value]:
        """Copy the nodes of the block's template onto the operands of the block."""
        block: Any = block_node.op
        operands = [self.values[v] for v in block_node.inputs]
        shapes = tuple([v.shape for v in operands])
        states = tuple(map(is_state, operands))
        made = template(block, shapes, self.policy, states)
        if self.policy is FusionPolicy.DIRECT and any(states):  # inference knows of no states
            _require_agreement(block, made, template(block, shapes, FusionPolicy.FUSABLE, states))
        origin = _inside(block_node.origin, block.label)
        values = dict(zip(made.operands, operands, strict=True))
        first = made.outputs[0]
        for node in made.nodes:
            if node.op.name == "constant":
                results: tuple[Value, ...] = (self._constant(node, origin),)
            else:
                name = block_node.name if first.node is node and first.index == 0 else ""
                inputs = tuple([values[v] for v in node.inputs])
                results = self._add(node.op, inputs, [v.shape for v in node.outputs], name, origin)
            for old, value in zip(node.outputs, results, strict=True):
                values[old] = value
        return [values[v] for v in made.outputs]

    def _constant(self, node: Node, origin: Origin) -> Value:
        found = self.constants.get(node.op)
        if found is None:
            (found,) = self._add(node.op, (), [node.output.shape], "", origin)
            self.constants[node.op] = found
        return found

    def _with_lowered_bodies(self, op: Op) -> Op:
        changes = {}
        for field in op.fields:
            body = getattr(op, field)
            if isinstance(body, Body) and self._lowered_body(body) is not body:
                changes[field] = self._lowered_body(body)
        return op.replace(**changes) if changes else op

    def _lowered_body(self, body: Body) -> Body:
        found = self.bodies.get(body)
        if found is None:
            found = Body(lower(body.graph, self.policy)) if has_blocks(body.graph) else body
            self.bodies[body] = found
        return found


def _nests(op: Op) -> bool:
    return any(isinstance(getattr(op, f), Body) for f in op.fields)


def _inside(origin: Origin, block: str) -> Origin:
    """The origin of a node of a lowered block: one level below the block's own."""
    path = f"{origin.block}.{block}" if origin.block else block
    return origin._replace(block=path).touched("lower_hir")


PREFIX = "hir."


class Block(Op):
    """Base of every block."""

    is_block = True
    label: ClassVar[str] = ""  # the name without the prefix that distinguishes it from the MIR op

    def fusable(self, g: Graph, /, *values: Any) -> Any:
        """Build the block from primitives on `g`; returns a value or a tuple of values."""
        raise NotImplementedError(self.name)

    def direct(self, g: Graph, /, *values: Any) -> Any:
        """Build the block from fused ops; by default from primitives."""
        return self.fusable(g, *values)

    def infer(self, *inputs: Any) -> Inferred:
        """Result shapes, from the lowering."""
        try:
            # the direct lowering first: its ops have the best error messages
            made = template(self, inputs, FusionPolicy.DIRECT)
            _require_agreement(self, made, template(self, inputs, FusionPolicy.FUSABLE))
        except RlxError as e:
            raise self._named(e) from None
        return tuple([v.shape for v in made.outputs])

    def _named(self, error: RlxError) -> RlxError:
        """An error of an op inside, reported as one of this block."""
        what, where = error.what, error.where
        if where.partition(".")[0] != self.label:
            what, where = f"{what} (in its {where})" if where else what, self.label
        return type(error)(
            what, where=where, got=error.got, expected=error.expected, hint=error.hint
        )

    def reference(self, *inputs: Array) -> Any:
        shapes = tuple([Shape(a.shape, DType.of(a.dtype)) for a in inputs])
        made = template(self, shapes, FusionPolicy.FUSABLE)
        results = evaluate(made.graph, inputs)
        return results[0] if len(results) == 1 else tuple(results)

    def cost(self, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> Cost:
        flops: Dim = 0
        traffic: Dim = 0
        for node in template(self, tuple(inputs), FusionPolicy.DIRECT).nodes:
            if not node.op.is_source:
                cost = node.op.cost([v.shape for v in node.inputs], [v.shape for v in node.outputs])
                flops, traffic = flops + cost.flops, traffic + cost.bytes
        return Cost(flops, traffic)

    def spread(self, operands: Sequence[Any]) -> list[Any]:
        """Operands by position in the signature, None for absent ones."""
        rest = list(operands)
        return [rest.pop(0) if rest and self._present(n) else None for n in self.input_names] + rest

    def operand_names(self, count: int) -> list[str]:
        """Names of the first `count` operands in the signature."""
        names = [n for n in self.input_names if self._present(n)]
        return [*names, *(f"x{i}" for i in range(len(names), count))][:count]

    def _present(self, tensor: str) -> bool:
        return bool(getattr(self, f"has_{tensor}", True))


_T = TypeVar("_T", bound=type)


@dataclass_transform(frozen_default=True)
def block(name: str, **traits: Any) -> Callable[[_T], _T]:
    """Make a class a block record and a builder method `name` of HIR modules."""

    def wrap(cls: _T) -> _T:
        record: Any = cls
        taken = REGISTERED.get(name)
        if taken is not None:
            raise OptionError("a block of that name exists", got=name, hint="choose another name")
        signature = inspect.signature(record.fusable)
        self_, _, *tensors = signature.parameters.values()

        def infer(self: Any, *inputs: Any) -> Inferred:
            return Block.infer(self, *inputs)

        infer.__signature__ = signature.replace(parameters=[self_, *tensors])  # type: ignore[attr-defined]
        record.infer, record.label = infer, name
        return op(PREFIX + name, **traits)(cls)

    return wrap


class HirModule(BlockMethods, Graph):
    """An HIR graph and its builder.

    Every block is a method that takes its tensors by position or name, then its attributes:
    `m.linear(x, w, bias=b, activation="gelu")`. Where a block and a MIR op share a name the method
    is the block; every other MIR op is a method too, and `mir` reaches all of them.
    """

    def __init__(
        self, name: str = "graph", fusion_policy: FusionPolicy | str = FusionPolicy.DIRECT
    ) -> None:
        super().__init__(name)
        self.fusion_policy = FusionPolicy.of(fusion_policy)  # what `lower` makes of blocks

    def _empty(self) -> HirModule:
        return HirModule(self.name, self.fusion_policy)

    def mir(
        self, op: str | Op, inputs: Any = (), *, name: str = "", shape: object = None, **attrs: Any
    ) -> Any:
        """Build any MIR op, given its name and attributes or its record."""
        operands = [inputs] if isinstance(inputs, (Value, np.ndarray)) else list(inputs)
        cls = lookup(op) if isinstance(op, str) else type(op)
        if cls.is_block or cls.is_source:
            raise InputError(
                f"not a MIR op but a {'block' if cls.is_block else 'source'}", where="mir",
                got=cls.name, hint=f"call .{cls.name.removeprefix(PREFIX)}(...)",
            )  # fmt: skip
        if shape is not None and "shape" in cls.fields:  # an attribute of reshape and the like
            attrs["shape"], shape = shape, None
        if isinstance(op, str):
            op = record(cls, attrs)
        elif attrs:
            raise InputError("a record has its attributes", where=op.name, got=list(attrs))
        return self.append(op, operands, name, shape)

    def lower(self, policy: FusionPolicy | str | None = None) -> Graph:
        """The MIR of this module, by default under its own policy; the module stays as it is."""
        return lower(self, self.fusion_policy if policy is None else FusionPolicy.of(policy))

    @staticmethod
    def of(graph: Graph) -> HirModule:
        """`graph` as an HIR module: itself, or one of the same nodes."""
        if isinstance(graph, HirModule):
            return graph
        made = HirModule(graph.name)
        made.__dict__.update(graph.copy().__dict__)
        for node in made.nodes:
            node.graph = made
        return made

    def __repr__(self) -> str:
        return f"<HirModule {self.name}: {len(self.nodes)} nodes, {len(self.outputs)} outputs>"


REGISTERED: dict[str, type[Block]] = {}


def _install(cls: type[Op]) -> None:
    if issubclass(cls, Block):
        REGISTERED[cls.label] = cls
        setattr(BlockMethods, cls.label, _method(cls))
        install_value_method(cls.label, cls)


def _method(cls: type[Block]) -> Callable[..., Any]:
    required, most, names = cls.num_required, len(cls.input_names), set(cls.input_names)
    flagged = any(f.startswith("has_") for f in cls.fields)

    def build(
        self: HirModule, *args: Any, name: str = "", shape: object = None, **given: Any
    ) -> Any:
        try:
            plain = required <= len(args) <= most and not flagged and names.isdisjoint(given)
            # fast path
            usual = plain and {*map(type, args)} == {Value}
            operands, attributes = (args, given) if usual else _arguments(cls, args, given)
            made = record(cls, attributes)
        except RlxError as e:
            e.where = e.where.removeprefix(PREFIX)
            raise e.located(cls.label, caller(self._block, 2)) from None
        return self.append(made, operands, name, shape)

    build.__name__, build.__doc__ = cls.label, described(cls.label, cls)
    return build


def _arguments(
    cls: type[Block], args: Sequence[Any], given: dict[str, Any]
) -> tuple[Sequence[Any], dict[str, Any]]:
    """Positional and named arguments as (operands, attributes)."""
    tensors: dict[str, Any] = {}
    rest = list(args)
    for i, tensor in enumerate(cls.input_names):
        # optional tensors are values, arrays or None; numbers and strings are attributes
        if not rest or (i >= cls.num_required and not _is_tensor(rest[0])):
            break
        tensors[tensor] = rest.pop(0)
    attributes = dict(given)
    for tensor in cls.input_names:
        if tensor in attributes:
            if tensor in tensors:
                raise InputError("given twice", got=tensor)
            tensors[tensor] = attributes.pop(tensor)
    if cls.variadic:
        raise OptionError("a block takes a fixed list of tensors", got=cls.label)
    fields = [f for f in cls.fields if not f.startswith("has_")]
    if len(rest) > len(fields):
        raise InputError("too many arguments", got=len(args), expected=_usage(cls))
    for field, value in zip(fields, rest, strict=False):
        if field in attributes:
            raise InputError("given twice", got=field)
        attributes[field] = value
    return _operands(cls, tensors, attributes), attributes


def _operands(cls: type[Block], tensors: dict[str, Any], attributes: dict[str, Any]) -> list[Any]:
    """The given tensors in order; sets the `has_…` flags of optional ones."""
    operands: list[Any] = []
    absent = ""
    for i, tensor in enumerate(cls.input_names):
        value = tensors.get(tensor)
        if f"has_{tensor}" in cls.fields:
            attributes[f"has_{tensor}"] = value is not None
        elif value is None:
            absent = absent or tensor
        if value is None and i < cls.num_required:
            raise InputError("missing tensor", got=f"no {tensor}", expected=_usage(cls))
        if value is not None:
            if absent and f"has_{tensor}" not in cls.fields:
                raise InputError(f"{tensor} needs {absent}", got=f"{tensor} alone")
            operands.append(value)
    return operands


def _is_tensor(value: object) -> bool:
    return value is None or isinstance(value, (Value, np.ndarray, np.generic))


def _usage(cls: type[Block]) -> str:
    tensors = [n if i < cls.num_required else f"{n}=None" for i, n in enumerate(cls.input_names)]
    fields = [f for f in cls.fields if not f.startswith("has_")]
    return f"{cls.label}({', '.join([*tensors, *fields])})"


on_register(_install)
