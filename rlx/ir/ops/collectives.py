"""Collectives: ops over an axis that `vmap` adds, by its name.

They see one element of the batch, and stand for all of them. Batching resolves them; one whose axis
no `vmap` around it has is an error when the graph is compiled or run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from rlx.errors import AttributeValueError, InputError
from rlx.ir.dim import Dim
from rlx.ir.dtype import bool_, f32, i32
from rlx.ir.op import Array, Op, op
from rlx.ir.ops._common import ANY, REAL, require_dtype
from rlx.ir.shape import Shape, normalize_axis

if TYPE_CHECKING:
    from rlx.ir.graph import Graph
    from rlx.ir.node import Value


class Collective(Op):
    """An op over the mapped axis `axis_name`."""

    is_inlined = True  # before all other passes, so that none sees an axis that nothing maps
    axis_name: str

    def check(self) -> None:
        if not self.axis_name:
            raise AttributeValueError("an axis needs a name", where=self.name, got="''")

    def reference(self, *operands: Array) -> Any:
        self._unresolved()

    def decompose(self, g: Graph, *operands: Value) -> Any:
        self._unresolved()

    def _unresolved(self) -> NoReturn:
        raise InputError(
            "no mapped axis of that name", where=self.name, got=repr(self.axis_name),
            expected="the axis_name of a vmap around it",
            hint=f"map the function that calls it: rlx.vmap(f, axis_name={self.axis_name!r})",
        )  # fmt: skip


@op("psum")
class PSum(Collective):
    """The sum of x over the mapped axis, the same for all its elements."""

    axis_name: str

    def infer(self, x: Shape) -> Shape:
        require_dtype(x, ANY, "operand")
        return x.with_dtype(i32) if x.dtype is bool_ else x


@op("pmean")
class PMean(Collective):
    """The mean of x over the mapped axis; integers give f32."""

    axis_name: str

    def infer(self, x: Shape) -> Shape:
        require_dtype(x, ANY, "operand")
        return x if x.dtype.is_float or x.dtype.is_complex else x.with_dtype(f32)


@op("pmax")
class PMax(Collective):
    """The greatest x over the mapped axis; NaN if there is one."""

    axis_name: str

    def infer(self, x: Shape) -> Shape:
        require_dtype(x, REAL, "operand")
        return x


@op("pmin")
class PMin(Collective):
    """The least x over the mapped axis; NaN if there is one."""

    axis_name: str

    def infer(self, x: Shape) -> Shape:
        require_dtype(x, REAL, "operand")
        return x


@op("all_gather")
class AllGather(Collective):
    """The x of all elements of the mapped axis, whose size is `size`, stacked on a new axis."""

    axis_name: str
    size: Dim
    axis: int = 0

    def infer(self, x: Shape) -> Shape:
        axis = normalize_axis(self.axis, x.rank + 1)
        return x.with_dims((*x.dims[:axis], self.size, *x.dims[axis:]))


@op("axis_index")
class AxisIndex(Collective):
    """The index of the element along the mapped axis, an i32."""

    axis_name: str

    def infer(self) -> Shape:
        return Shape((), i32)
