"""Control flow: subgraphs are inlined among the launches of a program, with jumps around them.

A subgraph (a branch, a condition, a loop body) is planned by itself, into a part of its node's
scratch memory, and lowered; its launches become launches of that node. Its addresses become
addresses in the scratch memory or those of operands and results of the node. An address that
changes in every iteration is an induction pointer: the loop header updates the args that hold it.

Tiny kernels decide which launch is next. Every worker runs them and computes the same result, from
its own memory or from memory that nobody writes at that time, so they need no barriers. An
iteration begins with `LoopHeader`. It counts iterations in a cell of the worker's own and updates
those args of the body's launches that change in every iteration: addresses of slices, and of
carried values, which are double-buffered. All workers write the same numbers there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from functools import lru_cache
from typing import Any

from rlx.backends.cpu.barriers import barriers_of
from rlx.backends.cpu.kernels.spec import KernelSpec
from rlx.backends.cpu.lowering import (
    ArgAddress,
    ConstantPointer,
    Context,
    KernelArg,
    KernelLaunch,
    NodeNumber,
    Pointer,
    Scratch,
    Status,
    lower_graph,
    lowers,
    reads_strided,
    scratch_of,
)
from rlx.ir.attrs import Body
from rlx.ir.dim import Dim
from rlx.ir.lir import Lir, aligned
from rlx.ir.node import Node
from rlx.ir.node import Value as Tensor
from rlx.ir.ops.control import Scan, WhileLoop
from rlx.llvm.builder import Function, Module, Value, i8, i64, ptr, vec
from rlx.llvm.target import Target
from rlx.passes.plan import plan
from rlx.passes.views import insert_contiguous
from rlx.support.machine import usable_cores
from rlx.support.records import dataclass


@dataclass(frozen=True)
class Branch(KernelSpec):
    """Jumps always. args: distance"""

    def emit(self, m: Module) -> None:
        f = m.kernel(result=i64)
        f.ret(f.arg(f["args"], 0, i64))


@dataclass(frozen=True)
class BranchIfFalse(KernelSpec):
    """Jumps if the flag is false, else goes to the next launch. args: flag, distance"""

    def emit(self, m: Module) -> None:
        f = m.kernel(result=i64)
        flag = f.load(f.arg(f["args"], 0), i8)
        f.ret(f.select(flag.ne(0), f.i64(1), f.arg(f["args"], 1, i64)))


@dataclass(frozen=True)
class LoopPreheader(KernelSpec):
    """Resets the iteration counter before a loop. args: cells, bytes of each worker's cells"""

    def emit(self, m: Module) -> None:
        f = m.kernel()
        f.store(f.i64(0), _own_cells(f))


@dataclass(frozen=True)
class LoopHeader(KernelSpec):
    """Begins an iteration, or leaves the loop after the last one.

    args: cells, bytes of each worker's cells, iterations, distance to the end of the loop, numbers
    of slices, double buffers and arg updates; then these:
    a slice {base, stride} is at base + stride · iteration;
    a double buffer {first, last, spare} is a carried value: iteration 0 reads it from `first`,
    others read it where the one before wrote it, and the last iteration writes it to `last`;
    an arg update {arg, pointer, offset} sets an arg to the address of a pointer plus an offset.
    The pointers are the slices, then for each double buffer where it is read and where written.

    A worker's cells are the iteration counter, then the addresses of the pointers.

    Of a loop that `must_end`, two args stand before the parts: the status word, and what is
    written there when the last iteration was not the last.
    """

    must_end: bool = False

    def emit(self, m: Module) -> None:
        f = m.kernel(result=i64)
        cells = _own_cells(f)
        iterations, end, slices, buffers, updates = (f.arg(f["args"], i, i64) for i in range(2, 7))
        now = f.load(cells, i64)
        pointers, entry = f.gep(cells, 8), f.gep(f["args"], 72 if self.must_end else 56)
        for i in f.range(0, slices):
            part = f.gep(entry, i, 16)
            f.store(f.load(part, i64) + f.load(part, i64, 8) * now, f.gep(pointers, i, 8))
        entry = f.gep(entry, slices, 16)
        pairs = f.gep(pointers, slices, 8)
        for i in f.range(0, buffers):
            _swap_buffers(f, f.gep(entry, i, 24), f.gep(pairs, i, 16), iterations, now)
        entry = f.gep(entry, buffers, 24)
        for i in f.range(0, updates):
            _update_arg(f, f.gep(entry, i, 24), pointers)
        f.store(now + 1, cells)
        if self.must_end:
            status, number = f.arg(f["args"], 7), f.arg(f["args"], 8, i64)
            f.if_(now >= iterations, lambda: f.store(number, status))
        f.ret(f.select(now < iterations, f.i64(1), end))


def _own_cells(f: Function) -> Value:
    return f.gep(f.arg(f["args"], 0), f["tid"].to(i64) * f.arg(f["args"], 1, i64))


def _swap_buffers(f: Function, buffer: Value, pair: Value, iterations: Value, now: Value) -> None:
    first, last, spare = (f.load(buffer, i64, 8 * i) for i in range(3))
    odd = (iterations - now & 1).ne(0)  # an odd number is left: this iteration writes to `last`
    f.store(f.select(now.eq(0), first, f.select(odd, spare, last)), pair)
    f.store(f.select(odd, last, spare), pair, 8)


def _update_arg(f: Function, update: Value, pointers: Value) -> None:
    """Set an arg, unless another worker has: a cache line that nobody writes can be shared."""
    arg, number = f.load(update, ptr), f.load(update, i64, 8)
    value = f.load(f.gep(pointers, number, 8), i64) + f.load(update, i64, 16)
    old = f.atomic_load(arg, i64, order="monotonic")
    f.if_(old.ne(value), lambda: f.atomic_store(value, arg, order="monotonic"))


@dataclass(frozen=True)
class CopyResults(KernelSpec):
    """Copies bytes, unless source and target are the same. args: count, then {to, from, bytes}"""

    def emit(self, m: Module) -> None:
        f = m.kernel()
        for i in f.range(0, f.arg(f["args"], 0, i64)):
            entry = f.gep(f["args"], i * 24 + 8)
            to, source = f.load(entry, ptr), f.load(entry, ptr, 8)
            size = f.load(entry, i64, 16)
            elsewhere = to.bits(i64).ne(source.bits(i64))
            self._copy(f, to, source, f.select(elsewhere, size, 0))

    def _copy(self, f: Function, to: Value, source: Value, size: Value) -> None:
        wide = vec(f.target.vector_bits // 8, i8)
        lo, hi = f.split(size, 64)
        full = lo + (hi - lo) // wide.bytes * wide.bytes
        for at in f.range(lo, full, wide.bytes):
            f.store(f.load(source, wide, at), to, at)
        for at in f.range(full, hi):
            f.store(f.load(source, i8, at), to, at)


_FOREVER = (1 << 63) - 1


# -- subgraphs ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class InductionPointer:
    """An address that changes in every iteration, by its number in the loop header."""

    number: int


Location = Pointer | Scratch | InductionPointer


@dataclass(frozen=True)
class ArgUpdate:
    """An arg of a launch that is set in every iteration: an induction pointer plus some bytes."""

    launch: KernelLaunch
    index: int
    pointer: int
    offset: Dim


def plan_subgraph(
    body: Body, node: Node, target: Target, threads: int, outputs: Sequence[int] | None = None
) -> Lir:
    """The plan of a subgraph of `node`, with all outputs or those of these numbers."""
    chosen = range(len(body.graph.outputs)) if outputs is None else outputs
    bounds = tuple(sorted(node.graph.live.items()))
    return _plan_subgraph(body, tuple(chosen), bounds, target, threads)


@lru_cache(maxsize=512)
def _plan_subgraph(
    body: Body,
    outputs: tuple[int, ...],
    bounds: tuple[tuple[str, int], ...],
    target: Target,
    threads: int,
) -> Lir:
    graph = body.graph.copy()
    graph.set_outputs([graph.outputs[i] for i in outputs])
    graph.live = dict(bounds)
    return plan(
        insert_contiguous(graph, reads_strided),
        scratch=lambda n: scratch_of(n, target, threads),
        nested=True,
    )


@dataclass
class Subgraph:
    """A planned subgraph of `node`: the offset of its arena in the node's scratch memory, and the
    locations of its inputs and outputs."""

    node: Node
    lir: Lir
    start: int
    inputs: Sequence[Location]
    outputs: Sequence[Location]
    updates: list[ArgUpdate] = field(default_factory=list)

    def launches(self, ctx: Context) -> list[KernelLaunch]:
        """The launches, with the barriers between them and none at the end."""
        inputs = [n.output for n in self.lir.inputs]
        locations = dict(zip(inputs, self.inputs, strict=True))
        locations |= dict(zip(self.lir.outputs, self.outputs, strict=True))
        launches = lower_graph(Context(self.lir, ctx.target, ctx.threads))
        barriers = barriers_of(launches, self.lir)
        for launch, barrier in zip(launches, barriers, strict=True):
            _set_cost(launch)
            launch.args = [self._arg(launch, i, a, locations) for i, a in enumerate(launch.args)]
            launch.reads, launch.writes, launch.uses_scratch, launch.fence = (), (), False, barrier
        return launches

    def _arg(
        self, launch: KernelLaunch, index: int, arg: KernelArg, locations: Mapping[Tensor, Location]
    ) -> KernelArg:
        if isinstance(arg, Scratch):
            offset, _ = self.lir.scratch[arg.node.id]
            return Scratch(self.node, self.start + offset + arg.offset, arg.shift)
        if not isinstance(arg, Pointer):
            return arg
        root, slot = self.lir.home(arg.value)
        view = self.lir.slots[arg.value].view
        shift = arg.shift + (0 if view is None else view.offset)
        offset = shift * root.dtype.bytes  # type: ignore[assignment]
        location = locations.get(root)
        if isinstance(location, Pointer):
            return Pointer(location.value, location.shift + shift)
        if isinstance(location, Scratch):
            return Scratch(location.node, location.offset, location.shift + offset)
        if isinstance(location, InductionPointer):
            self.updates.append(ArgUpdate(launch, index, location.number, offset))
            return 0
        if slot.kind == "constant":
            return ConstantPointer(root.node.op.data, offset)  # type: ignore[attr-defined]
        assert slot.offset is not None, f"{root} has no arena slot"
        return Scratch(self.node, self.start + slot.offset, offset)


def _set_cost(launch: KernelLaunch) -> None:
    """Give a launch its node's cost, where it has none of its own: from now on it belongs to the
    node around it, whose cost is that of all iterations of all launches."""
    node = launch.node
    if node is not None and not launch.flops and not launch.bytes:
        cost = node.op.cost([v.shape for v in node.inputs], [v.shape for v in node.outputs])
        launch.flops, launch.bytes = cost.flops, cost.bytes


# -- launches of control flow ---------------------------------------------------------------------


def _max_workers(threads: int) -> int:
    """For how many workers memory is laid out: planning may know of fewer than run later."""
    return max(threads, usable_cores())


def _jump(spec: KernelSpec, args: Sequence[KernelArg], fence: bool = False) -> KernelLaunch:
    return KernelLaunch(spec, args, jump=True, fence=fence, bytes=8 * len(args))


def _first(launch: KernelLaunch, node: Node) -> KernelLaunch:
    """The first launch of a node carries the memory accesses of all, for barriers before it."""
    launch.reads, launch.writes, launch.uses_scratch = node.inputs, node.outputs, True
    return launch


def _last(copies: Sequence[tuple[KernelArg, KernelArg, Dim]]) -> KernelLaunch:
    """The last launch of a node, with a barrier: accesses inside the node are not tracked."""
    args: list[KernelArg] = [len(copies)]
    for copy in copies:
        args += copy
    return KernelLaunch(CopyResults(), args, fence=True, bytes=8 * len(args))


# -- branches -------------------------------------------------------------------------------------


def _cond_scratch(node: Node, target: Target, threads: int) -> int:
    op: Any = node.op
    bodies = (op.then, op.otherwise)
    return max(plan_subgraph(b, node, target, _max_workers(threads)).arena_size for b in bodies)


@lowers("cond", scratch=_cond_scratch)
def lower_cond(node: Node, ctx: Context) -> list[KernelLaunch]:
    op: Any = node.op
    flag, *operands = (Pointer(v) for v in node.inputs)
    results = [Pointer(v) for v in node.outputs]

    def branch(body: Body) -> list[KernelLaunch]:
        lir = plan_subgraph(body, node, ctx.target, _max_workers(ctx.threads))
        return Subgraph(node, lir, 0, operands, results).launches(ctx)

    then, otherwise = branch(op.then), branch(op.otherwise)
    to_else = _jump(BranchIfFalse(), [flag, len(then) + 2])
    to_end = _jump(Branch(), [len(otherwise) + 1])
    return [_first(to_else, node), *then, to_end, *otherwise, _last([])]


# -- loops ----------------------------------------------------------------------------------------


class _Loop:
    """Memory of a loop, and the launches around its body.

    Scratch memory holds the cells of every worker, a second buffer for each carried value, a flag,
    and the arenas of the subgraphs. A carried value is double-buffered: its result and the second
    buffer take turns. One that the body passes through unchanged stays where it is.
    """

    def __init__(self, node: Node, target: Target, threads: int) -> None:
        op: Any = node.op
        self.node, self.n_carry = node, op.n_carry
        inputs = [n.output for n in op.body.graph.sources("input")]
        outputs = op.body.graph.outputs
        self.changed = [i for i in range(op.n_carry) if outputs[i] is not inputs[i]]
        self.xs = node.inputs[op.n_carry :][: op.n_xs] if isinstance(op, Scan) else ()
        self.ys = node.outputs[op.n_carry :]
        results, workers = [*self.changed, *range(op.n_carry, len(outputs))], _max_workers(threads)
        self.plans = {"body": plan_subgraph(op.body, node, target, workers, results)}
        if isinstance(op, WhileLoop):
            self.plans["condition"] = plan_subgraph(op.condition, node, target, workers)
        self._lay_out(workers)

    def _lay_out(self, workers: int) -> None:
        self.cell_bytes = aligned(8 * (1 + self._buffer_number(len(self.changed))))
        size = self.cell_bytes * workers
        self.spare: dict[int, int] = {}
        for i in self.changed:
            self.spare[i] = size
            size += aligned(self.node.inputs[i].shape.upper_bytes(self.node.graph.live))
        self.flag, self.start = size, size + aligned(1)
        self.size = self.start + max(lir.arena_size for lir in self.plans.values())

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
        return Subgraph(self.node, self.plans[name], self.start, self.operands, outputs)

    def launches(
        self,
        inside: list[KernelLaunch],
        updates: list[ArgUpdate],
        iterations: Dim,
        slices: Sequence[tuple[KernelArg, KernelArg]] = (),
        must_end: bool = False,
    ) -> list[KernelLaunch]:
        """The launches of the loop around those of one iteration."""
        last = self._copy_results(updates)
        cells: list[KernelArg] = [Scratch(self.node), self.cell_bytes]
        preheader = KernelLaunch(LoopPreheader(), cells, bytes=16)
        counts, parts = self._header_args(slices, updates)
        report: list[KernelArg] = [Status(), NodeNumber(self.node)] if must_end else []
        args = [*cells, iterations, len(inside) + 2, *counts, *report, *parts]
        header = _jump(LoopHeader(must_end), args)
        back = _jump(Branch(), [-len(inside) - 1], fence=True)
        return [_first(preheader, self.node), header, *inside, back, last]

    def _copy_results(self, updates: list[ArgUpdate]) -> KernelLaunch:
        """Copy carried values to the results; most are there already, and cost nothing."""
        copies: list[tuple[KernelArg, KernelArg, Dim]] = []
        for i in range(self.n_carry):
            value, result = self.node.inputs[i], self.node.outputs[i]
            copies.append((Pointer(result), Pointer(value), result.shape.size_bytes))
        last = _last(copies)
        args = list(last.args)
        for position, i in enumerate(self.changed):
            args[2 + 3 * i] = 0
            updates.append(ArgUpdate(last, 2 + 3 * i, self._buffer_number(position), 0))
        last.args = args
        return last

    def _header_args(
        self, slices: Sequence[tuple[KernelArg, KernelArg]], updates: Sequence[ArgUpdate]
    ) -> tuple[list[KernelArg], list[KernelArg]]:
        """How many parts of each kind there are, and the parts."""
        args: list[KernelArg] = []
        for part in slices:
            args += part
        for i in self.changed:
            first, last = self.node.inputs[i], self.node.outputs[i]
            args += [Pointer(first), Pointer(last), Scratch(self.node, self.spare[i])]
        for update in updates:
            args += [ArgAddress(update.launch, update.index), update.pointer, update.offset]
        return [len(slices), len(self.changed), len(updates)], args


def _loop_scratch(node: Node, target: Target, threads: int) -> int:
    return _Loop(node, target, threads).size


@lowers("while_loop", scratch=_loop_scratch)
def lower_while(node: Node, ctx: Context) -> list[KernelLaunch]:
    op: Any = node.op
    loop = _Loop(node, ctx.target, ctx.threads)
    flag = Scratch(node, loop.flag)
    condition, body = loop.subgraph("condition", [flag]), loop.subgraph("body", loop.results)
    test, iteration = condition.launches(ctx), body.launches(ctx)
    test[-1].fence = True
    leave = _jump(BranchIfFalse(), [flag, len(iteration) + 2])
    inside = [*test, leave, *iteration]
    updates = condition.updates + body.updates
    # one more, so that the condition decides after the last
    most = op.max_iterations + 1 if op.must_end else op.max_iterations or _FOREVER
    return loop.launches(inside, updates, most, must_end=op.must_end)


@lowers("scan", scratch=_loop_scratch)
def lower_scan(node: Node, ctx: Context) -> list[KernelLaunch]:
    op: Any = node.op
    loop = _Loop(node, ctx.target, ctx.threads)
    length: Dim = loop.xs[0].shape.dims[0] if loop.xs else op.length
    slices = [_slice(v, length, op.reverse) for v in (*loop.xs, *loop.ys)]
    body = loop.subgraph("body", loop.results)
    return loop.launches(body.launches(ctx), body.updates, length, slices)


def _slice(value: Tensor, length: Dim, reverse: bool) -> tuple[KernelArg, KernelArg]:
    """The address of the first iteration's slice, and the bytes from one slice to the next."""
    size: Dim = 1
    for d in value.shape.dims[1:]:
        size = size * d
    if reverse:
        return Pointer(value, (length - 1) * size), -(size * value.dtype.bytes)
    return Pointer(value), size * value.dtype.bytes
