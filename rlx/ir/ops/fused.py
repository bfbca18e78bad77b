"""Fused ops. Intermediate values stay in f32 (f64 for f64).

Each op checks its operands and has a decomposition; reference and cost derive from that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from rlx.errors import ShapeError
from rlx.ir.attrs import Body
from rlx.ir.dim import Dim, same
from rlx.ir.op import Cost, Inferred, op
from rlx.ir.ops._common import activate, cast, require_float, require_vector, result_type, wide
from rlx.ir.ops.attention import by_head
from rlx.ir.ops.composite import Composite, graph_flops, traffic
from rlx.ir.ops.control import body_results
from rlx.ir.ops.elementwise import require_activation
from rlx.ir.ops.matmul import MatMul
from rlx.ir.ops.norm import (
    LayerNorm,
    RmsNorm,
    RowNorm,
    affine,
    elementwise_cost,
    require_eps,
    rms_scaled,
)
from rlx.ir.ops.rope import Rope, check_rotation
from rlx.ir.shape import Shape

if TYPE_CHECKING:
    from rlx.ir.graph import Graph
    from rlx.ir.node import Value

_T = TypeVar("_T")


@op("fused_matmul_bias_act", is_anchor=True, runs_in_low_precision=True, holds_weights=True)
class FusedMatMulBiasAct(Composite):
    """activation(x·w + bias) + residual; bias [N] and residual are there where the flags say so.

    `strassen` lets a device use Strassen's algorithm. The error of a result is then relative to the
    largest values of several rows, not of its own row.
    """

    activation: str = "none"
    has_bias: bool = False
    has_residual: bool = False
    strassen: bool = False

    def check(self) -> None:
        require_activation(self.activation, self.name)

    def extras(self, *given: _T | None) -> tuple[_T | None, _T | None]:
        """The operands after w as (bias, residual): absent ones leave no gap."""
        there = [t for t in given if t is not None]
        if len(there) != self.has_bias + self.has_residual:
            raise ShapeError(
                "operands and flags disagree", where=self.name, got=f"{len(there)} after w",
                expected=f"has_bias={self.has_bias}, has_residual={self.has_residual}",
                hint="set has_bias / has_residual for the operands that are given",
            )  # fmt: skip
        bias = there[0] if self.has_bias else None
        return bias, there[-1] if self.has_residual else None

    def infer(
        self, x: Shape, w: Shape, bias: Shape | None = None, residual: Shape | None = None
    ) -> Shape:
        bias, residual = self.extras(bias, residual)
        require_float(x, "x")
        require_float(w, "w")
        out = MatMul().infer(x, w)
        if bias is not None:
            if w.rank < 2:
                raise ShapeError("w has no output channels", got=w, expected="[..., K, N]")
            require_vector(bias, w.dims[-1], "bias")
        if residual is not None:
            require_float(residual, "residual")
            if not residual.same_dims(out):
                raise ShapeError("residual does not fit the matmul", got=residual, expected=out)
        return out.with_dtype(result_type(out, bias, residual))

    def decompose(self, g: Graph, x: Value, w: Value, *rest: Value) -> Any:
        bias, residual = self.extras(*rest)
        result = result_type(x, w, *rest)
        y = g.matmul(wide(g, x), wide(g, w))
        if bias is not None:
            y = g.add(y, wide(g, bias))
        y = activate(g, y, self.activation)
        if residual is not None:
            y = g.add(y, wide(g, residual))
        return cast(g, y, result)


def _sum_shape(x: Shape, residual: Shape) -> Shape:
    require_float(x, "x")
    require_float(residual, "residual")
    if not x.same_dims(residual):
        raise ShapeError("x and residual differ in shape", got=residual, expected=x)
    return x.with_dtype(result_type(x, residual))


class _ResidualNorm(Composite):
    """(norm(x + residual), x + residual)"""

    runs_as_region = True
    eps: float
    norm: ClassVar[type[RowNorm]]

    def check(self) -> None:
        require_eps(self.eps, self.name)

    def infer(
        self, x: Shape, residual: Shape, gamma: Shape, beta: Shape | None = None
    ) -> tuple[Shape, Shape]:
        total = _sum_shape(x, residual)
        return self.norm().infer(total, gamma, beta), total

    def decompose(
        self, g: Graph, x: Value, residual: Value, gamma: Value, beta: Value | None = None
    ) -> Any:
        total = g.add(wide(g, x), wide(g, residual))
        y = affine(g, self.norm.scaled(g, total, self.eps), gamma, beta)
        summed = result_type(x, residual)
        return cast(g, y, result_type(x, residual, gamma, beta)), cast(g, total, summed)

    def cost(self, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> Cost:
        return elementwise_cost(inputs, outputs, self.norm.work + 1)


@op("fused_residual_rms_norm")
class FusedResidualRmsNorm(_ResidualNorm):
    """(rms_norm(x + residual) · gamma (+ beta), x + residual)"""

    eps: float = 1e-6
    norm = RmsNorm


@op("fused_residual_layer_norm")
class FusedResidualLayerNorm(_ResidualNorm):
    """(layer_norm(x + residual) · gamma (+ beta), x + residual)"""

    eps: float = 1e-5
    norm = LayerNorm


@op("fused_swiglu", runs_in_low_precision=True, holds_weights=True)
class FusedSwiGlu(Composite):
    """activation(x · w_gate) * (x · w_up)"""

    activation: str = "silu"

    def check(self) -> None:
        require_activation(self.activation, self.name)

    def infer(self, x: Shape, w_gate: Shape, w_up: Shape) -> Shape:
        for shape, what in ((x, "x"), (w_gate, "w_gate"), (w_up, "w_up")):
            require_float(shape, what)
        if not w_gate.same_dims(w_up):
            raise ShapeError("w_gate and w_up differ in shape", got=w_gate, expected=w_up)
        return MatMul().infer(x, w_up).with_dtype(result_type(x, w_gate, w_up))

    def decompose(self, g: Graph, x: Value, w_gate: Value, w_up: Value) -> Any:
        result = result_type(x, w_gate, w_up)
        x, w_gate, w_up = (wide(g, v) for v in (x, w_gate, w_up))
        gate = activate(g, g.matmul(x, w_gate), self.activation)
        return cast(g, g.mul(gate, g.matmul(x, w_up)), result)


@op("fused_gated_act", runs_as_region=True)
class FusedGatedAct(Composite):
    """activation(first half of the last axis) * second half: [..., 2N] -> [..., N]"""

    activation: str = "silu"

    def check(self) -> None:
        require_activation(self.activation, self.name)

    def infer(self, joined: Shape) -> Shape:
        require_float(joined, "joined")
        half: Dim = joined.dims[-1] // 2 if joined.rank else 0
        if not joined.rank or not same(half * 2, joined.dims[-1]):
            raise ShapeError("the last axis has no two halves", got=joined, expected="[..., 2*N]")
        return joined.with_dims((*joined.dims[:-1], half))

    def decompose(self, g: Graph, joined: Value) -> Any:
        axis = joined.shape.rank - 1
        half = joined.shape.dims[axis] // 2
        gate, up = (g.narrow(joined, axis=axis, start=s, length=half) for s in (0, half))
        y = g.mul(activate(g, wide(g, gate), self.activation), wide(g, up))
        return cast(g, y, joined.shape.dtype)


@op("fused_qk_norm_rope")
class FusedQkNormRope(Composite):
    """rope(rms_norm of each head · gamma [head_dim]); operands and layouts as for rope."""

    head_dim: int
    n_rot: int = 0
    interleaved: bool = False
    offset: Dim = 0
    eps: float = 1e-6
    layout: str = "bshd"

    def check(self) -> None:
        require_eps(self.eps, self.name)
        check_rotation(self.head_dim, self.n_rot, self.offset, self.layout, self.name)

    def rotation(self) -> Rope:
        return Rope(self.head_dim, self.n_rot, self.interleaved, self.offset, self.layout)

    def infer(
        self, x: Shape, gamma: Shape, cos: Shape, sin: Shape, positions: Shape | None = None
    ) -> Shape:
        require_vector(gamma, self.head_dim, "gamma")
        rotated = self.rotation().infer(x, cos, sin, positions)
        return rotated.with_dtype(result_type(x, gamma))

    def decompose(
        self, g: Graph, x: Value, gamma: Value, cos: Value, sin: Value,
        positions: Value | None = None,
    ) -> Any:  # fmt: skip
        heads = by_head(g, wide(g, x), self.head_dim)
        normed = affine(g, rms_scaled(g, heads, self.eps), gamma, None)
        y = self.rotation().rotate(g, normed, cos, sin, positions)
        return cast(g, g.reshape(y, shape=x.shape.dims), result_type(x, gamma))

    def cost(self, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> Cost:
        x, gamma, *tables = inputs
        rotation = self.rotation().cost([x, *tables], outputs)
        return Cost(rotation.flops + x.num_elements * 4, rotation.bytes + gamma.size_bytes)


@op("elementwise_region")
class ElementwiseRegion(Composite):
    """A subgraph of elementwise, broadcast, reduction, layout and gather ops, run as one kernel."""

    body: Body

    def infer(self, *xs: Shape) -> Inferred:
        results = body_results(self.body, xs, "body")
        if not results:
            raise ShapeError("a region has at least one result", got=0)
        return results

    def decompose(self, g: Graph, *xs: Value) -> Any:
        """The nodes of the region, one by one."""
        given = iter(xs)
        values: dict[Value, Value] = {}
        for node in self.body.graph.nodes:
            if node.op.name == "input":
                values[node.output] = next(given)
                continue
            new = g.append_node(node.op, [values[v] for v in node.inputs])
            values.update(zip(node.outputs, new.outputs, strict=True))
        return tuple([values[v] for v in self.body.graph.outputs])

    def cost(self, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> Cost:
        """The FLOPs of the nodes, casts included; only operands and results touch memory."""
        return Cost(graph_flops(self.body.graph), traffic(inputs, outputs))
