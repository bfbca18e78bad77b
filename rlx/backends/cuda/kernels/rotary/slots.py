"""Rows of a state that are written at slots, each by a warp."""

from __future__ import annotations

from collections.abc import Sequence

from rlx.backends.cuda.append import Append
from rlx.backends.cuda.builder import WARP, BlockFunction
from rlx.backends.cuda.lowering import KernelArg
from rlx.backends.kernel_args import NodeNumber, Pointer, Status
from rlx.ir.node import Node
from rlx.llvm.builder import Value, i32, i64

ARGS = "status, error number, slots, slots of the state"


def slot_args(node: Node, append: Append | None) -> list[KernelArg]:
    slots = None if append is None else append.slots
    if append is None or slots is None:
        return [Status(), NodeNumber(node), 0, 0]
    return [Status(), NodeNumber(append.node), Pointer(slots), append.limit]


class Slots:
    def __init__(self, f: BlockFunction, args: Value, first: int, used: bool) -> None:
        """`first` is the number of the first of the args; without `used` tokens are their own
        slots."""
        self.f, self.used = f, used
        self.status, self.node = f.arg(args, first), f.arg(args, first + 1, i64)
        self.slots, self.limit = f.arg(args, first + 2), f.arg(args, first + 3, i64)

    def report(self) -> None:
        self.f.store(self.node, self.status)

    def place(self, token: Value, tokens: Value) -> tuple[Value, Value | None, Value | None]:
        """The slot of a token, whether there is such a one, and whether no later token has it:
        of equal slots the last one wins."""
        f = self.f
        if not self.used:
            return token, None, None
        slot = f.load(f.gep(self.slots, token, 4), i32)

        def count(i: Value, found: Value) -> Sequence[Value]:
            same = f.load(f.gep(self.slots, i, 4), i32).eq(slot)
            return [found + same.to(i32, signed=False)]

        first = token + 1 + f.lane32().to(i64)
        [later] = f.loop(first, tokens, WARP, [f.i32(0)], count)
        wide = slot.to(i64)
        return wide, wide.ult(self.limit), f.warp_sum(later).eq(0)
