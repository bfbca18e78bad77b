"""Batched FFT: each lane of a vector is a signal.

A group of signals is loaded into scratch memory, transformed pass by pass between two buffers
(Stockham), and stored. The inverse is the same transform with real and imaginary parts swapped. A
real signal of even length is transformed as a complex one of half the length.

Lengths known only at run time take the transform by its definition. The factors exp(−2πi·jk/n) of
one output are powers of one root, computed in f64 by repeated multiplication: a million of them
are still accurate to 1e-10.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import pi

import numpy as np

from rlx.backends.cpu.kernels.linalg.fft_passes import (
    Complex,
    Passes,
    Table,
    add,
    as_pairs,
    chirp,
    is_smooth,
    multiply,
    passes,
    roots,
    subtract,
    twiddles,
    working_length,
)
from rlx.backends.cpu.kernels.spec import KernelSpec, Operands
from rlx.ir.dtype import DType
from rlx.llvm.builder import Function, Module, Type, Value, f32, f64, i64, vec
from rlx.llvm.math import cos, sin
from rlx.llvm.storage import load, memory_type
from rlx.llvm.target import Target
from rlx.support.records import dataclass


@dataclass(frozen=True)
class Dft(KernelSpec):
    """args: x, y, outer, n, inner

    As Fft, with `kind` "complex", "real", "rfft" or "irfft".
    """

    kind: str
    dtype: DType
    inverse: bool

    args = ("x", "y", "outer", "n", "inner")

    def emit(self, m: Module) -> None:
        _Dft(self, m.kernel()).emit()


class _Dft:
    def __init__(self, spec: Dft, f: Function) -> None:
        self.spec, self.f, self.part = spec, f, part_type(spec.dtype)
        self.o = Operands(f, spec.args, ("x", "y"))

    def emit(self) -> None:
        f, o, spec = self.f, self.o, self.spec
        half = o["n"].udiv(2) + 1
        terms = half if spec.kind == "rfft" else o["n"]
        given = half if spec.kind == "irfft" else o["n"]
        lo, hi = f.split(o["outer"] * terms * o["inner"])
        for at in f.range(lo, hi):
            rest, i = at.udiv(o["inner"]), at.urem(o["inner"])
            image, k = rest.udiv(terms), rest.urem(terms)
            re, im = self._term(image * given * o["inner"] + i, k)
            if spec.inverse:
                scale = 1.0 / o["n"].to(f64)
                re, im = re * scale, im * scale
            if spec.kind == "irfft":
                f.store(re.to(self.part), f.gep(o["y"], at, self.part))
            else:
                pair = f.concat(re.to(self.part), im.to(self.part))
                f.store(pair, f.gep(o["y"], at, 2 * self.part.bytes))

    def _term(self, start: Value, k: Value) -> tuple[Value, Value]:
        f, o = self.f, self.o
        sign = 1.0 if self.spec.inverse else -1.0
        angle = k.to(f64) / o["n"].to(f64) * (2 * pi * sign)
        step_re, step_im = cos(angle), sin(angle)

        def add(j: Value, *sums: Value) -> list[Value]:
            total_re, total_im, w_re, w_im = sums
            x_re, x_im = self._element(start, j)
            total_re = total_re + (x_re * w_re - x_im * w_im)
            total_im = total_im + (x_re * w_im + x_im * w_re)
            rotated = w_re * step_re - w_im * step_im, w_re * step_im + w_im * step_re
            return [total_re, total_im, *rotated]

        zero, one = f.const(0, f64), f.const(1.0, f64)
        re, im, _, _ = f.loop(0, o["n"], 1, [zero, zero, one, zero], add)
        return re, im

    def _element(self, start: Value, j: Value) -> tuple[Value, Value]:
        """Element j of the signal, or of the full spectrum (by conjugate symmetry)."""
        f, o, spec = self.f, self.o, self.spec
        if spec.kind in ("real", "rfft"):
            address = f.gep(o["x"], start + j * o["inner"], memory_type(spec.dtype))
            return load(f, address, spec.dtype, 1, f64), f.const(0, f64)
        mirrored = f.i64(0)
        if spec.kind == "irfft":
            mirrored = (j * 2 > o["n"]).to(i64, signed=False)
            j = f.select(mirrored.ne(0), o["n"] - j, j)
        address = f.gep(o["x"], start + j * o["inner"], 2 * self.part.bytes)
        pair = f.load(address, vec(2, self.part))
        re, im = f.extract(pair, 0).to(f64), f.extract(pair, 1).to(f64)
        if spec.kind == "irfft":
            im = f.select(mirrored.ne(0), -im, im)
            is_real = j.eq(0) | (j * 2).eq(o["n"])  # the imaginary part is ignored there
            im = f.select(is_real, 0.0, im)
        return re, im


def part_type(dtype: DType) -> Type:
    """The type that the parts of results have, and that transforms are computed in."""
    return f64 if dtype.part.bits == 64 else f32


_BLOCK = 32  # elements of each signal that are copied before the next signal
_BUFFER = 4 << 20  # limit of a buffer in bytes; long signals use fewer lanes


@dataclass(frozen=True)
class Fft(KernelSpec):
    """args: x, y, scratch, scratch_bytes, outer, inner

    `kind`: "complex" and "real" (all n outputs), "rfft" or "irfft", of `n` points along the
    middle axis of [outer, n, inner]. `scratch` holds `scratch_bytes` for each worker.
    """

    kind: str
    n: int
    dtype: DType  # of x
    inverse: bool
    lanes: int
    single_inner: bool = False  # inner is 1: signals are never interleaved

    args = ("x", "y", "scratch", "scratch_bytes", "outer", "inner")

    @staticmethod
    def make(
        kind: str,
        n: int,
        dtype: DType,
        inverse: bool,
        target: Target,
        signals: int,
        single_inner: bool,
    ) -> Fft:
        """The spec for at most `signals` signals."""
        part = part_type(dtype)
        lanes = target.lanes(part.bits)
        size = working_length(_complex_length(kind, n)) * 2 * part.bytes
        while lanes > 1 and (lanes >= 2 * signals or lanes * size > _BUFFER):
            lanes //= 2
        return Fft(kind, n, dtype, inverse, lanes, single_inner)

    @property
    def points(self) -> int:
        """Length of the complex transform."""
        return _complex_length(self.kind, self.n)

    @property
    def buffer(self) -> int:
        """Bytes of one of the two buffers; a half spectrum has one more element."""
        return (working_length(self.points) + 1) * self.lanes * 2 * part_type(self.dtype).bytes

    @property
    def scratch(self) -> int:
        return 2 * (-(-self.buffer // 64) * 64)

    def emit(self, m: Module) -> None:
        _Fft(self, m).emit()


def _complex_length(kind: str, n: int) -> int:
    return n // 2 if kind in ("rfft", "irfft") and n % 2 == 0 else n


class _Fft:
    def __init__(self, spec: Fft, m: Module) -> None:
        self.spec, self.m, self.part = spec, m, part_type(spec.dtype)
        self.passes = Passes(m, spec.lanes, self.part)
        self.half_length = spec.points != spec.n
        inner_length = (
            spec.points if is_smooth(spec.points) else chirp(spec.points, self.part).length
        )
        self.plan = passes(inner_length)
        for p in self.plan:
            self.passes.of(p.radix)
        self.f = m.kernel()
        self.o = Operands(self.f, spec.args, ("x", "y", "scratch"))
        self.twiddle_table = m.table(self.f, twiddles(inner_length, self.part).tobytes())

    def constants(self, values: Table) -> Value:
        return self.m.table(self.f, values.tobytes())

    def emit(self) -> None:
        f, o, spec = self.f, self.o, self.spec
        src = f.gep(o["scratch"], f["tid"].to(i64) * o["scratch_bytes"])
        dst = f.gep(src, spec.scratch // 2)
        signals = o["outer"] * o["inner"]
        lo, hi = f.split(signals, spec.lanes)
        for first in f.range(lo, hi, spec.lanes):
            count = f.min(hi - first, spec.lanes)
            a, b = src, dst
            self._load_group(first, count, a)
            if spec.kind == "irfft":
                a, b = self._merge_half_spectrum(a, b)
            a, b = self._transform(a, b)
            if spec.kind == "rfft" and self.half_length:
                a, b = self._split_half_spectrum(a, b)
            self._store_group(first, count, a)

    # -- the transform ----------------------------------------------------------------------------

    def _run(self, a: Value, b: Value) -> tuple[Value, Value]:
        """All passes. Returns the buffer of the result, and the other one."""
        f = self.f
        for p in self.plan:
            w = f.gep(self.twiddle_table, p.table * 2 * self.part.bytes)
            f.call(self.passes.functions[p.radix], a, b, w, f.i64(p.groups), f.i64(p.run))
            a, b = b, a
        return a, b

    def _transform(self, a: Value, b: Value) -> tuple[Value, Value]:
        n = self.spec.points
        return self._run(a, b) if is_smooth(n) else self._bluestein(a, b, n)

    def _bluestein(self, a: Value, b: Value, n: int) -> tuple[Value, Value]:
        """Bluestein: multiply by the chirp, convolve with its conjugate, multiply again."""
        f, plan = self.f, chirp(n, self.part)
        chirp_table, kernel = self.constants(plan.chirp), self.constants(plan.kernel)
        zero = f.const(0, self.passes.type)
        self._each(n, a, lambda k, x: multiply(x, self.passes.constant(f, chirp_table, k)))
        for k in f.range(n, plan.length):
            self.passes.store(f, (zero, zero), a, k)
        a, b = self._run(a, b)
        # With swapped parts, the inverse is another forward transform.
        self._each(
            plan.length,
            a,
            lambda k, x: _swap_parts(multiply(x, self.passes.constant(f, kernel, k))),
        )
        a, b = self._run(a, b)
        self._each(
            n, a, lambda k, x: multiply(_swap_parts(x), self.passes.constant(f, chirp_table, k))
        )
        return a, b

    def _each(self, count: int, a: Value, change: Callable[[Value, Complex], Complex]) -> None:
        f = self.f
        for k in f.range(0, count):
            self.passes.store(f, change(k, self.passes.load(f, a, k)), a, k)

    # -- real signals of even length: x[2j] + i·x[2j + 1] as half as many complex numbers ---------

    def _split_half_spectrum(self, a: Value, b: Value) -> tuple[Value, Value]:
        """X[k] = (Z[k] + Z*[m−k] − i·w^k·(Z[k] − Z*[m−k])) / 2, k = 0 … m"""
        f, m = self.f, self.spec.points
        twiddle_table = self.constants(as_pairs(roots(2 * m, np.arange(m + 1)), self.part))
        self.passes.store(f, self.passes.load(f, a, 0), a, m)
        for k in f.range(0, m + 1):
            z, mirror = self.passes.load(f, a, k), _conjugate(self.passes.load(f, a, m - k))
            odd = multiply(subtract(z, mirror), self.passes.constant(f, twiddle_table, k))
            value = add(add(z, mirror), (odd[1], -odd[0]))
            self.passes.store(f, (value[0] * 0.5, value[1] * 0.5), b, k)
        return b, a

    def _merge_half_spectrum(self, a: Value, b: Value) -> tuple[Value, Value]:
        """The full complex spectrum from its first half in `a`, with parts swapped."""
        f, n, m = self.f, self.spec.n, self.spec.points
        self._drop_imaginary(a)
        if not self.half_length:
            for k in f.range(1, n // 2 + 1):
                self.passes.store(f, _conjugate(self.passes.load(f, a, k)), a, n - k)
            self._each(n, a, lambda k, x: _swap_parts(x))
            return a, b
        # Z[k] = X[k] + X*[m−k] + i·w^−k·(X[k] − X*[m−k]); the factor 1/2 is left for the end
        twiddle_table = self.constants(as_pairs(roots(n, -np.arange(m)), self.part))
        for k in f.range(0, m):
            x, mirror = self.passes.load(f, a, k), _conjugate(self.passes.load(f, a, m - k))
            odd = multiply(subtract(x, mirror), self.passes.constant(f, twiddle_table, k))
            value = add(add(x, mirror), (-odd[1], odd[0]))
            self.passes.store(f, _swap_parts(value), b, k)
        return b, a

    def _drop_imaginary(self, a: Value) -> None:
        """Clear the imaginary parts of X[0], and of X[n/2] of an even length: they are ignored."""
        f, zero = self.f, self.f.const(0, self.passes.type)
        for k in {0, self.spec.n // 2} if self.spec.n % 2 == 0 else {0}:
            self.passes.store(f, (self.passes.load(f, a, k)[0], zero), a, k)

    # -- loads and stores -------------------------------------------------------------------------

    def _load_group(self, first: Value, count: Value, a: Value) -> None:
        spec = self.spec
        terms = spec.n // 2 + 1 if spec.kind == "irfft" else spec.points
        length = spec.n // 2 + 1 if spec.kind == "irfft" else spec.n
        self._for_each_element(first, count, terms, length, partial(self._load_element, a))

    def _load_element(self, a: Value, at: Value, k: Value, lane: Value, lanes: int) -> None:
        """Load element k of the signals from element `at` on, into lanes from `lane` on."""
        spec, inner = self.spec, self.o["inner"]
        if spec.kind in ("complex", "irfft"):
            value = self._pairs(at + k * inner, lanes)
        elif self.half_length:
            src = at + k * 2 * inner
            value = self._reals(src, lanes), self._reals(src + inner, lanes)
        else:
            zero = self.f.const(0, vec(lanes, self.part))
            value = self._reals(at + k * inner, lanes), zero
        if spec.inverse and spec.kind != "irfft":
            value = _swap_parts(value)
        address = self._address(a, k, lane)
        self.f.store(value[0], address)
        self.f.store(value[1], address, self.passes.type.bytes)

    def _address(self, a: Value, k: Value, lane: Value) -> Value:
        return self.f.gep(self.f.gep(a, k, self.passes.number_bytes), lane, self.part)

    def _pairs(self, at: Value, lanes: int) -> Complex:
        f, type_ = self.f, vec(lanes, self.part)
        address = f.gep(self.o["x"], at, 2 * self.part.bytes)
        parts = [f.load(address, type_), f.load(address, type_, type_.bytes)]
        return f.deinterleave(parts, 0), f.deinterleave(parts, 1)

    def _reals(self, at: Value, lanes: int) -> Value:
        dtype = self.spec.dtype
        address = self.f.gep(self.o["x"], at, memory_type(dtype))
        return load(self.f, address, dtype, lanes, self.part)

    def _store_group(self, first: Value, count: Value, a: Value) -> None:
        spec = self.spec
        half = spec.n // 2 + 1
        terms = {"rfft": half, "irfft": spec.points}.get(spec.kind, spec.n)
        length = half if spec.kind == "rfft" else spec.n
        self._for_each_element(first, count, terms, length, partial(self._store_element, a))

    def _store_element(self, a: Value, at: Value, k: Value, lane: Value, lanes: int) -> None:
        """Store element k of `lanes` signals to the elements from `at` on."""
        f, spec, inner, type_ = self.f, self.spec, self.o["inner"], vec(lanes, self.part)
        address = self._address(a, k, lane)
        value = f.load(address, type_), f.load(address, type_, self.passes.type.bytes)
        if spec.inverse:
            value = value[1] * (1 / spec.n), value[0] * (1 / spec.n)
        if spec.kind != "irfft":
            both = f.concat(*value) if lanes == 1 else f.interleave(*value)
            f.store(both, f.gep(self.o["y"], at + k * inner, 2 * self.part.bytes))
        elif self.half_length:
            src = at + k * 2 * inner
            f.store(value[0], f.gep(self.o["y"], src, self.part))
            f.store(value[1], f.gep(self.o["y"], src + inner, self.part))
        else:
            f.store(value[0], f.gep(self.o["y"], at + k * inner, self.part))

    def _for_each_element(
        self,
        first: Value,
        count: Value,
        terms: int,
        length: int,
        each: Callable[[Value, Value, Value, int], None],
    ) -> None:
        """Call `each` for all elements of a group: all lanes at once if contiguous, else one."""
        f, inner, lanes = self.f, self.o["inner"], self.spec.lanes

        def start(signal: Value) -> Value:
            return signal.udiv(inner) * (inner * length) + signal.urem(inner)

        def contiguous() -> None:
            at = start(first)
            for k in f.range(0, terms):
                each(at, k, f.i64(0), lanes)

        def strided() -> None:
            # Blocked over the signals, so that their cache lines stay cached.
            for block in f.range(0, terms, _BLOCK):
                end = f.min(block + _BLOCK, terms)
                for lane in f.range(0, count):
                    at = start(first + lane)
                    for k in f.range(block, end):
                        each(at, k, lane, 1)

        if self.spec.single_inner or lanes == 1:
            strided()
        else:
            is_contiguous = (first.urem(inner) + lanes <= inner) & count.eq(lanes)
            f.if_(is_contiguous, contiguous, strided)


def _swap_parts(a: Complex) -> Complex:
    return a[1], a[0]


def _conjugate(a: Complex) -> Complex:
    return a[0], -a[1]
