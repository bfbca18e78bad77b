"""Backward of norms over rows: dx row by row, and sums over rows for gamma and beta.

Rows are in parts, whose number depends on the number of rows alone. A worker adds up the rows of a
part in order, in scratch memory; a second launch adds up the parts in order. So the sums have the
same bits for any number of workers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

from rlx.backends.cpu.kernels.spec import KernelSpec, Operands
from rlx.backends.cpu.lowering import Context, KernelArg, KernelLaunch, Pointer, Scratch, lowers
from rlx.ir.dim import upper_bound
from rlx.ir.dtype import DType
from rlx.ir.lir import aligned
from rlx.ir.node import Node
from rlx.llvm.builder import Function, Module, Type, Value, f32, f64, vec
from rlx.llvm.storage import load, memory_type, store
from rlx.llvm.target import Target
from rlx.support.records import dataclass

_PARTS = 64  # at most
_LEAST = 8  # rows of a part
_UNROLL = 4  # vectors whose sums are independent

_POINTERS = ("x", "gamma", "dy", "dsum", "dx", "parts", "dgamma", "dbeta")


def _parts(f: Function, rows: Value) -> tuple[Value, Value]:
    """(rows of a part, number of parts)"""
    each = f.max(f.ceil_div(rows, _PARTS), _LEAST)
    return each, (rows + each - 1).udiv(each)


@dataclass(frozen=True)
class NormBackward(KernelSpec):
    """args: x, gamma, dy, dsum (if any), dx, parts, rows, size

    `parts` is [part][dgamma, dbeta if any][size], in the type of sums.
    """

    x: DType
    gamma: DType
    dy: DType
    dsum: DType | None
    centered: bool
    beta: bool
    eps: float

    @property
    def sums(self) -> Type:
        return f64 if any(t.bits == 64 for t in (self.x, self.gamma, self.dy)) else f32

    def emit(self, m: Module) -> None:
        f = m.kernel()
        more = ["dsum"] if self.dsum is not None else []
        names = ["x", "gamma", "dy", *more, "dx", "parts", "rows", "size"]
        _Rows(self, f, Operands(f, names, _POINTERS)).emit()


class _Rows:
    def __init__(self, spec: NormBackward, f: Function, o: Operands) -> None:
        self.spec, self.f, self.o = spec, f, o
        self.size, self.type = o["size"], spec.sums
        self.lanes = f.target.lanes(self.type.bits)

    def emit(self) -> None:
        f, o = self.f, self.o
        each, count = _parts(f, o["rows"])
        lo, hi = f.split(count)
        for part in f.range(lo, hi):
            sums = f.gep(o["parts"], part * self.size * (1 + self.spec.beta), self.type)
            for lanes, first, end in self._pieces(self.size * (1 + self.spec.beta)):
                for i in f.range(first, end, lanes):
                    f.store(f.const(0, vec(lanes, self.type)), f.gep(sums, i, self.type))
            start = part * each
            for row in f.range(start, f.min(start + each, o["rows"])):
                self._row(row * self.size, sums)

    def _pieces(self, size: Value) -> list[tuple[int, Value, Value]]:
        """(lanes, first, end) of whole vectors and of what is left."""
        whole = size & -self.lanes
        return [(self.lanes, self.f.i64(0), whole), (1, whole, size)]

    def _load(self, name: str, at: Value, lanes: int) -> Value:
        dtype: DType = getattr(self.spec, name)
        place = self.f.gep(self.o[name], at, memory_type(dtype))
        return load(self.f, place, dtype, lanes, self.type)

    def _sums(self, count: int, terms: Callable[[Value, int], Sequence[Value]]) -> list[Value]:
        """Sums over a row of `count` terms of each element."""
        f, lanes = self.f, self.lanes
        step = lanes * _UNROLL
        most = self.size & -step
        wide = f.carry([f.const(0, vec(lanes, self.type))] * (count * _UNROLL))
        for i in wide.range(0, most, step):
            found = [t for u in range(_UNROLL) for t in terms(i + u * lanes, lanes)]
            wide.values = [a + b for a, b in zip(wide.values, found, strict=True)]
        totals = [wide.values[k::count] for k in range(count)]
        one = f.carry([(t[0] + t[1]) + (t[2] + t[3]) for t in totals])
        whole = self.size & -lanes
        for i in one.range(most, whole, lanes):
            one.values = [a + b for a, b in zip(one.values, terms(i, lanes), strict=True)]
        last = f.carry([f.reduce("add", v) for v in one.values])
        for i in last.range(whole, self.size):
            last.values = [a + b for a, b in zip(last.values, terms(i, 1), strict=True)]
        return last.values

    def _row(self, row: Value, sums: Value) -> None:
        f, spec = self.f, self.spec
        count = self.size.to(self.type)
        mean = f.const(0, self.type)
        if spec.centered:
            mean = self._sums(1, lambda i, n: [self._load("x", row + i, n)])[0] / count

        def centered(i: Value, lanes: int) -> Value:
            x = self._load("x", row + i, lanes)
            return x - f.splat(mean, lanes) if spec.centered else x

        def scaled(i: Value, lanes: int) -> Value:
            return self._load("dy", row + i, lanes) * self._load("gamma", i, lanes)

        def terms(i: Value, lanes: int) -> list[Value]:
            low, cotangent = centered(i, lanes), scaled(i, lanes)
            return [low * low, low * cotangent, *[cotangent] * spec.centered]

        square, along, *total = self._sums(2 + spec.centered, terms)
        inverse = 1.0 / f.sqrt(square / count + spec.eps)
        # dx = inverse · scaled − low · factor − shift
        factor = inverse * inverse * inverse * (along / count)
        shift = inverse * (total[0] / count) if total else None
        for lanes, first, end in self._pieces(self.size):
            numbers = [f.splat(v, lanes) for v in (inverse, factor)]
            shifts = None if shift is None else f.splat(shift, lanes)
            for i in f.range(first, end, lanes):
                low, dy = centered(i, lanes), self._load("dy", row + i, lanes)
                dx = dy * self._load("gamma", i, lanes) * numbers[0] - low * numbers[1]
                dx = dx if shifts is None else dx - shifts
                if spec.dsum is not None:
                    dx = dx + self._load("dsum", row + i, lanes)
                store(f, dx, f.gep(self.o["dx"], row + i, memory_type(spec.x)), spec.x)
                self._add(dy * (low * numbers[0]), sums, i)
                if spec.beta:
                    self._add(dy, sums, i + self.size)

    def _add(self, value: Value, sums: Value, at: Value) -> None:
        place = self.f.gep(sums, at, self.type)
        self.f.store(self.f.load(place, value.type) + value, place)


@dataclass(frozen=True)
class AddParts(KernelSpec):
    """args: parts, dgamma, dbeta (if any), rows, size"""

    sums: DType
    gamma: DType
    beta: bool

    def emit(self, m: Module) -> None:
        f = m.kernel()
        results = ["dgamma", *["dbeta"] * self.beta]
        o = Operands(f, ["parts", *results, "rows", "size"], _POINTERS)
        size, type_ = o["size"], memory_type(self.sums)
        _, count = _parts(f, o["rows"])
        lanes = f.target.lanes(type_.bits)
        lo, hi = f.split(size, lanes)
        whole = lo + (hi - lo & -lanes)
        step = size * len(results)
        for number, name in enumerate(results):
            for n, first, end in ((lanes, lo, whole), (1, whole, hi)):
                for i in f.range(first, end, n):
                    total = f.carry([f.const(0, vec(n, type_))])
                    for part in total.range(0, count):
                        at = part * step + (i + size * number)
                        more = f.load(f.gep(o["parts"], at, type_), total.values[0].type)
                        total.values = [total.values[0] + more]
                    to = f.gep(o[name], i, memory_type(self.gamma))
                    store(f, total.values[0], to, self.gamma)


def _spec(node: Node) -> NormBackward:
    op: Any = node.op
    x, gamma, dy, *more = (v.dtype for v in node.inputs)
    dsum = more[0] if more else None
    return NormBackward(x, gamma, dy, dsum, op.centered, op.has_beta, op.eps)


def _scratch(node: Node, target: Target, threads: int) -> int:
    size = upper_bound(node.inputs[1].shape.num_elements, node.graph.live)
    return aligned(_PARTS * size * 2 * _spec(node).sums.bytes)


@lowers("rms_norm_backward", "layer_norm_backward", scratch=_scratch)
def lower_norm_backward(node: Node, ctx: Context) -> list[KernelLaunch]:
    spec = _spec(node)
    dx, *sums = node.outputs
    *others, size = dx.shape.dims
    sizes: list[KernelArg] = [prod(others, start=1), size]
    rows = [*map(Pointer, (*node.inputs, dx)), Scratch(node), *sizes]
    first = KernelLaunch(spec, rows, node.inputs, [dx], uses_scratch=True)
    add = AddParts(DType.of(f"f{spec.sums.bits}"), spec.gamma, spec.beta)
    args = [Scratch(node), *map(Pointer, sums), *sizes]
    return [first, KernelLaunch(add, args, [], sums, uses_scratch=True)]
