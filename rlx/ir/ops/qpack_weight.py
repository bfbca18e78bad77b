"""A plain weight becomes a packed one: put in where quantising is asked for, run by `prepare`."""

from __future__ import annotations

from collections.abc import Sequence

from rlx.errors import ShapeError
from rlx.ir.dim import Dim
from rlx.ir.dtype import DType, f32
from rlx.ir.op import Array, Cost, Op, op
from rlx.ir.ops._common import require_float
from rlx.ir.quant import QuantScheme, encode
from rlx.ir.shape import Shape


@op("quantize_weight", group="qpack")
class QuantizeWeight(Op):
    """w [..., N, K] as `dequant_matmul` takes it: packed rows, and scale and zero point where the
    scheme keeps them apart."""

    scheme: QuantScheme

    def infer(self, w: Shape) -> tuple[Shape, ...]:
        require_float(w, "w")
        k = w.dims[-1] if w.rank > 1 else None
        if not isinstance(k, int):
            raise ShapeError("not a weight", got=w, expected="[..., N, K]")
        scheme, outer = self.scheme, w.dims[:-1]
        packed = DType.of(scheme.packed_dtype)
        found = [Shape((*outer, scheme.row_bytes(k) // packed.bytes), packed)]
        groups: tuple[Dim, ...] = (*outer, k // scheme.block if scheme.block else 1)
        if scheme.has_scale:
            found.append(Shape(groups, f32))
        if scheme.zero_point_dtype is not None:
            found.append(Shape(groups, DType.of(scheme.zero_point_dtype)))
        return tuple(found)

    def reference(self, w: Array) -> tuple[Array, ...]:
        return tuple(part for part in encode(self.scheme, w) if part is not None)

    def cost(self, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> Cost:
        moved = inputs[0].size_bytes
        for shape in outputs:
            moved = moved + shape.size_bytes
        return Cost(inputs[0].num_elements * 8, moved)
