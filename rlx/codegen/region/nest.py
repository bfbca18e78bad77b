"""What a region kernel does, as loops see it: sizes, strides and a list of element instructions.

A nest has row axes, walked together as one counter that is divided over the workers, and for each
row any number of passes over a space of inner axes. Instructions are numbered; one of level ROW has
one value per row, one of level k a value per element of space k. A `Fold` takes elements of a space
to a value of the row, so instructions that use its result come in a later pass.
"""

from __future__ import annotations

from rlx.ir.dtype import DType
from rlx.ir.op import Op
from rlx.support.records import dataclass

ROW = -1


@dataclass(frozen=True)
class Arg:
    """A number that comes with each run: arg `index` of the kernel."""

    index: int


@dataclass(frozen=True)
class Table:
    """A tensor known now, as bytes in the code; `shift` elements from its start."""

    data: bytes
    shift: int = 0


Quantity = int | Arg


@dataclass(frozen=True)
class Steps:
    """An index that moves with the loops: so much per step of each row axis and inner axis."""

    rows: tuple[Quantity, ...]
    inner: tuple[Quantity, ...] = ()

    def between_lanes(self, columns: bool) -> Quantity:
        """How far apart lanes are, along the innermost axis or, in columns, the last row axis."""
        steps = self.rows if columns else self.inner
        return steps[-1] if steps else 0


@dataclass(frozen=True)
class Walk:
    """A tensor and the element that an instruction touches, strides counted in elements.

    `terms` are (instruction, stride): indices that are data.
    """

    pointer: Arg | Table
    dtype: DType
    steps: Steps
    terms: tuple[tuple[int, Quantity], ...] = ()


@dataclass(frozen=True)
class Instruction:
    dtype: DType
    level: int

    @property
    def args(self) -> tuple[int, ...]:
        return ()


@dataclass(frozen=True)
class Load(Instruction):
    walk: Walk

    @property
    def args(self) -> tuple[int, ...]:
        return tuple(i for i, _ in self.walk.terms)


@dataclass(frozen=True)
class Literal(Instruction):
    """A number known now, as the bytes of its element type."""

    data: bytes


@dataclass(frozen=True)
class Count(Instruction):
    """start + steps, an i64."""

    start: Quantity
    steps: Steps


@dataclass(frozen=True)
class Apply(Instruction):
    """An elementwise op of earlier instructions."""

    record: Op
    operands: tuple[int, ...]

    @property
    def args(self) -> tuple[int, ...]:
        return self.operands


@dataclass(frozen=True)
class Checked(Instruction):
    """An index counted from 0 as an i64: a negative one counts from the end of `size`, one outside
    becomes 0 and is reported."""

    index: int
    size: Quantity

    @property
    def args(self) -> tuple[int, ...]:
        return (self.index,)


@dataclass(frozen=True)
class Fold(Instruction):
    """All elements of a space taken together: sum, prod, max, min, any, all, argmax, argmin.

    `place` is the instruction that counts positions, for the last two.
    """

    kind: str
    operand: int
    space: int
    place: int | None = None

    @property
    def args(self) -> tuple[int, ...]:
        return (self.operand,) if self.place is None else (self.operand, self.place)


@dataclass(frozen=True)
class Store:
    level: int
    walk: Walk
    operand: int


@dataclass(frozen=True)
class Report:
    """Where an index out of range is reported: the arg of the address, and of what to leave."""

    address: Arg
    node: Arg


@dataclass(frozen=True)
class Nest:
    rows: tuple[Quantity, ...]
    spaces: tuple[tuple[Quantity, ...], ...]
    code: tuple[Instruction, ...]
    stores: tuple[Store, ...]
    report: Report | None = None
    tiled: bool = False  # some tensors lie along the last row axis, not along the lanes

    def walks(self) -> list[Walk]:
        loads = [i.walk for i in self.code if isinstance(i, Load)]
        return list(dict.fromkeys([*loads, *(s.walk for s in self.stores)]))

    @property
    def folds(self) -> bool:
        return any(isinstance(i, Fold) for i in self.code)
