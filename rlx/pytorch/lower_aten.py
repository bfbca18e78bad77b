"""FX to MIR: a graph of ATen ops becomes a `Graph`, node by node.

Sizes, element types and ranks come from the FakeTensors that PyTorch leaves on every node. What is
not a tensor (sizes and arithmetic on them) never becomes a node: it is a dim.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import SymBool, SymFloat, SymInt
from torch._subclasses.fake_tensor import unset_fake_temporarily

from rlx.errors import RlxError, ShapeError, UnsupportedError
from rlx.ir.dim import Dim, Expr
from rlx.ir.dtype import DType
from rlx.ir.graph import Graph
from rlx.ir.node import Value
from rlx.ir.shape import Shape
from rlx.pytorch.aten.table import table
from rlx.pytorch.dlpack_views import as_array
from rlx.pytorch.sizes import SizeTable

SEED = "rng_seed"  # the input that a graph with random ops has besides


def op_name(target: Any) -> str:
    """`add.Tensor` for torch.ops.aten.add.Tensor; other namespaces keep theirs."""
    name = str(target)
    return name.removeprefix("aten.") if name.startswith("aten.") else name


def is_size(value: Any) -> bool:
    """Whether what a node gives is a number of Python's, and no tensor."""
    return isinstance(value, (int, float, SymInt, SymFloat, SymBool))


def is_known(node: Any) -> bool:
    """Whether a node can be part of one of our graphs."""
    if node.op != "call_function":
        return bool(node.op != "call_module")
    value = node.meta.get("val")
    if is_size(value):
        return not isinstance(value, (SymFloat, SymBool))
    if getattr(node.target, "__name__", "") == "getitem":
        return is_known(node.args[0])
    return op_name(node.target) in table()


def missing_ops(nodes: Any) -> list[str]:
    """The ATen ops of a graph that are not in the table, each once."""
    found = [
        op_name(n.target)
        for n in nodes
        if not is_known(n) and getattr(n.target, "__name__", "") != "getitem"
    ]
    return sorted(set(found))


def require_known(nodes: Any, where: str) -> None:
    """Raise an error that lists every op that is missing, at once."""
    missing = missing_ops(nodes)
    if missing:
        raise UnsupportedError(
            "ATen ops that RLX has not", where=where, got=", ".join(missing),
            expected="those of docs/pytorch.md",
            hint="torch.compile(backend='rlx') leaves such ops to PyTorch",
        )  # fmt: skip


class Source(NamedTuple):
    """What a placeholder becomes: an input, a param, a state, or a size."""

    kind: str
    name: str


class Lowering:
    """The graph being built, and what the functions of the table may ask while they build a node.

    `env` has for each FX node a value, a tuple of values, or a dim.
    """

    def __init__(self, name: str, sizes: SizeTable) -> None:
        self.graph, self.sizes = Graph(name), sizes
        self.env: dict[Any, Any] = {}
        self.node: Any = None
        self._latest: dict[Value, str] = {}  # the latest version of each state
        self.in_place: set[Any] = set()  # nodes that may write a state where it is
        self._draws = 0

    # -- what the functions of the table use --------------------------------------------------

    @property
    def g(self) -> Graph:
        return self.graph

    @property
    def out(self) -> Shape:
        """The shape of the result; of the first of several."""
        value = self.node.meta["val"]
        first = value[0] if isinstance(value, (tuple, list)) else value
        return self.sizes.shape(first)

    def outs(self, index: int) -> Shape:
        """The shape of one of several results."""
        return self.sizes.shape(self.node.meta["val"][index])

    def uses(self, index: int) -> bool:
        """Whether anything reads one of several results."""
        return any(u.args[1] == index and u.users for u in self.node.users)

    def dim(self, value: Any) -> Dim:
        return value if isinstance(value, (int, Expr)) else self.sizes.dim(value)

    def dims(self, values: Sequence[Any]) -> tuple[Dim, ...]:
        return tuple([self.dim(v) for v in values])

    def scalar(self, value: Any, dtype: DType) -> Value:
        """A number, or a size, as a tensor without axes."""
        if isinstance(value, Expr):
            return self.g.dim_value(value, dtype=dtype)
        if dtype.kind == "bool":
            value = bool(value)
        elif dtype.is_integer:
            value = int(value)
        return self.g.constant(np.asarray(value).astype(dtype.numpy), dtype)

    def tensor(self, value: Any, dtype: DType | None = None) -> Value:
        """A tensor or number as a value, in an element type."""
        if not isinstance(value, Value):
            return self.scalar(value, dtype or self.out.dtype)
        return self.cast(value, dtype) if dtype is not None else value

    def cast(self, value: Value, dtype: DType) -> Value:
        return value if value.shape.dtype is dtype else self.g.cast(value, dtype)

    def element(self, dtype: Any) -> DType:
        """The element type that a `dtype=` argument names, else that of the result."""
        from rlx.pytorch.element_types import element_of

        return self.out.dtype if dtype is None else element_of(dtype)

    def promoted(self, *positions: int) -> DType:
        """The type in which PyTorch computes on some arguments of the op: that of the tensors with
        axes, widened by those without and by numbers only where their kind is another."""
        from rlx.pytorch.element_types import element_of

        given = [self.node.args[i] for i in positions]
        known = [a.meta["val"] if isinstance(a, torch.fx.Node) else a for a in given]
        known = [1 if isinstance(k, SymInt) else k for k in known]
        return element_of(torch.result_type(*known))

    def full(self, value: Any, shape: Shape) -> Value:
        """A tensor of one number."""
        return self.g.expand(self.scalar(value, shape.dtype), shape=shape.dims)

    def reshape(self, x: Value, dims: Sequence[Dim]) -> Value:
        return x if x.shape.dims == tuple(dims) else self.g.reshape(x, shape=tuple(dims))

    def expand(self, x: Value, dims: Sequence[Dim]) -> Value:
        if x.shape.dims == tuple(dims):
            return x
        for have, wanted in zip(x.shape.dims[::-1], tuple(dims)[::-1], strict=False):
            self.sizes.require_equal(have, wanted)
        return self.g.expand(x, shape=tuple(dims))

    def number(self, value: Any, what: str) -> int:
        """A size that must be a number."""
        dim = self.dim(value)
        if not isinstance(dim, int):
            raise UnsupportedError("a size that must be a number", where=what, got=str(dim))
        return dim

    @property
    def states(self) -> Collection[Value]:
        """The states that the node being built may write in place."""
        return self._latest.keys() if self.node in self.in_place else ()

    def current_states(self) -> Collection[Value]:
        """The latest version of each state."""
        return self._latest.keys()

    def update_state(
        self, state: Value, update: Value, axis: int, start: Dim = 0, slots: Value | None = None
    ) -> Value:
        """The state with slices of an axis written in place."""
        more = () if slots is None else (slots,)
        cast = self.cast(update, state.shape.dtype)
        made = self.g.state_update(state, cast, *more, axis=axis, start=start)
        self._latest[made] = self._latest.pop(state)
        return made

    def seed(self) -> tuple[Value, int]:
        """The seed of this run, u32 [2], and the number of this draw within the graph."""
        self._draws += 1
        if self._draws == 1:
            self._seed = self.graph.input(SEED, (2,), "u32")
        return self._seed, self._draws

    @property
    def is_random(self) -> bool:
        return self._draws > 0

    # -- the walk -----------------------------------------------------------------------------

    def place(self, node: Any, source: Source) -> None:
        """A placeholder as an input, param or state."""
        shape = self.sizes.shape(node.meta["val"])
        made: Value = getattr(self.graph, source.kind)(source.name, shape)
        self.env[node] = made
        if source.kind == "state":
            self._latest[made] = source.name

    def constant(self, node: Any, tensor: Any) -> None:
        """A tensor that the program holds."""
        with unset_fake_temporarily():  # it has elements, unlike the tensors of the trace
            self.env[node] = self.graph.constant(as_array(tensor.detach().contiguous()))

    def call(self, node: Any) -> None:
        """One op, with its result brought to the type that PyTorch says."""
        value = node.meta.get("val")
        if is_size(value):
            self.env[node] = self.sizes.dim(value)
            return
        arguments = torch.fx.map_arg(node.args, self._given)
        named = torch.fx.map_arg(node.kwargs, self._given)
        if getattr(node.target, "__name__", "") == "getitem":
            self.env[node] = arguments[0][arguments[1]]
            return
        build = table()[op_name(node.target)]
        self.node = node
        try:
            made = build(self, *arguments, **named)
        except RlxError as error:
            raise error.located(op_name(node.target), str(node.format_node())[:200]) from None
        except TypeError as error:  # an argument that the function does not know
            raise UnsupportedError(
                "arguments that RLX does not know", where=op_name(node.target),
                got=str(node.format_node())[:200],
            ) from error  # fmt: skip
        self.env[node] = self._fitted(made, value)

    def _given(self, node: Any) -> Any:
        return self.env[node]

    def _fitted(self, made: Any, value: Any) -> Any:
        if isinstance(made, (tuple, list)):
            if not isinstance(value, (tuple, list)):
                return tuple(made)
            pairs = zip(made, value, strict=False)
            return tuple([v if v is None or f is None else self._fitted(v, f) for v, f in pairs])
        expected = self.sizes.shape(value)
        if made.shape.rank != expected.rank:
            raise ShapeError(
                "not the result that PyTorch says", where=op_name(self.node.target),
                got=made.shape, expected=expected,
            )  # fmt: skip
        return self.cast(made, expected.dtype)

    def run(self, nodes: Any, sources: Mapping[Any, Source], attributes: Any = None) -> list[Any]:
        """Lower all nodes; returns what the output node lists, as values, dims or None."""
        for node in nodes:
            if node.op == "placeholder":
                if node in sources:
                    self.place(node, sources[node])
                elif is_size(node.meta.get("val")):
                    self.env[node] = self.sizes.dim(node.meta["val"])
            elif node.op == "get_attr":
                self.constant(node, getattr(attributes, node.target))
            elif node.op == "call_function":
                self.call(node)
            elif node.op == "output":
                return list(torch.fx.map_arg(node.args[0], self._given))
        raise UnsupportedError("a graph without an output", where=self.graph.name)
