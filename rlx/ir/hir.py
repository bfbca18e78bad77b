"""HIR: blocks, the way a model author thinks, in a graph of the same make as MIR.

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
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeVar, dataclass_transform

import numpy as np

from rlx.errors import InputError, OptionError, RlxError
from rlx.ir.build import described, install_value_method, record
from rlx.ir.dim import Dim
from rlx.ir.dtype import DType
from rlx.ir.graph import Graph
from rlx.ir.interp import evaluate
from rlx.ir.lowering import FusionPolicy, lower, template
from rlx.ir.methods import BlockMethods
from rlx.ir.node import Value
from rlx.ir.op import Array, Cost, Inferred, Op, lookup, on_register, op
from rlx.ir.origin import caller
from rlx.ir.shape import Shape

PREFIX = "hir."


class Block(Op):
    """Base of every block."""

    is_block = True
    label: ClassVar[str] = ""  # the name without the prefix that sets it apart from the MIR op

    def fusable(self, g: Graph, /, *values: Any) -> Any:
        """Build the block of primitives on `g`; gives its value, or a tuple of them."""
        raise NotImplementedError(self.name)

    def direct(self, g: Graph, /, *values: Any) -> Any:
        """Build the block of fused ops; the primitives where no fused op exists."""
        return self.fusable(g, *values)

    def infer(self, *inputs: Any) -> Inferred:
        """Result shapes: those of the lowering, once per operand shapes."""
        try:
            # the direct lowering first: its ops know best what is wrong with a shape
            made = template(self, tuple(inputs), FusionPolicy.DIRECT)
        except RlxError as e:
            raise self._named(e) from None
        return tuple([v.shape for v in made.outputs])

    def _named(self, error: RlxError) -> RlxError:
        """An error of an op inside, told as one of this block; operands and line are added later"""
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
        """Operands at their places in the signature, None where one was left out."""
        rest = list(operands)
        return [rest.pop(0) if rest and self._present(n) else None for n in self.input_names] + rest

    def operand_names(self, count: int) -> list[str]:
        """What the first `count` operands are called in the signature."""
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
    """A graph of blocks in the making.

    Every block is a method that takes its tensors by position or name, then its attributes:
    `m.linear(x, w, bias=b, activation="gelu")`. Where a block and a MIR op share a name the method
    is the block; every other MIR op is a method too, and `mir` reaches all of them.
    """

    def mir(
        self, op: str | Op, inputs: Any = (), *, name: str = "", shape: object = None, **attrs: Any
    ) -> Any:
        """Any MIR op: its name and attributes, or its record, applied to `inputs`."""
        operands = [inputs] if isinstance(inputs, (Value, np.ndarray)) else list(inputs)
        kind = lookup(op) if isinstance(op, str) else type(op)
        if kind.is_block or kind.is_source:
            raise InputError(
                f"not a MIR op but a {'block' if kind.is_block else 'source'}", where="mir",
                got=kind.name, hint=f"call .{kind.name.removeprefix(PREFIX)}(...)",
            )  # fmt: skip
        if shape is not None and "shape" in kind.fields:  # that of reshape and its like
            attrs["shape"], shape = shape, None
        if isinstance(op, str):
            op = record(kind, attrs)
        elif attrs:
            raise InputError("a record has its attributes", where=op.name, got=list(attrs))
        return self.append(op, operands, name, shape)

    def lower(self, policy: FusionPolicy | str = FusionPolicy.DIRECT) -> Graph:
        """The MIR of this module; the module itself stays as it is."""
        return lower(self, FusionPolicy.of(policy))

    @staticmethod
    def of(graph: Graph) -> HirModule:
        """`graph` as an HIR module: itself, or one of the same nodes."""
        if isinstance(graph, HirModule):
            return graph
        return HirModule(graph.name)._adopt(graph.copy())

    def _adopt(self, graph: Graph) -> HirModule:
        for node in graph.nodes:
            node.graph = self
        self.__dict__.update(graph.__dict__)
        return self

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
            # the usual call needs no sorting out
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
        # an optional tensor is a value, an array or None: numbers and names there are attributes
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
    """The tensors that are there, in order; flags say which of the optional ones those are."""
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
