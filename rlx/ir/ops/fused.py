"""Several ops as one. Everything between operands and results stays in f32 (f64 for f64)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, TypeVar

from rlx.errors import ShapeError
from rlx.ir.attrs import Body
from rlx.ir.dim import Dim, same
from rlx.ir.dtype import DType
from rlx.ir.interp import evaluate
from rlx.ir.op import Array, Cost, Inferred, Op, op
from rlx.ir.ops._common import quiet, require_float, rounded, upcast
from rlx.ir.ops.activation import activate, activation_flops, require_activation
from rlx.ir.ops.control import body_results
from rlx.ir.ops.matmul import MatMul, product_cost, result_type, widened
from rlx.ir.ops.norm import (
    LayerNorm,
    RmsNorm,
    RowNorm,
    affine,
    common_type,
    elementwise_cost,
    require_eps,
    require_gain,
)
from rlx.ir.ops.rope import Rope, check_rotation
from rlx.ir.shape import Shape

_T = TypeVar("_T")


@op("fused_matmul_bias_act")
class FusedMatMulBiasAct(Op):
    """activation(x·w + bias) + residual; bias [N] and residual are there where the flags say so.

    `strassen`: a device may multiply sums of blocks, fewer of them. Results are then as exact as
    the largest numbers of a few rows allow, not each row's own.
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
            require_gain(bias, w.dims[-1], "bias")
        if residual is not None:
            require_float(residual, "residual")
            if not residual.same_dims(out):
                raise ShapeError("residual does not fit the product", got=residual, expected=out)
        return out.with_dtype(result_type(*[s for s in (out, bias, residual) if s is not None]))

    def reference(
        self, x: Array, w: Array, bias: Array | None = None, residual: Array | None = None
    ) -> Array:
        bias, residual = self.extras(bias, residual)
        dtype = common_type(x, w, bias, residual)
        with quiet():
            out = MatMul().reference(*widened(dtype, x, w))
            if bias is not None:
                out = out + widened(dtype, bias)[0]
            out = activate(self.activation, out)
            if residual is not None:
                out = out + widened(dtype, residual)[0]
        return rounded(out, dtype)

    def cost(self, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> Cost:
        product = product_cost(inputs, outputs, inputs[0].dims[-1])
        after = outputs[0].num_elements * (self.has_bias + self.has_residual)
        after = after + activation_flops(self.activation, outputs[0])
        return Cost(product.flops + after, product.bytes)


def _sum_shape(x: Shape, residual: Shape) -> Shape:
    require_float(x, "x")
    require_float(residual, "residual")
    if not x.same_dims(residual):
        raise ShapeError("x and residual differ in shape", got=residual, expected=x)
    return x.with_dtype(result_type(x, residual))


class _ResidualNorm(Op):
    """(norm(x + residual), x + residual)"""

    eps: float
    norm: ClassVar[type[RowNorm]]

    def check(self) -> None:
        require_eps(self.eps, self.name)

    def infer(
        self, x: Shape, residual: Shape, gamma: Shape, beta: Shape | None = None
    ) -> tuple[Shape, Shape]:
        total = _sum_shape(x, residual)
        return self.norm().infer(total, gamma, beta), total

    def reference(
        self, x: Array, residual: Array, gamma: Array, beta: Array | None = None
    ) -> tuple[Array, Array]:
        with quiet():
            total = sum(upcast(x, residual))
            normed = affine(self.norm.scaled(total, self.eps), gamma, beta)
        return (
            rounded(normed, common_type(x, residual, gamma, beta)),
            rounded(total, common_type(x, residual)),
        )

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


@op("fused_swiglu")
class FusedSwiGlu(Op):
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

    def reference(self, x: Array, w_gate: Array, w_up: Array) -> Array:
        dtype = common_type(x, w_gate, w_up)
        x, w_gate, w_up = widened(dtype, x, w_gate, w_up)
        with quiet():
            return rounded(activate(self.activation, x @ w_gate) * (x @ w_up), dtype)

    def cost(self, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> Cost:
        product = product_cost(inputs, outputs, inputs[0].dims[-1] * 2)
        after = outputs[0].num_elements + activation_flops(self.activation, outputs[0])
        return Cost(product.flops + after, product.bytes)


@op("fused_gated_act")
class FusedGatedAct(Op):
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

    def reference(self, joined: Array) -> Array:
        half = joined.shape[-1] // 2
        gate, up = upcast(joined[..., :half], joined[..., half:])
        with quiet():
            return rounded(activate(self.activation, gate) * up, DType.of(joined.dtype))

    def cost(self, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> Cost:
        plain = elementwise_cost(inputs, outputs, 0)
        after = outputs[0].num_elements + activation_flops(self.activation, outputs[0])
        return Cost(after, plain.bytes)


@op("fused_qk_norm_rope")
class FusedQkNormRope(Op):
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
        require_gain(gamma, self.head_dim, "gamma")
        rotated = self.rotation().infer(x, cos, sin, positions)
        return rotated.with_dtype(result_type(x, gamma))

    def reference(
        self, x: Array, gamma: Array, cos: Array, sin: Array, positions: Array | None = None
    ) -> Array:
        dtype = common_type(x, gamma)
        wide, gain = widened(dtype, x, gamma)
        normed = head_norm(wide, gain, self.head_dim, self.eps)
        return rounded(self.rotation().reference(normed, cos, sin, positions), dtype)

    def cost(self, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> Cost:
        x, gamma, *tables = inputs
        turning = self.rotation().cost([x, *tables], outputs)
        return Cost(turning.flops + x.num_elements * 4, turning.bytes + gamma.size_bytes)


def head_norm(x: Array, gamma: Array, head_dim: int, eps: float) -> Array:
    """rms_norm of every head of [..., H*D] or [..., D]."""
    heads = x.reshape(*x.shape[:-1], x.shape[-1] // head_dim, head_dim)
    normed: Array = RmsNorm(eps).reference(heads, gamma).reshape(x.shape)
    return normed


@op("elementwise_region")
class ElementwiseRegion(Op):
    """A nested graph of elementwise, broadcast, reduction, layout and gather ops, run as one."""

    body: Body

    def infer(self, *xs: Shape) -> Inferred:
        results = body_results(self.body, xs, "body")
        if not results:
            raise ShapeError("a region gives at least one result", got=0)
        return results

    def reference(self, *xs: Array) -> tuple[Array, ...]:
        return tuple(evaluate(self.body.graph, xs))

    def cost(self, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> Cost:
        """The arithmetic of the nodes; only operands and results touch memory."""
        work: Dim = 0
        for node in self.body.graph.nodes:
            if not node.op.is_source:
                shapes = [v.shape for v in node.inputs], [v.shape for v in node.outputs]
                work = work + node.op.cost(*shapes).flops
        traffic: Dim = 0
        for shape in (*inputs, *outputs):
            traffic = traffic + shape.size_bytes
        return Cost(work, traffic)
