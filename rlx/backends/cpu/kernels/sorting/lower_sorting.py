"""Lowering of sorts and searches, and the kernel of the latter."""

from __future__ import annotations

from math import prod
from typing import Any

from rlx.backends.cpu.kernels.sorting.radix_sort import RadixSort, key_of, raw_bits
from rlx.backends.cpu.kernels.spec import KernelSpec, Operands
from rlx.backends.cpu.lowering import Context, KernelArg, KernelLaunch, Pointer, Scratch, lowers
from rlx.ir.dim import Dim, upper_bound
from rlx.ir.dtype import DType
from rlx.ir.node import Node
from rlx.ir.shape import normalize_axis
from rlx.llvm.builder import Module, Value
from rlx.llvm.target import Target
from rlx.support.records import dataclass


def _sort(node: Node) -> RadixSort:
    op: Any = node.op
    return RadixSort(node.inputs[0].dtype, op.descending, op.name == "argsort")


def _around_axis(node: Node) -> tuple[Dim, Dim, Dim]:
    """The operand as [outer, n, inner] around the axis."""
    op: Any = node.op
    dims = node.inputs[0].shape.dims
    axis = normalize_axis(op.axis, len(dims))
    return prod(dims[:axis], start=1), dims[axis], prod(dims[axis + 1 :], start=1)


def _row_bytes(node: Node) -> int:
    return _sort(node).scratch(upper_bound(_around_axis(node)[1], node.graph.live))


def _sort_scratch(node: Node, target: Target, threads: int) -> int:
    return threads * _row_bytes(node)


@lowers("sort", "argsort", scratch=_sort_scratch)
def lower_sort(node: Node, ctx: Context) -> list[KernelLaunch]:
    x, y = node.inputs[0], node.output
    if 0 in x.shape.dims:
        return []
    args: list[KernelArg] = [Pointer(x), Pointer(y), Scratch(node), _row_bytes(node)]
    cost = node.op.cost([x.shape], [y.shape])
    return [
        KernelLaunch(
            _sort(node), [*args, *_around_axis(node)], [x], [y], uses_scratch=True,
            flops=cost.flops, bytes=cost.bytes,
        )
    ]  # fmt: skip


@dataclass(frozen=True)
class SearchSorted(KernelSpec):
    """args: table, x, y, n, count

    y[i] = how many of the n elements of the table come before x[i], by binary search.
    """

    dtype: DType
    right: bool

    args = ("table", "x", "y", "n", "count")

    def emit(self, m: Module) -> None:
        f, dtype = m.kernel(), self.dtype
        o = Operands(f, self.args, ("table", "x", "y"))
        lo, hi = f.split(o["count"])
        for i in f.range(lo, hi):
            wanted = key_of(f, raw_bits(f, f.gep(o["x"], i, dtype.bytes), dtype), dtype)

            def halve(first: Value, last: Value, wanted: Value = wanted) -> list[Value]:
                middle = first + (last - first >> 1)
                at = f.gep(o["table"], middle, dtype.bytes)
                key = key_of(f, raw_bits(f, at, dtype), dtype)
                before = f.compare("ule" if self.right else "ult", key, wanted)
                return [f.select(before, middle + 1, first), f.select(before, last, middle)]

            found, _ = f.while_([f.i64(0) + o["n"] * 0, o["n"] + 0], lambda a, b: a < b, halve)
            f.store(found, f.gep(o["y"], i, 8))


@lowers("searchsorted")
def lower_searchsorted(node: Node, ctx: Context) -> list[KernelLaunch]:
    op: Any = node.op
    table, x = node.inputs
    args: list[KernelArg] = [Pointer(table), Pointer(x), Pointer(node.output)]
    args += [table.shape.dims[0], x.shape.num_elements]
    spec = SearchSorted(table.dtype, op.side == "right")
    cost = op.cost([table.shape, x.shape], [node.output.shape])
    return [KernelLaunch(spec, args, [table, x], node.outputs, flops=cost.flops, bytes=cost.bytes)]
