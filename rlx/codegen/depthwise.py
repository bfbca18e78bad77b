"""Convolutions in which every filter sees one channel: as many sums as outputs, no product.

Neighbouring pixels of a line, or neighbouring channels where those lie together, share a vector.
"""

from __future__ import annotations

from functools import partial

from rlx.codegen.emit import Function, Module, Value, vec
from rlx.codegen.kernel import KernelSpec
from rlx.codegen.line import Line, every, from_raw, raw_vector
from rlx.codegen.operands import Operands
from rlx.codegen.storage import compute_type, load, memory_type, narrow
from rlx.codegen.windows import GEOMETRY, Windows
from rlx.ir.dtype import DType
from rlx.support.records import dataclass


@dataclass(frozen=True)
class Depthwise(KernelSpec):
    """args: x, w, out, bias where there is one, planes, filters, multiple, then GEOMETRY

    out[b, o] = Σ w[o, i, j] · in[b, o / multiple] under tap (i, j), + bias; `planes` are the
    filters of all images.
    """

    x: DType
    w: DType
    out: DType
    bias: DType | None
    taps_x: int
    tap_x: int
    step: int  # as in Line

    @property
    def args(self) -> list[str]:
        names = ["x", "w", "out", *["bias"] * (self.bias is not None)]
        return [*names, "planes", "filters", "multiple", *GEOMETRY]

    def emit(self, m: Module) -> None:
        walk = _Depthwise(self, m.kernel())
        walk.emit(walk.o["planes"])


class _Depthwise(Windows):
    def __init__(self, spec: Depthwise, f: Function) -> None:
        self.spec, self.sums = spec, compute_type(spec.out)
        o = Operands(f, spec.args, ("x", "w", "out", "bias"))
        line = Line(spec.x, self.sums, f.target.lanes(self.sums.bits), spec.step)
        super().__init__(f, o, line, spec.out, spec.taps_x, spec.tap_x)

    def enter(self, plane: Value) -> Value:
        f, o, spec = self.f, self.o, self.spec
        number = plane.urem(o["filters"])
        taps = number * (o["taps_y"] * spec.taps_x)
        self.weights = f.gep(o["w"], taps, memory_type(spec.w).bytes)
        self.first = f.const(0, vec(self.lanes, self.sums))
        if spec.bias is not None:
            address = f.gep(o["bias"], number, memory_type(spec.bias).bytes)
            self.first = f.splat(load(f, address, spec.bias, 1, self.sums), self.lanes)
        return plane.udiv(o["multiple"])

    def begin(self) -> Value:
        return self.first

    def tap(self, sums: list[Value], inputs: list[Value] | None, i: Value, j: Value) -> list[Value]:
        # Zeros outside the image are multiplied too: an infinite weight gives NaN there.
        f, spec = self.f, self.spec
        place = f.gep(self.weights, i * spec.taps_x + j, memory_type(spec.w).bytes)
        weight = f.splat(load(f, place, spec.w, 1, self.sums), self.lanes)
        given = inputs or [f.const(0, weight.type)] * len(sums)
        return [f.fma(weight, x, total) for x, total in zip(given, sums, strict=True)]


@dataclass(frozen=True)
class CausalDepthwise(KernelSpec):
    """args: x [B, S, C], w [C, K], before [B, K-1, C], out [B, S, C], batch, seq, channels, piece

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
