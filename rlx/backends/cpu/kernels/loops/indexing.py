"""Prefix sums and products (cumsum, cumprod) along an axis; floats accumulate in f64, for
precision on long axes.

Scatter: slices stored at gathered indices, added to what is there, or combined with it.

Workers divide the elements of a slice, not the slices: each visits all indices in order, so that
the last of equal indices wins and the order of sums is deterministic.

Lowering of scatter, of state writes at given slots, and of prefix sums.
"""

from __future__ import annotations

from math import prod
from typing import Any

from rlx.backends.cpu.kernels.loops.lower_region import launch_for
from rlx.backends.cpu.kernels.spec import KernelSpec
from rlx.backends.cpu.lowering import (
    Context,
    KernelLaunch,
    NodeNumber,
    Pointer,
    Scratch,
    Status,
    lowers,
)
from rlx.ir.dim import Dim
from rlx.ir.dtype import DType, f32
from rlx.ir.lir import contiguous_strides
from rlx.ir.node import Node
from rlx.ir.op import lookup
from rlx.ir.shape import Shape, normalize_axis
from rlx.llvm.builder import Function, Module, Value, f64, i64, vec
from rlx.llvm.nest import elements
from rlx.llvm.nest.arithmetic import mul
from rlx.llvm.nest.registers import (
    Complex,
    convert,
    from_memory,
    raw_type,
    register_type,
    to_memory,
)
from rlx.llvm.storage import memory_type
from rlx.llvm.target import Target
from rlx.loops.strided_copies import StridedView, copy
from rlx.loops.trace import Buffer
from rlx.support.records import dataclass


@dataclass(frozen=True)
class CumSum(KernelSpec):
    """args: x, result, outer, size, inner

    Both are contiguous [outer, size, inner]. With `columns`, vectors are along `inner`.
    """

    source: DType
    result: DType
    exclusive: bool
    reverse: bool
    columns: bool
    product: bool = False

    @property
    def label(self) -> str:
        return "cumprod" if self.product else "cumsum"

    def emit(self, m: Module) -> None:
        f = m.kernel()
        outer, inner = f.arg(f["args"], 2, i64), f.arg(f["args"], 4, i64)
        lanes = f.target.lanes(64) if self.columns else 1
        width = lanes * 4
        blocks = f.ceil_div(inner, width)
        lo, hi = f.split(outer * blocks)
        for item in f.range(lo, hi):
            row = item.udiv(blocks)
            start = (item - row * blocks) * width
            stop = f.min(start + width, inner)
            whole = start + (stop - start & -lanes)
            for column in f.range(start, whole, lanes):
                self._scan_columns(f, row, column, lanes)
            if lanes > 1:
                for column in f.range(whole, stop):
                    self._scan_columns(f, row, column, 1)

    def _scan_columns(self, f: Function, row: Value, column: Value, lanes: int) -> None:
        """Scan `lanes` neighbouring columns."""
        x, result = f.arg(f["args"], 0), f.arg(f["args"], 1)
        size, inner = f.arg(f["args"], 3, i64), f.arg(f["args"], 4, i64)
        base = row * size * inner + column
        sum_type = f64 if self.result.is_float else register_type(self.result.part)

        def complex_body(i: Value, *total: Value) -> list[Value]:
            at = base + (size - 1 - i if self.reverse else i) * inner
            part, place = self.source.part, f.gep(x, at, self.source.bytes)
            element = [from_memory(f, f.load(place, raw_type(part), k * part.bytes), part).to(f64)
                       for k in (0, 1)]  # fmt: skip
            more = mul(f, Complex(*total), Complex(*element))
            for k, value in enumerate(total if self.exclusive else more):
                to = f.gep(result, at, self.result.bytes)
                f.store(value.to(raw_type(part)), to, k * part.bytes)
            return list(more)

        def body(i: Value, total: Value) -> Value:
            at = base + (size - 1 - i if self.reverse else i) * inner
            raw = f.load(f.gep(x, at, self.source.bytes), vec(lanes, raw_type(self.source)))
            element = convert(f, from_memory(f, raw, self.source), self.source, self.result)
            assert isinstance(element, Value)
            new = element.to(sum_type)
            more = total * new if self.product else total + new
            shown = total if self.exclusive else more
            value = shown.to(register_type(self.result)) if self.result.is_float else shown
            f.store(to_memory(f, value, self.result), f.gep(result, at, self.result.bytes))
            return more

        if self.source.is_complex:
            f.loop(0, size, 1, [f.const(1, f64), f.const(0, f64)], complex_body)
        else:
            f.loop(0, size, 1, [f.const(int(self.product), vec(lanes, sum_type))], body)


TILE = 256  # elements of a slice per work item


@dataclass(frozen=True)
class Scatter(KernelSpec):
    """args: result, indices, updates, outer, size, inner, count, status, node

    The result is [outer, size, inner] and updates are [outer, count, inner], both contiguous.
    """

    result: DType
    updates: DType
    indices: DType
    combine: str = ""  # the op of old and new elements; empty: the new ones replace the old

    @property
    def label(self) -> str:
        return f"scatter_{self.combine}" if self.combine else "scatter"

    def emit(self, m: Module) -> None:
        f = m.kernel()
        outer, size, inner = (f.arg(f["args"], at, i64) for at in (3, 4, 5))
        tiles = f.ceil_div(inner, TILE)
        lo, hi = f.split(outer * tiles)
        for item in f.range(lo, hi):
            block = item.udiv(tiles)
            start = (item - block * tiles) * TILE
            width = f.min(inner - start, TILE)
            self._emit_tile(f, block, size, inner, start, width)

    def _emit_tile(
        self, f: Function, block: Value, size: Value, inner: Value, start: Value, width: Value
    ) -> None:
        """All updates of one tile of elements."""
        result, indices, updates = (f.arg(f["args"], at) for at in range(3))
        count = f.arg(f["args"], 6, i64)
        status, node = f.arg(f["args"], 7), f.arg(f["args"], 8, i64)
        to = f.gep(result, block * size * inner + start, self.result.bytes)
        source = f.gep(updates, block * count * inner + start, self.updates.bytes)
        lanes = f.target.lanes(max(register_type(d).bits for d in (self.result, self.updates)))
        for i in f.range(0, count):
            raw = f.load(f.gep(indices, i, self.indices.bytes), memory_type(self.indices))
            index = raw.to(i64, signed=self.indices.kind == "int")
            if self.indices.kind == "int":
                index = f.select(index < 0, index + size, index)
            good = index.ult(size)
            row = f.gep(to, index * inner, self.result.bytes)
            new = f.gep(source, i * inner, self.updates.bytes)

            def write(row: Value = row, new: Value = new) -> None:
                whole = width & -lanes
                for k in f.range(0, whole, lanes):
                    self._elements(f, row, new, k, lanes)
                for k in f.range(whole, width):
                    self._elements(f, row, new, k, 1)

            f.if_(good, write, lambda: f.store(node, status))

    def _elements(self, f: Function, row: Value, new: Value, at: Value, lanes: int) -> None:
        to = f.gep(row, at, self.result.bytes)
        raw = f.load(f.gep(new, at, self.updates.bytes), vec(lanes, raw_type(self.updates)))
        value = from_memory(f, raw, self.updates)
        if self.combine == "add":
            old = from_memory(f, f.load(to, vec(lanes, raw_type(self.result))), self.result)
            value = old + value.to(old.type)
        elif self.combine:
            old = from_memory(f, f.load(to, vec(lanes, raw_type(self.result))), self.result)
            pair = (old, self.result), (value, self.updates)
            combined = elements.apply(f, lookup(self.combine)(), pair, self.result)
            assert isinstance(combined, Value)
            value = combined
        f.store(to_memory(f, value, self.result), to)


_UINT = {1: DType.of("u8"), 2: DType.of("u16"), 4: DType.of("u32"), 8: DType.of("u64")}


def _around_axis(shape: Shape, axis: int) -> tuple[Dim, Dim, Dim]:
    """The shape as [outer, size, inner] around an axis."""
    at = normalize_axis(axis, shape.rank)
    before, after = prod(shape.dims[:at], start=1), prod(shape.dims[at + 1 :], start=1)
    return before, shape.dims[at], after


# -- scatter ----------------------------------------------------------------------------------


def _needs_f32_sums(node: Node) -> bool:
    """Whether sums accumulate in an f32 temporary, because the result's type is narrower."""
    dtype = node.output.dtype
    return node.op.name == "scatter_add" and dtype.is_float and dtype.bits < 32


def _scatter_scratch(node: Node, target: Target, threads: int) -> int:
    if not _needs_f32_sums(node):
        return 0
    return node.output.shape.with_dtype(f32).upper_bytes(node.graph.live)


def _is_real(node: Node) -> bool:
    return not node.output.dtype.is_complex


@lowers("scatter_reduce", when=_is_real)
@lowers("scatter", "scatter_add", scratch=_scatter_scratch)
def lower_scatter(node: Node, ctx: Context) -> list[KernelLaunch]:
    """Copy the operand, then scatter into the copy."""
    op: Any = node.op
    x, indices, updates = node.inputs
    if 0 in x.shape.dims:
        return []
    combine = "add" if op.name == "scatter_add" else op.how if op.name == "scatter_reduce" else ""
    f32_sums = _needs_f32_sums(node)
    dtype = f32 if f32_sums else x.dtype
    strides = contiguous_strides(x.shape)
    result = StridedView(Buffer("result"), x.dtype, strides)
    sums = StridedView(Buffer("temporary"), f32, strides) if f32_sums else result
    start = copy(x.shape.dims, StridedView(Buffer("operand", 0), x.dtype, strides), sums)
    outer, size, inner = _around_axis(x.shape, op.axis)
    if combine and dtype.is_complex:  # sums of real and imaginary parts
        dtypes, inner = (dtype.part, dtype.part), inner * 2
    elif combine:
        dtypes = (dtype, updates.dtype)
    else:
        dtypes = (_UINT[dtype.bytes], _UINT[dtype.bytes])
    count = indices.shape.dims[0]
    target = Scratch(node) if f32_sums else Pointer(node.output)
    args = [target, Pointer(indices), Pointer(updates), outer, size, inner, count]
    spec = Scatter(*dtypes, indices.dtype, combine)
    write = KernelLaunch(
        spec, [*args, Status(), NodeNumber(node)], [indices, updates],
        [] if f32_sums else node.outputs, uses_scratch=f32_sums, bytes=updates.shape.size_bytes * 2,
    )  # fmt: skip
    steps = [launch_for(node, ctx, start, (0, 0)), write]
    steps[0].bytes = x.shape.size_bytes * 2
    steps[0].copies_first = not f32_sums
    if f32_sums:
        steps.append(launch_for(node, ctx, copy(x.shape.dims, sums, result), (0, 0)))
    return steps


def write_at(node: Node) -> KernelLaunch:
    """Scatter the slices of a `state_update` to its slots."""
    op: Any = node.op
    state, update, slots = node.inputs
    outer, size, inner = _around_axis(state.shape, op.axis)
    bits = _UINT[state.dtype.bytes]
    args = [Pointer(state), Pointer(slots), Pointer(update), outer, size, inner]
    return KernelLaunch(
        Scatter(bits, bits, slots.dtype),
        [*args, slots.shape.dims[0], Status(), NodeNumber(node)],
        [update, slots], [state, *node.outputs], bytes=update.shape.size_bytes * 2,
    )  # fmt: skip


# -- cumsum -----------------------------------------------------------------------------------


@lowers("cumsum", "cumprod")
def lower_cumulative(node: Node, ctx: Context) -> list[KernelLaunch]:
    op: Any = node.op
    x, result = node.inputs[0], node.output
    outer, size, inner = _around_axis(x.shape, op.axis)
    source, target = x.dtype, result.dtype
    product = op.name == "cumprod"
    if source.is_complex and not product:  # real and imaginary parts are scanned side by side
        source, target, inner = source.part, target.part, inner * 2
    columns = inner != 1 and not source.is_complex
    spec = CumSum(source, target, op.exclusive, op.reverse, columns, product)
    args = [Pointer(x), Pointer(result), outer, size, inner]
    cost = op.cost([x.shape], [result.shape])
    return [KernelLaunch(spec, args, node.inputs, node.outputs, flops=cost.flops, bytes=cost.bytes)]
