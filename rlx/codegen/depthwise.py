"""Convolutions in which every filter sees one channel: as many sums as outputs, no product.

Neighbouring pixels of a line, or neighbouring channels where those lie together, share a vector.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from rlx.codegen.emit import Function, Module, Value, vec
from rlx.codegen.kernel import KernelSpec
from rlx.codegen.line import Line, every, from_raw, raw_vector, store_some
from rlx.codegen.operands import Operands
from rlx.codegen.storage import compute_type, load, memory_type, narrow
from rlx.ir.dtype import DType

_GROUP = 4  # vectors of a line that share every weight they meet


@dataclass(frozen=True)
class Depthwise(KernelSpec):
    """words: x, w, out, bias where there is one, then the sizes that `words` names.

    out[b, o, y, x] = Σ w[o, i, j] · in[b, o / multiple, y·step_y + first_y + i·tap_y, …] + bias
    """

    x: DType
    w: DType
    out: DType
    bias: DType | None
    taps_x: int
    tap_x: int
    step: int  # as in Line

    @property
    def words(self) -> list[str]:
        names = ["x", "w", "out", *["bias"] * (self.bias is not None), "batch", "filters"]
        names += ["multiple", "height", "width", "lines", "columns", "step_y", "step_x"]
        return [*names, "taps_y", "first_y", "tap_y", "first_x"]

    def emit(self, m: Module) -> None:
        _Depthwise(self, m.kernel()).emit()


class _Depthwise:
    def __init__(self, spec: Depthwise, f: Function) -> None:
        self.spec, self.f, self.sums = spec, f, compute_type(spec.out)
        self.lanes = f.target.lanes(self.sums.bits)
        self.o = Operands(f, spec.words, ("x", "w", "out", "bias"))
        self.line = Line(spec.x, self.sums, self.lanes, spec.step)

    def emit(self) -> None:
        f, o = self.f, self.o
        lo, hi = f.split(o["batch"] * o["filters"] * o["lines"])
        none = o["lines"].eq(0)
        lines = f.select(none, 1, o["lines"])
        for plane in f.range(lo.udiv(lines), (hi + lines - 1).udiv(lines)):
            first = f.max(lo - plane * lines, 0)
            last = f.min(hi - plane * lines, lines)
            self._plane(plane, first, last)

    def _plane(self, plane: Value, first: Value, last: Value) -> None:
        """Lines [first, last) of a plane of results, one block of columns after the other."""
        f, o, spec = self.f, self.o, self.spec
        image, filter_ = plane.udiv(o["filters"]), plane.urem(o["filters"])
        channel = image * o["filters"].udiv(o["multiple"]) + filter_.udiv(o["multiple"])
        pixels = o["height"] * o["width"]
        self.image = f.gep(o["x"], channel * pixels, memory_type(spec.x).bytes)
        taps = filter_ * o["taps_y"] * spec.taps_x
        self.weights = f.gep(o["w"], taps, memory_type(spec.w).bytes)
        self.begin = f.const(0, vec(self.lanes, self.sums))
        if spec.bias is not None:
            address = f.gep(o["bias"], filter_, memory_type(spec.bias).bytes)
            self.begin = f.splat(load(f, address, spec.bias, 1, self.sums), self.lanes)
        results = plane * o["lines"] * o["columns"]
        self.out = f.gep(o["out"], results, memory_type(spec.out).bytes)
        f.while_([f.i64(0)], lambda x: x < o["columns"], lambda x: self._columns(x, first, last))

    def _columns(self, x: Value, first: Value, last: Value) -> Value:
        """The columns from x on that one set of vectors holds; gives the column after them."""
        f, o = self.f, self.o
        left = x * o["step_x"] + o["first_x"]
        right = left + (self.spec.taps_x - 1) * self.spec.tap_x

        def fits(vectors: int) -> Value:
            ahead = right + o["step_x"] * ((vectors - 1) * self.lanes)
            inside = self.line.is_inside(f, ahead, o["width"], o["step_x"])
            return (left >= 0) & inside & (o["columns"] - x >= vectors * self.lanes)

        def run(vectors: int, inside: bool) -> Value:
            starts = [left + o["step_x"] * (v * self.lanes) for v in range(vectors)]
            self._block(x, starts, first, last, inside)
            return x + vectors * self.lanes

        def one() -> list[Value]:
            return f.if_(fits(1), lambda: run(1, True), lambda: run(1, False))

        return f.if_(fits(_GROUP), lambda: run(_GROUP, True), one)[0]

    def _block(
        self, x: Value, starts: list[Value], first: Value, last: Value, inside: bool
    ) -> None:
        f, o, spec = self.f, self.o, self.spec
        # What depends on columns alone is found once for all lines.
        readers = []
        for j in range(spec.taps_x):
            for start in starts:
                at = start + j * spec.tap_x
                readers.append((at, self.line.reader(f, at, o["width"], o["step_x"], inside)))
        mask = None if inside else f.lane_mask(o["columns"] - x, self.lanes)
        element = memory_type(spec.out).bytes
        for y in f.range(first, last):
            top = y * o["step_y"] + o["first_y"]

            def line(i: Value, *sums: Value, top: Value = top) -> list[Value]:
                return self._line(i, top + i * o["tap_y"], readers, list(sums))

            sums = f.loop(0, o["taps_y"], 1, [self.begin] * len(starts), line)
            for v, total in enumerate(sums):
                place = y * o["columns"] + x + v * self.lanes
                store_some(f, total, f.gep(self.out, place, element), spec.out, mask)

    def _line(
        self,
        i: Value,
        y: Value,
        readers: list[tuple[Value, Callable[[Value], Value]]],
        sums: list[Value],
    ) -> list[Value]:
        """Row i of the taps over line y of the image."""
        f, o, spec = self.f, self.o, self.spec
        weight, size = memory_type(spec.w).bytes, memory_type(spec.x).bytes
        row = f.gep(self.weights, i * (spec.taps_x * weight))

        def taps(inputs: list[Value] | None) -> list[Value]:
            out = list(sums)
            for j in range(spec.taps_x):
                w = f.splat(load(f, row, spec.w, 1, self.sums, j * weight), self.lanes)
                for v in range(len(sums)):
                    x = f.const(0, w.type) if inputs is None else inputs[j * len(sums) + v]
                    out[v] = f.fma(w, x, out[v])
            return out

        def existing() -> list[Value]:
            line = y * o["width"]
            return taps([read(f.gep(self.image, line + at, size)) for at, read in readers])

        # Zeros are multiplied too: an infinite weight gives NaN there.
        return f.if_((y >= 0) & (y < o["height"]), existing, lambda: taps(None))


@dataclass(frozen=True)
class CausalDepthwise(KernelSpec):
    """words: x [B, S, C], w [C, K], before [B, K-1, C], out [B, S, C], batch, seq, channels, piece

    out[b, s, c] = Σ_j w[c, j] · (before ⧺ x)[b, s + j, c]. A worker takes `piece` tokens of a
    vector of channels at a time; the last K - 1 tokens stay in registers from one to the next.
    """

    x: DType
    w: DType
    before: DType
    out: DType
    taps: int

    def emit(self, m: Module) -> None:
        _Causal(self, m.kernel()).emit()


class _Causal:
    def __init__(self, spec: CausalDepthwise, f: Function) -> None:
        self.spec, self.f, self.sums = spec, f, compute_type(spec.out)
        self.lanes = f.target.lanes(self.sums.bits)
        names = ["x", "w", "before", "out", "batch", "seq", "channels", "piece"]
        self.o = Operands(f, names, names[:4])

    def emit(self) -> None:
        f, o = self.f, self.o
        blocks = f.ceil_div(o["channels"], self.lanes)
        pieces = (o["seq"] + o["piece"] - 1).udiv(o["piece"])
        # Neighbouring channels last, so that what one worker reads lies together.
        lo, hi = f.split(o["batch"] * pieces * blocks)
        for unit in f.range(lo, hi):
            c = unit.urem(blocks) * self.lanes
            part = unit.udiv(blocks)
            image, first = part.udiv(pieces), part.urem(pieces) * o["piece"]
            last = f.min(first + o["piece"], o["seq"])
            whole = o["channels"] - c >= self.lanes
            f.if_(
                whole,
                partial(self._tokens, image, first, last, c, self.lanes),
                partial(self._rest, image, first, last, c),
            )

    def _rest(self, image: Value, first: Value, last: Value, c: Value) -> None:
        """The channels that fill no vector, one by one."""
        for one in self.f.range(c, self.o["channels"]):
            self._tokens(image, first, last, one, 1)

    def _tokens(self, image: Value, first: Value, last: Value, c: Value, lanes: int) -> None:
        f, o, spec = self.f, self.o, self.spec
        weights = self._weights(c, lanes)
        history = [self._earlier(image, first + j, c, lanes) for j in range(spec.taps - 1)]
        start = image * o["seq"] * o["channels"] + c

        def token(s: Value, *before: Value) -> list[Value]:
            at = start + s * o["channels"]
            x = load(f, f.gep(o["x"], at, memory_type(spec.x)), spec.x, lanes, self.sums)
            window = [*before, x]
            total = window[0] * weights[0]
            for value, weight in zip(window[1:], weights[1:], strict=True):
                total = f.fma(value, weight, total)
            f.store(narrow(f, total, spec.out), f.gep(o["out"], at, memory_type(spec.out)))
            return window[1:]

        f.loop(first, last, 1, history, token)

    def _weights(self, c: Value, lanes: int) -> list[Value]:
        """One vector per tap, from the taps of neighbouring channels."""
        f, spec = self.f, self.spec
        raw = memory_type(spec.w)
        base = f.gep(self.o["w"], c * spec.taps, raw)
        if lanes == 1:
            return [load(f, base, spec.w, 1, self.sums, j * raw.bytes) for j in range(spec.taps)]
        run = raw_vector(spec.w, lanes)
        parts = [f.load(base, run, j * run.bytes) for j in range(spec.taps)]
        return [from_raw(f, every(f, parts, j), spec.w, self.sums) for j in range(spec.taps)]

    def _earlier(self, image: Value, token: Value, c: Value, lanes: int) -> Value:
        """Token number `token` of what was before, followed by x."""
        f, o, past = self.f, self.o, self.spec.taps - 1

        def given() -> Value:
            at = (image * past + token) * o["channels"] + c
            return self._read(o["before"], at, self.spec.before, lanes)

        def own() -> Value:
            at = (image * o["seq"] + token - past) * o["channels"] + c
            return self._read(o["x"], at, self.spec.x, lanes)

        return f.if_(token < past, given, own)[0]

    def _read(self, base: Value, at: Value, dtype: DType, lanes: int) -> Value:
        return load(self.f, self.f.gep(base, at, memory_type(dtype)), dtype, lanes, self.sums)
