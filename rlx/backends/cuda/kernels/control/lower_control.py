"""Lowering of cond, while_loop and scan: launches of their subgraphs, jumps that the host takes.

The host knows how often a scan runs: it queues the launches of an iteration so often, and waits for
nothing. For a branch, and for each test of a loop, it waits for one flag. A header goes before each
iteration: it counts, and updates the args of launches that change, which are addresses of slices
and of carried values, which are double-buffered.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from rlx.backends.cuda.kernels.control.loop_kernels import (
    COPY_BLOCKS,
    CopyResults,
    LoopHeader,
    TellFlag,
)
from rlx.backends.cuda.kernels.control.subgraphs import (
    ArgUpdate,
    InductionPointer,
    Location,
    Subgraph,
    bodies,
    has_kernels,
    plan_subgraph,
)
from rlx.backends.cuda.kernels.gemm.problem import ALIGNMENT, is_aligned
from rlx.backends.cuda.launches import (
    ArgAddress,
    Branch,
    HostFlag,
    Jump,
    KernelArg,
    KernelLaunch,
    Repeat,
    While,
)
from rlx.backends.cuda.lowering import Context, is_multiple, lowers
from rlx.backends.kernel_args import NodeNumber, Pointer, Scratch
from rlx.ir.attrs import Body
from rlx.ir.dim import Dim
from rlx.ir.lir import aligned
from rlx.ir.node import Node
from rlx.ir.node import Value as Tensor
from rlx.ir.ops.control import Scan, WhileLoop

_FOREVER = 1 << 62


def _is_native(node: Node) -> bool:
    return all(map(has_kernels, bodies(node)))


def _jump(node: Node, jump: Jump, args: Sequence[KernelArg] = ()) -> KernelLaunch:
    return KernelLaunch(None, args, node=node, jump=jump)


def _told(flag: KernelArg) -> KernelLaunch:
    return KernelLaunch(TellFlag(), [flag, HostFlag()], blocks=1)


# -- branches --------------------------------------------------------------------------------------


def _cond_scratch(node: Node) -> int:
    return max(plan_subgraph(body, node).arena_size for body in bodies(node))


@lowers("cond", when=_is_native, scratch=_cond_scratch, strided=False)
def lower_cond(node: Node, ctx: Context) -> list[KernelLaunch]:
    op: Any = node.op
    flag, *operands = (Pointer(v) for v in node.inputs)
    results = [Pointer(v) for v in node.outputs]

    def branch(body: Body) -> list[KernelLaunch]:
        displaced = _displaced(node.inputs[1:], ctx)
        lir = plan_subgraph(body, node)
        return Subgraph(node, lir, 0, operands, results, displaced).launches()

    then, otherwise = branch(op.then), branch(op.otherwise)
    jump = _jump(node, Branch(len(then), len(otherwise)))
    return [_told(flag), jump, *then, *otherwise]


def _displaced(operands: Sequence[Tensor], ctx: Context) -> list[int]:
    """The operands that do not begin at multiples of 16 bytes."""
    return [i for i, v in enumerate(operands) if not is_aligned(v, ctx)]


def _copies(copies: Sequence[KernelArg]) -> KernelLaunch:
    return KernelLaunch(CopyResults(), [len(copies) // 3, *copies], blocks=COPY_BLOCKS)


# -- loops -----------------------------------------------------------------------------------------


class _Loop:
    """Memory of a loop, and the launches around its body.

    Scratch memory holds the counter, a flag, a second buffer for each carried value, and the arenas
    of the subgraphs. A carried value is double-buffered: its result and the second buffer take
    turns. One that the body passes through unchanged stays where it is.
    """

    def __init__(self, node: Node, ctx: Context | None = None) -> None:
        """Without a context, to know the size alone."""
        op: Any = node.op
        self.node, self.n_carry = node, op.n_carry
        self.displaced = [] if ctx is None else _displaced(node.inputs, ctx)
        inputs = [n.output for n in op.body.graph.sources("input")]
        outputs = op.body.graph.outputs
        self.changed = [i for i in range(op.n_carry) if outputs[i] is not inputs[i]]
        self.xs = node.inputs[op.n_carry :][: op.n_xs] if isinstance(op, Scan) else ()
        for i, x in enumerate(self.xs, start=op.n_carry):
            if not is_multiple(_slice_bytes(x), ALIGNMENT):
                self.displaced.append(i)
        self.ys = node.outputs[op.n_carry :]
        results = [*self.changed, *range(op.n_carry, len(outputs))]
        self.plans = {"body": plan_subgraph(op.body, node, results)}
        if isinstance(op, WhileLoop):
            self.plans["condition"] = plan_subgraph(op.condition, node)
        self.flag = 8
        size = aligned(16)
        self.spare: dict[int, int] = {}
        for i in self.changed:
            self.spare[i] = size
            size += aligned(node.inputs[i].shape.upper_bytes(node.graph.live))
        self.start = size
        self.size = size + max(lir.arena_size for lir in self.plans.values())

    @property
    def operands(self) -> list[Location]:
        """Where subgraphs read carried values, slices and loop-invariant operands."""
        found: list[Location] = [Pointer(v) for v in self.node.inputs]
        for i in range(len(self.xs)):
            found[self.n_carry + i] = InductionPointer(i)
        for position, i in enumerate(self.changed):
            found[i] = InductionPointer(self._buffer_number(position))
        return found

    @property
    def results(self) -> list[Location]:
        """Where the body writes carried values and the slices of results."""
        count = len(self.changed)
        carried = [InductionPointer(self._buffer_number(i) + 1) for i in range(count)]
        return [*carried, *(InductionPointer(len(self.xs) + i) for i in range(len(self.ys)))]

    def _buffer_number(self, position: int) -> int:
        """The induction pointer from which the changed value of that position is read."""
        return len(self.xs) + len(self.ys) + 2 * position

    def subgraph(self, name: str, outputs: Sequence[Location]) -> Subgraph:
        plan = self.plans[name]
        return Subgraph(self.node, plan, self.start, self.operands, outputs, self.displaced)

    def last(self, updates: list[ArgUpdate]) -> KernelLaunch:
        """Copy carried values to the results; most are there already."""
        copies: list[KernelArg] = []
        for i in range(self.n_carry):
            value, result = self.node.inputs[i], self.node.outputs[i]
            copies += [Pointer(result), Pointer(value), result.shape.size_bytes]
        made = _copies(copies)
        args = list(made.args)
        for position, i in enumerate(self.changed):
            args[2 + 3 * i] = 0
            place = ArgAddress(made, 2 + 3 * i)
            updates.append(ArgUpdate(place, self._buffer_number(position), 0))
        made.args = args
        return made

    def headers(
        self,
        iterations: Dim,
        updates: Sequence[ArgUpdate],
        slices: Sequence[tuple[KernelArg, KernelArg]] = (),
    ) -> tuple[KernelLaunch, KernelLaunch]:
        """What goes before the first iteration, and before each of the others."""
        args: list[KernelArg] = [Scratch(self.node), iterations]
        args += [len(slices), len(self.changed), len(updates)]
        for part in slices:
            args += part
        for i in self.changed:
            first, last = self.node.inputs[i], self.node.outputs[i]
            args += [Pointer(first), Pointer(last), Scratch(self.node, self.spare[i])]
        for update in updates:
            args += [update.arg, update.pointer, update.offset]
        begin, again = (KernelLaunch(LoopHeader(b), args, blocks=1) for b in (True, False))
        return begin, again


def _loop_scratch(node: Node) -> int:
    return _Loop(node).size


@lowers("while_loop", when=_is_native, scratch=_loop_scratch, strided=False)
def lower_while(node: Node, ctx: Context) -> list[KernelLaunch]:
    op: Any = node.op
    loop = _Loop(node, ctx)
    flag = Scratch(node, loop.flag)
    condition, body = loop.subgraph("condition", [flag]), loop.subgraph("body", loop.results)
    test, iteration = [*condition.launches(), _told(flag)], body.launches()
    updates = condition.updates + body.updates
    last = loop.last(updates)
    begin, again = loop.headers(op.max_iterations or _FOREVER, updates)
    report: list[KernelArg] = [NodeNumber(node)] if op.must_end else [0]
    jump = While(len(test), len(iteration) + 1, op.max_iterations)
    return [begin, _jump(node, jump, report), *test, *iteration, again, last]


@lowers("scan", when=_is_native, scratch=_loop_scratch, strided=False)
def lower_scan(node: Node, ctx: Context) -> list[KernelLaunch]:
    op: Any = node.op
    loop = _Loop(node, ctx)
    length: Dim = loop.xs[0].shape.dims[0] if loop.xs else op.length
    slices = [_slice(v, length, op.reverse) for v in (*loop.xs, *loop.ys)]
    body = loop.subgraph("body", loop.results)
    iteration = body.launches()
    is_there = isinstance(length, int) and length > 0 and len(loop.changed) == loop.n_carry
    last = [] if is_there else [loop.last(body.updates)]
    begin, again = loop.headers(length, body.updates, slices)
    repeat = _jump(node, Repeat(len(iteration) + 1), [length])
    return [begin, repeat, *iteration, again, *last]


def _slice(value: Tensor, length: Dim, reverse: bool) -> tuple[KernelArg, KernelArg]:
    """The address of the first iteration's slice, and the bytes from one slice to the next."""
    size = _slice_bytes(value)
    if reverse:
        return Pointer(value, (length - 1) * (size // value.dtype.bytes)), -size
    return Pointer(value), size


def _slice_bytes(value: Tensor) -> Dim:
    """Bytes of what an iteration has of a value."""
    return prod(value.shape.dims[1:], start=1) * value.dtype.bytes
