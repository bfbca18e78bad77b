"""Backward of norms over the last axis: cotangents of x and of gamma (and beta), summed over rows.

Statistics are computed again from x, which costs less than to load them. A norm of a sum
(`fused_residual_rms_norm`) has a second result, the sum: its cotangent `dsum` is added to dx, and
x is that sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from rlx.errors import ShapeError
from rlx.ir.op import Cost, op
from rlx.ir.ops._common import cast, require_float, require_vector, traffic, wide
from rlx.ir.ops.composite import Composite
from rlx.ir.ops.norm import require_eps
from rlx.ir.shape import Shape

if TYPE_CHECKING:
    from rlx.ir.graph import Graph
    from rlx.ir.node import Value


class RowNormBackward(Composite):
    """(dx, dgamma), and dbeta with `has_beta`; with the element types of x and gamma."""

    eps: float
    has_beta: bool
    centered: ClassVar[bool]  # whether the mean is subtracted

    def check(self) -> None:
        require_eps(self.eps, self.name)

    def check_operands(self, x: Shape, gamma: Shape, dy: Shape, dsum: Shape | None = None) -> None:
        require_float(x, "x")
        if x.rank == 0:
            raise ShapeError("x is a scalar", got=x, expected="[..., C]")
        require_vector(gamma, x.dims[-1], "gamma")
        for shape, what in ((dy, "dy"), (dsum, "dsum")):
            if shape is not None:
                require_float(shape, what)
                if not shape.same_dims(x):
                    raise ShapeError(f"{what} does not fit x", got=shape, expected=x)

    def decompose(
        self, g: Graph, x: Value, gamma: Value, dy: Value, dsum: Value | None = None
    ) -> Any:
        """y = x̂·gamma + beta, x̂ = (x − mean) / σ: dx is what is left of dy·gamma / σ without its
        parts along x̂ and along ones."""

        def mean(v: Any) -> Any:
            return g.mean(v, axis=(-1,), keepdims=True)

        real, cotangent = wide(g, x), wide(g, dy)
        low = g.sub(real, mean(real)) if self.centered else real
        inverse = g.rsqrt(g.add(mean(g.square(low)), self.eps))
        unit = g.mul(low, inverse)
        scaled = g.mul(cotangent, wide(g, gamma))
        dx = g.sub(scaled, g.mul(unit, mean(g.mul(scaled, unit))))
        if self.centered:
            dx = g.sub(dx, mean(scaled))
        dx = g.mul(dx, inverse)
        if dsum is not None:
            dx = g.add(dx, wide(g, dsum))
        outer = tuple(range(x.shape.rank - 1))
        sums = [g.mul(cotangent, unit), *[cotangent] * self.has_beta]
        rows = [g.sum(v, axis=outer) if outer else v for v in sums]
        return (cast(g, dx, x.shape.dtype), *(cast(g, v, gamma.shape.dtype) for v in rows))

    def cost(self, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> Cost:
        return Cost(inputs[0].num_elements * 14, traffic(inputs, outputs))


@op("rms_norm_backward")
class RmsNormBackward(RowNormBackward):
    """(dx, dgamma), and dbeta with `has_beta`, of y = rms_norm(x, gamma); dx + dsum if given."""

    eps: float = 1e-6
    has_beta: bool = False
    centered = False


@op("layer_norm_backward")
class LayerNormBackward(RowNormBackward):
    """(dx, dgamma), and dbeta with `has_beta`, of y = layer_norm(x, gamma); dx + dsum if given."""

    eps: float = 1e-5
    has_beta: bool = False
    centered = True
