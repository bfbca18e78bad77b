"""From nodes to steps: the table of lowerings, one per kind of op, that kernel families fill.

    @lowers("matmul")
    def lower_matmul(node: Node, ctx: Context) -> list[Step]: ...

A step is a kernel and the words it reads: pointers to values, sizes, scratch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rlx.codegen.kernel import KernelSpec
from rlx.codegen.target import Target
from rlx.ir.dim import Dim, upper_bound
from rlx.ir.lir import Lir, View, contiguous_strides
from rlx.ir.node import Node, Value
from rlx.passes.views import is_plain, plain_view


@dataclass(frozen=True)
class Pointer:
    """The address of a value's first element, view offset included, plus `shift` elements."""

    value: Value
    shift: Dim = 0


@dataclass(frozen=True)
class Scratch:
    """An address inside the node's scratch memory, `offset` bytes from its start."""

    node: Node
    offset: int = 0


@dataclass(frozen=True)
class Status:
    """The address of an i64 in which a kernel leaves `node.id + 1` when it meets bad data, such as
    an index out of range; the run then raises an error that names the node."""


Word = (
    Pointer | Scratch | Status | Dim
)  # a Dim becomes an i64: a constant, or evaluated with each run


@dataclass
class Step:
    """One call of a kernel by every worker (or by the first alone when `solo`)."""

    spec: KernelSpec
    words: Sequence[Word]
    reads: Sequence[Value] = ()
    writes: Sequence[Value] = ()
    solo: bool = False
    node: Node | None = None
    uses_scratch: bool = False
    flops: Dim = 0
    bytes: Dim = 0
    label: str = field(default="")


class Context:
    """What a lowering may ask about its surroundings."""

    def __init__(self, lir: Lir, target: Target, threads: int) -> None:
        self.lir, self.target, self.threads = lir, target, threads

    def view(self, value: Value) -> View:
        """How the value lies in memory: element offset from its root and strides."""
        slot = self.lir.slots[value]
        return slot.view if slot.view is not None else plain_view(value.shape)

    def strides(self, value: Value) -> tuple[Dim, ...]:
        return self.view(value).strides

    def is_plain(self, value: Value) -> bool:
        """Row-major without gaps."""
        slot = self.lir.slots[value]
        return slot.view is None or is_plain(slot.view, value.shape)

    def upper(self, dim: Dim) -> int:
        """The most a dimension can be."""
        return upper_bound(dim, self.lir.live)


Lowering = Callable[[Node, Context], list[Step]]
Condition = Callable[[Node], bool]
ScratchSize = Callable[[Node, Target, int], int]


@dataclass(frozen=True)
class Entry:
    """How a kind of op becomes native: steps, when it applies, scratch it wants.

    `strided` says whether the kernel reads operands that are strided views; where it does not, a
    copy is put in front of it.
    """

    lower: Lowering
    when: Condition | None = None
    scratch: ScratchSize | None = None
    strided: bool = False


TABLE: dict[str, Entry] = {}


def lowers(
    *kinds: str,
    when: Condition | None = None,
    scratch: ScratchSize | None = None,
    strided: bool = False,
) -> Callable[[Lowering], Lowering]:
    """Register a lowering for op kinds; `when` limits it to nodes it can do."""

    def register(function: Lowering) -> Lowering:
        for kind in kinds:
            TABLE[kind] = Entry(function, when, scratch, strided)
        return function

    return register


__all__ = [
    "TABLE",
    "Context",
    "Entry",
    "Pointer",
    "Scratch",
    "Status",
    "Step",
    "Word",
    "contiguous_strides",
    "lowers",
]
