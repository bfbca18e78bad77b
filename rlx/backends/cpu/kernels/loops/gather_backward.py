"""Backward of gather: every slice of the result is written once, as zeros or as the sum of its
slices of dy, in their order. A first launch links the positions of equal indices to lists."""

from __future__ import annotations

from math import prod
from typing import Any

from rlx.backends.cpu.kernels.loops.rows import outgrows_caches
from rlx.backends.cpu.kernels.spec import KernelSpec, Operands
from rlx.backends.cpu.lowering import (
    Context,
    KernelArg,
    KernelLaunch,
    NodeNumber,
    Pointer,
    Scratch,
    Status,
    lowers,
)
from rlx.ir.dim import upper_bound
from rlx.ir.dtype import DType
from rlx.ir.lir import aligned
from rlx.ir.node import Node
from rlx.llvm.builder import Function, Module, Value, i64, vec
from rlx.llvm.nest.registers import from_memory, raw_type, register_type, to_memory
from rlx.llvm.storage import is_aligned, memory_type, stream
from rlx.llvm.target import Target
from rlx.support.records import dataclass

_POINTERS = ("indices", "heads", "links", "dy", "dx", "status")
_VECTORS = 4  # of a sum that is held in registers


@dataclass(frozen=True)
class LinkEqual(KernelSpec):
    """args: indices, heads, links, size, count, status, node

    `heads` [size] are the first positions of each index, −1 for none; `links` [count] those that
    follow. A worker owns some indices.
    """

    indices: DType

    def emit(self, m: Module) -> None:
        f = m.kernel()
        o = Operands(f, ["indices", "heads", "links", "size", "count", "status", "node"], _POINTERS)
        size, count = o["size"], o["count"]
        lo, hi = f.split(size)
        for i in f.range(lo, hi):
            f.store(f.i64(-1), f.gep(o["heads"], i, i64))
        for k in f.range(0, count):
            at = count - 1 - k  # so that lists begin with the first
            element = memory_type(self.indices)
            raw = f.load(f.gep(o["indices"], at, element), element)
            index = raw.to(i64, signed=self.indices.kind == "int")
            if self.indices.kind == "int":
                index = f.select(index < 0, index + size, index)
            for _ in f.when((index >= lo) & (index < hi)):
                head = f.gep(o["heads"], index, i64)
                f.store(f.load(head, i64), f.gep(o["links"], at, i64))
                f.store(at, head)
            for _ in f.when(size.ule(index)):
                f.store(o["node"], o["status"])


@dataclass(frozen=True)
class AddEqual(KernelSpec):
    """args: heads, links, dy, dx, outer, size, inner, count

    dy is [outer, count, inner], dx [outer, size, inner], both contiguous. With `streaming`, dx is
    written by streaming stores where it is aligned.
    """

    dtype: DType
    streaming: bool

    def emit(self, m: Module) -> None:
        f = m.kernel()
        names = ["heads", "links", "dy", "dx", "outer", "size", "inner", "count"]
        o = Operands(f, names, _POINTERS)
        lo, hi = f.split(o["outer"] * o["size"])
        if not self.streaming:
            self._rows(f, o, lo, hi, False)
            return
        for fits in f.either(is_aligned(f, [o["dx"], o["inner"] * self.dtype.bytes])):
            self._rows(f, o, lo, hi, fits)
            if fits:
                f.fence()

    def _rows(self, f: Function, o: Operands, lo: Value, hi: Value, streams: bool) -> None:
        lanes, inner = f.target.lanes(register_type(self.dtype).bits), o["inner"]
        for row in f.range(lo, hi):
            block = row.udiv(o["size"])
            head = f.load(f.gep(o["heads"], row - block * o["size"], i64), i64)
            to = f.gep(o["dx"], row * inner, self.dtype.bytes)
            source = f.gep(o["dy"], block * o["count"] * inner, self.dtype.bytes)
            first = f.i64(0)
            for vectors, n in ((_VECTORS, lanes), (1, lanes), (1, 1)):
                end = first + (inner - first & -(vectors * n))
                for i in f.range(first, end, vectors * n):
                    self._sum(f, o, head, f.gep(source, i, self.dtype.bytes), vectors, n,
                              f.gep(to, i, self.dtype.bytes), streams)  # fmt: skip
                first = end

    def _sum(
        self, f: Function, o: Operands, head: Value, source: Value, vectors: int, lanes: int,
        to: Value, streams: bool,
    ) -> None:  # fmt: skip
        """Some elements of a slice: the sums over its list, in registers."""
        row_bytes = o["inner"] * self.dtype.bytes
        wide = vec(lanes, register_type(self.dtype))
        step = lanes * self.dtype.bytes

        def more(at: Value, *sums: Value) -> list[Value]:
            row = f.gep(source, at * row_bytes)
            memory = vec(lanes, raw_type(self.dtype))
            found = [f.load(row, memory, k * step) for k in range(vectors)]
            new = [a + from_memory(f, b, self.dtype) for a, b in zip(sums, found, strict=True)]
            return [f.load(f.gep(o["links"], at, i64), i64), *new]

        start = [f.const(0, wide)] * vectors
        _, *sums = f.while_([head, *start], lambda at, *_: at >= 0, more)
        for k, value in enumerate(sums):
            raw, place = to_memory(f, value, self.dtype), f.gep(to, k * step)
            if streams:
                stream(f, raw, place)
            else:
                f.store(raw, place)


def _links_offset(node: Node) -> int:
    """Bytes of the heads."""
    op: Any = node.op
    return aligned(upper_bound(op.size, node.graph.live) * 8)


def _scratch(node: Node, target: Target, threads: int) -> int:
    count = upper_bound(node.inputs[1].shape.num_elements, node.graph.live)
    return _links_offset(node) + aligned(count * 8)


@lowers("gather_backward", scratch=_scratch)
def lower_gather_backward(node: Node, ctx: Context) -> list[KernelLaunch]:
    op: Any = node.op
    dy, indices = node.inputs
    before, after = op.around_axis(dy.shape, indices.shape)
    count = indices.shape.num_elements
    lists: list[KernelArg] = [Scratch(node), Scratch(node, _links_offset(node))]
    link = KernelLaunch(
        LinkEqual(indices.dtype),
        [Pointer(indices), *lists, op.size, count, Status(), NodeNumber(node)],
        [indices], [], uses_scratch=True,
    )  # fmt: skip
    dtype, inner = dy.dtype, prod(after, start=1)
    if dtype.is_complex:
        dtype, inner = dtype.part, inner * 2
    spec = AddEqual(dtype, outgrows_caches(node.output, ctx.lir.live))
    args = [*lists, Pointer(dy), Pointer(node.output), prod(before, start=1), op.size, inner, count]
    return [link, KernelLaunch(spec, args, [dy], node.outputs, uses_scratch=True)]
