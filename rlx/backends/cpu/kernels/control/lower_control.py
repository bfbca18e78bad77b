"""Branches and loops as steps of the program: bodies stand in it once, jumps lead around them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlx.backends.cpu.kernels.control.flow_kernels import Begin, Choose, Copies, Goto, Turn
from rlx.backends.cpu.kernels.control.subgraphs import Move, Nest, Place, Source, plan_body
from rlx.backends.cpu.kernels.spec import KernelSpec
from rlx.backends.cpu.lowering import (
    ArgAddress,
    Context,
    KernelArg,
    KernelLaunch,
    Pointer,
    Scratch,
    lowers,
)
from rlx.ir.attrs import Body
from rlx.ir.dim import Dim
from rlx.ir.lir import aligned
from rlx.ir.node import Node, Value
from rlx.ir.ops.control import Scan, WhileLoop
from rlx.llvm.target import Target
from rlx.support.machine import usable_cores

_FOREVER = (1 << 63) - 1


def _most(threads: int) -> int:
    """For how many workers memory is laid out: when it is planned, fewer may be known than run."""
    return max(threads, usable_cores())


def _jump(spec: KernelSpec, args: Sequence[KernelArg], fence: bool = False) -> KernelLaunch:
    return KernelLaunch(spec, args, jump=True, fence=fence, bytes=8 * len(args))


def _opens(step: KernelLaunch, node: Node) -> KernelLaunch:
    """The first step of a node stands for all of them when barriers are placed around it."""
    step.reads, step.writes, step.uses_scratch = node.inputs, node.outputs, True
    return step


def _copies(copies: Sequence[tuple[KernelArg, KernelArg, Dim]]) -> KernelLaunch:
    """Ends every node of control flow, with a barrier: until there, memory has not been watched."""
    args: list[KernelArg] = [len(copies)]
    for copy in copies:
        args += copy
    return KernelLaunch(Copies(), args, fence=True, bytes=8 * len(args))


# -- branches ---------------------------------------------------------------------------------


def _cond_scratch(node: Node, target: Target, threads: int) -> int:
    op: Any = node.op
    bodies = (op.then, op.otherwise)
    return max(plan_body(b, node, target, _most(threads)).arena_size for b in bodies)


@lowers("cond", scratch=_cond_scratch)
def lower_cond(node: Node, ctx: Context) -> list[KernelLaunch]:
    op: Any = node.op
    flag, *operands = (Pointer(v) for v in node.inputs)
    results = [Pointer(v) for v in node.outputs]

    def branch(body: Body) -> list[KernelLaunch]:
        lir = plan_body(body, node, ctx.target, _most(ctx.threads))
        return Nest(node, lir, 0, operands, results).launches(ctx)

    then, otherwise = branch(op.then), branch(op.otherwise)
    choose = _jump(Choose(), [flag, len(then) + 2])
    over = _jump(Goto(), [len(otherwise) + 1])
    return [_opens(choose, node), *then, over, *otherwise, _copies([])]


# -- loops ------------------------------------------------------------------------------------


class _Loop:
    """What loops share: memory, and the steps around the body.

    Scratch memory holds the cells of every worker, a second place for each carried value, a flag,
    and the memory of the bodies. Carried values go to and fro between their result and their
    second place; one that the body hands on as it got it stays where it is.
    """

    def __init__(self, node: Node, target: Target, threads: int) -> None:
        op: Any = node.op
        self.node, self.n_carry = node, op.n_carry
        inputs = [n.output for n in op.body.graph.sources("input")]
        outputs = op.body.graph.outputs
        self.changed = [i for i in range(op.n_carry) if outputs[i] is not inputs[i]]
        self.xs = node.inputs[op.n_carry :][: op.n_xs] if isinstance(op, Scan) else ()
        self.ys = node.outputs[op.n_carry :]
        results = [*self.changed, *range(op.n_carry, len(outputs))]
        self.plans = {"body": plan_body(op.body, node, target, _most(threads), results)}
        if isinstance(op, WhileLoop):
            self.plans["condition"] = plan_body(op.condition, node, target, _most(threads))
        self._lay_out(_most(threads))

    def _lay_out(self, threads: int) -> None:
        self.each = aligned(8 * (1 + self._swap(len(self.changed))))
        size = self.each * threads
        self.spare: dict[int, int] = {}
        for i in self.changed:
            self.spare[i] = size
            size += aligned(self.node.inputs[i].shape.upper_bytes(self.node.graph.live))
        self.flag, self.start = size, size + aligned(1)
        self.size = self.start + max(lir.arena_size for lir in self.plans.values())

    @property
    def operands(self) -> list[Place]:
        """Where the nested graphs find carried values, slices and what is given whole."""
        places: list[Place] = [Pointer(v) for v in self.node.inputs]
        for i in range(len(self.xs)):
            places[self.n_carry + i] = Source(i)
        for position, i in enumerate(self.changed):
            places[i] = Source(self._swap(position))
        return places

    @property
    def written(self) -> list[Place]:
        """Where the body writes carried values, and results of the round."""
        carried = [Source(self._swap(position) + 1) for position in range(len(self.changed))]
        return [*carried, *(Source(len(self.xs) + i) for i in range(len(self.ys)))]

    def _swap(self, position: int) -> int:
        """NodeNumber of the source from which the changed value of that position is read."""
        return len(self.xs) + len(self.ys) + 2 * position

    def nest(self, name: str, outputs: Sequence[Place]) -> Nest:
        return Nest(self.node, self.plans[name], self.start, self.operands, outputs)

    def around(
        self,
        inside: list[KernelLaunch],
        moves: list[Move],
        rounds: Dim,
        slides: Sequence[tuple[KernelArg, KernelArg]] = (),
    ) -> list[KernelLaunch]:
        """The steps of one round, made a loop."""
        settle = self._settle(moves)
        cells: list[KernelArg] = [Scratch(self.node), self.each]
        begin = KernelLaunch(Begin(), cells, bytes=16)
        args = [*cells, rounds, len(inside) + 2, *self._turn_args(slides, moves)]
        back = _jump(Goto(), [-len(inside) - 1], fence=True)
        return [_opens(begin, self.node), _jump(Turn(), args), *inside, back, settle]

    def _settle(self, moves: list[Move]) -> KernelLaunch:
        """Carried values become results; most are there already."""
        copies: list[tuple[KernelArg, KernelArg, Dim]] = []
        for i in range(self.n_carry):
            value, result = self.node.inputs[i], self.node.outputs[i]
            copies.append((Pointer(result), Pointer(value), result.shape.size_bytes))
        settle = _copies(copies)
        args = list(settle.args)
        for position, i in enumerate(self.changed):
            args[2 + 3 * i] = 0
            moves.append(Move(settle, 2 + 3 * i, self._swap(position), 0))
        settle.args = args
        return settle

    def _turn_args(
        self, slides: Sequence[tuple[KernelArg, KernelArg]], moves: Sequence[Move]
    ) -> list[KernelArg]:
        args: list[KernelArg] = [len(slides), len(self.changed), len(moves)]
        for slide in slides:
            args += slide
        for i in self.changed:
            first, last = self.node.inputs[i], self.node.outputs[i]
            args += [Pointer(first), Pointer(last), Scratch(self.node, self.spare[i])]
        for move in moves:
            args += [ArgAddress(move.launch, move.index), move.source, move.offset]
        return args


def _loop_scratch(node: Node, target: Target, threads: int) -> int:
    return _Loop(node, target, threads).size


@lowers("while_loop", scratch=_loop_scratch)
def lower_while(node: Node, ctx: Context) -> list[KernelLaunch]:
    op: Any = node.op
    loop = _Loop(node, ctx.target, ctx.threads)
    flag = Scratch(node, loop.flag)
    test, body = loop.nest("condition", [flag]), loop.nest("body", loop.written)
    asked, done = test.launches(ctx), body.launches(ctx)
    asked[-1].fence = True
    leave = _jump(Choose(), [flag, len(done) + 2])
    inside = [*asked, leave, *done]
    return loop.around(inside, test.moves + body.moves, op.max_iterations or _FOREVER)


@lowers("scan", scratch=_loop_scratch)
def lower_scan(node: Node, ctx: Context) -> list[KernelLaunch]:
    op: Any = node.op
    loop = _Loop(node, ctx.target, ctx.threads)
    length: Dim = loop.xs[0].shape.dims[0] if loop.xs else op.length
    slides = [_slide(v, length, op.reverse) for v in (*loop.xs, *loop.ys)]
    body = loop.nest("body", loop.written)
    return loop.around(body.launches(ctx), body.moves, length, slides)


def _slide(value: Value, length: Dim, reverse: bool) -> tuple[KernelArg, KernelArg]:
    """Where the first round's slice is, and the bytes from one round's to the next one's."""
    step: Dim = 1
    for d in value.shape.dims[1:]:
        step = step * d
    if reverse:
        return Pointer(value, (length - 1) * step), -(step * value.dtype.bytes)
    return Pointer(value), step * value.dtype.bytes
