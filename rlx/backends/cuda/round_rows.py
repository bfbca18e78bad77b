"""Networks of bf16 or packed weights and many rows: what only products read is written in bf16 at
once.

Tensor cores multiply 16-bit numbers. A norm, a gate or attention whose result is read by products
of such weights alone rounds it itself; sums stay in f32, and so does the residual stream, which the
product in front of a norm adds up. What a graph is given is never rounded. Few rows are not
rounded, unless their results must not depend on how many there are.
"""

from __future__ import annotations

from math import prod
from typing import Any

from rlx.backends.cuda.batch_invariance import is_asked
from rlx.backends.cuda.kernels.gemm.problem import is_product
from rlx.backends.cuda.kernels.qgemm.digits import takes_bytes
from rlx.backends.cuda.lowering import is_multiple
from rlx.ir.dim import upper_bound
from rlx.ir.dtype import bf16, f32
from rlx.ir.graph import Graph
from rlx.ir.node import Node, Value
from rlx.ir.op import Array, Op, lookup, op
from rlx.ir.ops._common import rounded, wide
from rlx.ir.ops.attention import Attention
from rlx.ir.ops.fused import FusedMatMulBiasAct
from rlx.ir.ops.norm import RmsNorm
from rlx.ir.ops.paged import PagedAttention
from rlx.ir.shape import Shape

_EXACT_ROWS = 128  # up to so many memory is the limit, and products of all bits cost nothing
_PACKED = "packed_planes_matmul"
_PRODUCTS = ("matmul", "fused_matmul_bias_act", "fused_swiglu", _PACKED)
_HEADS = (64, 128)  # numbers of a head that attention in 16 bits has kernels for


@op("rounded_rms_norm")
class RoundedRmsNorm(Op):
    """`rms_norm` in bf16."""

    eps: float = 1e-6

    def infer(self, x: Shape, gamma: Shape) -> Shape:
        return x.with_dtype(bf16)

    def reference(self, x: Array, gamma: Array) -> Array:
        return rounded(RmsNorm(eps=self.eps).reference(x, gamma), bf16)


@op("rounded_attention", is_anchor=True)
class RoundedAttention(Attention):
    """`attention` in bf16; queries and weights may be rounded to the type of keys."""

    def infer(self, q: Shape, *others: Shape | None) -> Shape:
        return super().infer(q, *others).with_dtype(bf16)  # type: ignore[arg-type]

    def reference(self, q: Array, *others: Array | None) -> Array:
        return rounded(super().reference(q, *others), bf16)


@op("rounded_paged_attention", is_anchor=True)
class RoundedPagedAttention(PagedAttention):
    """`paged_attention` in bf16; queries and weights may be rounded to 16 bits."""

    def infer(self, q: Shape, *others: Shape | None) -> Shape:
        return super().infer(q, *others).with_dtype(bf16)  # type: ignore[arg-type]

    def reference(self, q: Array, *others: Array | None) -> Array:
        return rounded(super().reference(q, *others), bf16)


@op("wide_matmul", is_anchor=True, holds_weights=True)
class WideMatMul(FusedMatMulBiasAct):
    """`fused_matmul_bias_act` in f32, whatever its operands are."""

    def infer(self, x: Shape, *others: Shape | None) -> Shape:
        return super().infer(x, *others).with_dtype(f32)  # type: ignore[arg-type]

    def decompose(self, g: Graph, x: Value, w: Value, *rest: Value) -> Any:
        return super().decompose(g, wide(g, x), w, *rest)


def round_rows(graph: Graph) -> Graph:
    """Let producers of what products read round it."""
    return _Rounding(graph).run()


class _Rounding:
    def __init__(self, graph: Graph) -> None:
        self.graph, self.users = graph, graph.users()
        self.kept = set(graph.outputs)
        self.known: dict[Value, Value] = {}
        self.order: list[Node] = []
        self.places = {node: i for i, node in enumerate(graph.nodes)}

    def run(self) -> Graph:
        graph = self.graph
        chosen = {v for node in graph.nodes for v in node.outputs[:1] if self._rounds(v)}
        if not chosen:
            return graph
        for node in list(graph.nodes):
            is_chosen = node.outputs[0] in chosen
            reads = bool(node.inputs) and node.inputs[0] in chosen and node.op.name in _PRODUCTS
            node.inputs = tuple([self.known.get(v, v) for v in node.inputs])
            if is_chosen or reads:
                self._replace(node)
            else:
                self.order.append(node)
        graph.nodes = self.order
        graph.outputs = [self.known.get(v, v) for v in graph.outputs]
        for position, node in enumerate(self.order):
            node.id = position
        return graph

    # -- what is rounded --------------------------------------------------------------------------

    def _rounds(self, value: Value) -> bool:
        """Whether a value is made in f32 by a node that can round it, for such products alone."""
        node, users = value.node, self.users.get(value, [])
        if value.dtype is not f32 or value in self.kept or not users or not self._can_round(node):
            return False
        return all(self._reads(user, value) for user in users)

    def _reads(self, node: Node, value: Value) -> bool:
        """Whether a product of many rows reads the value rounded."""
        if node.op.name == _PACKED:
            return self._reads_packed(node, value)
        if node.op.name not in _PRODUCTS or not is_product(node):
            return False
        x, w = node.inputs[:2]
        k, n = w.shape.dims
        rows = upper_bound(prod(x.shape.dims[:-1], start=1), self.graph.live)
        if x is not value or any(v is value for v in node.inputs[1:]):
            return False
        if w.dtype is not bf16 or (rows <= _EXACT_ROWS and not is_asked()):
            return False
        assert isinstance(k, int) and isinstance(n, int)
        if k % 8 or n % 8 or not all(v.dtype in (bf16, f32) for v in node.inputs):
            return False
        return node.op.name != "fused_swiglu" or self._rounds(node.output)

    def _reads_packed(self, node: Node, value: Value) -> bool:
        """The same of packed weights, which the product decodes."""
        record: Any = node.op
        x, rows = node.inputs[0], prod(node.inputs[0].shape.dims[:-1], start=1)
        if x is not value or any(v is value for v in node.inputs[1:]):
            return False
        if is_asked() or not takes_bytes(node):
            return False
        if upper_bound(rows, self.graph.live) <= _EXACT_ROWS:
            return False
        n = node.output.shape.dims[-1]
        return is_multiple(n, 8) and (not record.gate or self._rounds(node.output))

    def _can_round(self, node: Node) -> bool:
        name, record = node.op.name, node.op
        if name == "rms_norm":
            return len(node.inputs) == 2 and all(v.dtype is f32 for v in node.inputs)
        if name == "fused_residual_rms_norm":
            return self._takes_residual(node)
        if name == "attention":
            given: Any = record
            k = node.inputs[1].dtype
            return k.bytes == 2 and given.kv_scheme is None and given.head_dim in _HEADS
        if name == "paged_attention":
            return node.inputs[1].dtype.bytes <= 2
        if name == _PACKED:
            gated: Any = record
            return bool(gated.gate) and not is_asked() and self._rounds_input(node)
        return name == "fused_swiglu" and self._rounds_input(node)

    def _rounds_input(self, node: Node) -> bool:
        """Whether the input of a gated product will be rounded: its result is in bf16 then."""
        x, is_packed = node.inputs[0], node.op.name == _PACKED
        if x.dtype is not f32 or x in self.kept:
            return False
        if not is_packed and node.inputs[1].dtype is not bf16:
            return False
        return self._can_round(x.node) and x.node.op.name not in ("fused_swiglu", _PACKED) and all(
            u is node for u in self.users[x])  # fmt: skip

    def _takes_residual(self, node: Node) -> bool:
        """Whether the product in front of a norm can add the residual."""
        if len(node.inputs) != 3 or any(v.dtype is not f32 for v in node.inputs):
            return False
        x, residual, _ = node.inputs
        product: Any = x.node
        if product.op.name not in ("matmul", "fused_matmul_bias_act") or x in self.kept:
            return False
        if len(self.users[x]) != 1 or not is_product(product):
            return False
        return not getattr(product.op, "has_residual", False) and (
            self.places[residual.node] < self.places[product]
        )

    # -- rewriting --------------------------------------------------------------------------------

    def _replace(self, node: Node) -> None:
        name, old = node.op.name, node.op
        if name == "matmul":
            record: Op = WideMatMul()
        elif name == "fused_matmul_bias_act":
            record = WideMatMul(**old.attributes())
        elif name == "attention":
            record = RoundedAttention(**{**old.attributes(), "coarse": True})
        elif name == "paged_attention":
            record = RoundedPagedAttention(**{**old.attributes(), "coarse": True})
        elif name == "rms_norm":
            record = RoundedRmsNorm(**old.attributes())
        elif name == "fused_swiglu":
            record = old
        elif name == _PACKED:
            given: Any = old
            record = old if given.gate else lookup(_PACKED)(scheme=given.scheme, wide=True)
        else:
            record = RoundedRmsNorm(**old.attributes())
            self._add_residual(node)
        made = self._made(node, record, node.inputs)
        self.known[node.outputs[0]] = made.output
        self.order.append(made)

    def _add_residual(self, node: Node) -> None:
        """Let the product in front of a norm add the residual: it is the norm of one value then."""
        x, residual, gamma = node.inputs
        product, kind = x.node, WideMatMul
        fields = {} if product.op.name == "matmul" else product.op.attributes()
        if product.op.name != "wide_matmul":
            kind = FusedMatMulBiasAct  # type: ignore[assignment]
        product.op = kind(**{**fields, "has_residual": True})
        product.inputs = (*product.inputs, residual)
        self.known[node.outputs[1]] = x
        node.inputs = (x, gamma)

    def _made(self, like: Node, record: Op, inputs: tuple[Value, ...]) -> Node:
        """A node that is not yet in the order."""
        with self.graph.origin(like.origin.touched("round")):
            self.graph.append(record, inputs)
        return self.graph.nodes.pop()
