"""Depthwise convolution: every filter has one input channel, so there is no GEMM.

Vectors are along the pixels of a row, or along channels where those are contiguous.
"""

from __future__ import annotations

from functools import partial

from rlx.backends.cpu.kernels.conv.windows import GEOMETRY, RowLoads, Windows, from_raw, raw_vector
from rlx.backends.cpu.kernels.spec import KernelSpec, Operands
from rlx.ir.dtype import DType
from rlx.llvm.builder import Function, Module, Value, vec
from rlx.llvm.storage import compute_type, load, memory_type, narrow
from rlx.support.records import dataclass


@dataclass(frozen=True)
class Depthwise(KernelSpec):
    """args: x, w, out, bias (if any), planes, filters, multiple, then GEOMETRY

    out[b, o] = Σ w[o, i, j] · in[b, o / multiple] under tap (i, j), + bias; `planes` are the
    filters of all images.
    """

    x: DType
    w: DType
    out: DType
    bias: DType | None
    taps_x: int
    dilation_x: int
    stride: int  # as in RowLoads

    @property
    def flushes_denormals(self) -> bool:
        return True

    @property
    def args(self) -> list[str]:
        names = ["x", "w", "out", *["bias"] * (self.bias is not None)]
        return [*names, "planes", "filters", "multiple", *GEOMETRY]

    def emit(self, m: Module) -> None:
        emitter = _Depthwise(self, m.kernel())
        emitter.emit(emitter.o["planes"])


class _Depthwise(Windows):
    def __init__(self, spec: Depthwise, f: Function) -> None:
        self.spec, self.sums = spec, compute_type(spec.out)
        o = Operands(f, spec.args, ("x", "w", "out", "bias"))
        loads = RowLoads(spec.x, self.sums, f.target.lanes(self.sums.bits), spec.stride)
        super().__init__(f, o, loads, spec.out, spec.taps_x, spec.dilation_x)

    def begin_plane(self, plane: Value) -> Value:
        f, o, spec = self.f, self.o, self.spec
        number = plane.urem(o["filters"])
        taps = number * (o["taps_y"] * spec.taps_x)
        self.weights = f.gep(o["w"], taps, memory_type(spec.w).bytes)
        self.first = f.const(0, vec(self.lanes, self.sums))
        if spec.bias is not None:
            address = f.gep(o["bias"], number, memory_type(spec.bias).bytes)
            self.first = f.splat(load(f, address, spec.bias, 1, self.sums), self.lanes)
        return plane.udiv(o["multiple"])

    def initial(self) -> Value:
        return self.first

    def accumulate(
        self, sums: list[Value], inputs: list[Value] | None, i: Value, j: Value
    ) -> list[Value]:
        # Zeros of the padding are multiplied too: an infinite weight gives NaN there.
        f, spec = self.f, self.spec
        address = f.gep(self.weights, i * spec.taps_x + j, memory_type(spec.w).bytes)
        weight = f.splat(load(f, address, spec.w, 1, self.sums), self.lanes)
        from_history = inputs or [f.const(0, weight.type)] * len(sums)
        return [f.fma(weight, x, total) for x, total in zip(from_history, sums, strict=True)]


@dataclass(frozen=True)
class CausalDepthwise(KernelSpec):
    """args: x [B, S, C], w [C, K], history [B, K-1, C], out [B, S, C], batch, seq,
    channels, segment

    out[b, s, c] = Σ_j w[c, j] · (history ⧺ x)[b, s + j, c]. A work item is `segment` tokens of a
    vector of channels; the last K - 1 tokens are loop-carried in registers.
    """

    x: DType
    w: DType
    history: DType
    out: DType
    taps: int

    @property
    def flushes_denormals(self) -> bool:
        return True

    def emit(self, m: Module) -> None:
        _Causal(self, m.kernel()).emit()


class _Causal:
    def __init__(self, spec: CausalDepthwise, f: Function) -> None:
        self.spec, self.f, self.sums = spec, f, compute_type(spec.out)
        self.lanes = f.target.lanes(self.sums.bits)
        names = ["x", "w", "history", "out", "batch", "seq", "channels", "segment"]
        self.o = Operands(f, names, names[:4])

    def emit(self) -> None:
        f, o = self.f, self.o
        blocks = f.ceil_div(o["channels"], self.lanes)
        segments = (o["seq"] + o["segment"] - 1).udiv(o["segment"])
        # Channels innermost, so that a worker reads contiguous memory.
        lo, hi = f.split(o["batch"] * segments * blocks)
        for item in f.range(lo, hi):
            c = item.urem(blocks) * self.lanes
            segment = item.udiv(blocks)
            sequence, first = segment.udiv(segments), segment.urem(segments) * o["segment"]
            last = f.min(first + o["segment"], o["seq"])
            whole = o["channels"] - c >= self.lanes
            f.if_(
                whole,
                partial(self._tokens, sequence, first, last, c, self.lanes),
                partial(self._rest, sequence, first, last, c),
            )

    def _rest(self, sequence: Value, first: Value, last: Value, c: Value) -> None:
        """The remaining channels, one by one."""
        for channel in self.f.range(c, self.o["channels"]):
            self._tokens(sequence, first, last, channel, 1)

    def _tokens(self, sequence: Value, first: Value, last: Value, c: Value, lanes: int) -> None:
        f, o, spec = self.f, self.o, self.spec
        weights = self._weights(c, lanes)
        history = [self._history(sequence, first + j, c, lanes) for j in range(spec.taps - 1)]
        start = sequence * o["seq"] * o["channels"] + c

        def token(s: Value, *history: Value) -> list[Value]:
            at = start + s * o["channels"]
            x = load(f, f.gep(o["x"], at, memory_type(spec.x)), spec.x, lanes, self.sums)
            window = [*history, x]
            total = window[0] * weights[0]
            for value, weight in zip(window[1:], weights[1:], strict=True):
                total = f.fma(value, weight, total)
            f.store(narrow(f, total, spec.out), f.gep(o["out"], at, memory_type(spec.out)))
            return window[1:]

        f.loop(first, last, 1, history, token)

    def _weights(self, c: Value, lanes: int) -> list[Value]:
        """One vector of weights per tap, deinterleaved from [C, K]."""
        f, spec = self.f, self.spec
        raw = memory_type(spec.w)
        base = f.gep(self.o["w"], c * spec.taps, raw)
        if lanes == 1:
            return [load(f, base, spec.w, 1, self.sums, j * raw.bytes) for j in range(spec.taps)]
        run = raw_vector(spec.w, lanes)
        vectors = [f.load(base, run, j * run.bytes) for j in range(spec.taps)]
        return [
            from_raw(f, f.deinterleave(vectors, j), spec.w, self.sums) for j in range(spec.taps)
        ]

    def _history(self, sequence: Value, token: Value, c: Value, lanes: int) -> Value:
        """Token number `token` of history ⧺ x."""
        f, o, past = self.f, self.o, self.spec.taps - 1

        def from_history() -> Value:
            at = (sequence * past + token) * o["channels"] + c
            return self._read(o["history"], at, self.spec.history, lanes)

        def from_input() -> Value:
            at = (sequence * o["seq"] + token - past) * o["channels"] + c
            return self._read(o["x"], at, self.spec.x, lanes)

        return f.if_(token < past, from_history, from_input)[0]

    def _read(self, base: Value, at: Value, dtype: DType, lanes: int) -> Value:
        return load(self.f, self.f.gep(base, at, memory_type(dtype)), dtype, lanes, self.sums)
