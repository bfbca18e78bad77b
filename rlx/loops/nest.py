"""A loop nest: iteration spaces, strides and a list of element instructions.

The row axes are parallel: their linear index is divided over the workers. Each row runs any number
of passes over iteration spaces of inner axes. Instructions are in SSA form: one of level ROW has a
value per row, one of level k a value per element of space k. A `Reduce` turns the elements of a
space into a value of the row, so instructions that use its result run in a later pass.
"""

from __future__ import annotations

from rlx.ir.dtype import DType
from rlx.ir.op import Op
from rlx.support.records import dataclass

ROW = -1


@dataclass(frozen=True)
class Arg:
    """A kernel argument, known at run time: number `index` of the kernel."""

    index: int


@dataclass(frozen=True)
class Table:
    """Constant data in the object code, from element `offset` on."""

    data: bytes
    offset: int = 0


Quantity = int | Arg  # a size or stride: a constant of the code, or a kernel argument


@dataclass(frozen=True)
class Strides:
    """The stride of an index along each row axis and each inner axis."""

    rows: tuple[Quantity, ...]
    inner: tuple[Quantity, ...] = ()

    def lane_stride(self, columns: bool) -> Quantity:
        """Stride along the vector axis: the innermost or, with `columns`, the last row axis."""
        strides = self.rows if columns else self.inner
        return strides[-1] if strides else 0


@dataclass(frozen=True)
class Access:
    """The element of a tensor that an instruction loads or stores; strides are in elements.

    `gathered` are (instruction, stride): indices computed from data.
    """

    pointer: Arg | Table
    dtype: DType
    strides: Strides
    gathered: tuple[tuple[int, Quantity], ...] = ()


@dataclass(frozen=True)
class Instruction:
    dtype: DType
    level: int

    @property
    def args(self) -> tuple[int, ...]:
        return ()


@dataclass(frozen=True)
class Load(Instruction):
    access: Access

    @property
    def args(self) -> tuple[int, ...]:
        return tuple(i for i, _ in self.access.gathered)


@dataclass(frozen=True)
class Literal(Instruction):
    """A scalar constant, as the bytes of its element type."""

    data: bytes


@dataclass(frozen=True)
class Iota(Instruction):
    """start + Σ stride · axis, an i64: an index as a value."""

    start: Quantity
    strides: Strides


@dataclass(frozen=True)
class Apply(Instruction):
    """An elementwise op on earlier instructions."""

    record: Op
    operands: tuple[int, ...]

    @property
    def args(self) -> tuple[int, ...]:
        return self.operands


@dataclass(frozen=True)
class BoundsCheck(Instruction):
    """A gathered index as an i64 in 0 … size − 1: negative ones count from the end, one out of
    bounds becomes 0 and is reported."""

    index: int
    size: Quantity

    @property
    def args(self) -> tuple[int, ...]:
        return (self.index,)


@dataclass(frozen=True)
class Reduce(Instruction):
    """A reduction over a space: sum, prod, max, min, any, all, argmax, argmin.

    `position` is the instruction with the element's index, for the last two.
    """

    kind: str
    operand: int
    space: int
    position: int | None = None

    @property
    def args(self) -> tuple[int, ...]:
        return (self.operand,) if self.position is None else (self.operand, self.position)


@dataclass(frozen=True)
class Store:
    level: int
    access: Access
    operand: int


@dataclass(frozen=True)
class BoundsReport:
    """Arguments of the out-of-bounds report: the status address, and the node number to store."""

    address: Arg
    node: Arg


@dataclass(frozen=True)
class Nest:
    rows: tuple[Quantity, ...]
    spaces: tuple[tuple[Quantity, ...], ...]
    code: tuple[Instruction, ...]
    stores: tuple[Store, ...]
    report: BoundsReport | None = None
    tiled: bool = False  # some tensors are contiguous along the last row axis, not the vector axis

    def accesses(self) -> list[Access]:
        loads = [i.access for i in self.code if isinstance(i, Load)]
        return list(dict.fromkeys([*loads, *(s.access for s in self.stores)]))

    @property
    def reduces(self) -> bool:
        return any(isinstance(i, Reduce) for i in self.code)

    @property
    def label(self) -> str:
        """A name for reports: the ops it applies and the reductions it makes."""
        names = [i.record.name for i in self.code if isinstance(i, Apply)]
        names += [i.kind for i in self.code if isinstance(i, Reduce)]
        return f"region({', '.join(list(dict.fromkeys(names))[:6]) or 'copy'})"
