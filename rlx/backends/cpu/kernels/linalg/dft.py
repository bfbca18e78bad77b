"""The discrete Fourier transform by its definition, for lengths known only at run time.

The factors exp(−2πi·jk/n) of one output are powers of one root, computed in f64 by repeated
multiplication: a million of them are still accurate to 1e-10.
"""

from __future__ import annotations

from math import pi

from rlx.backends.cpu.kernels.spec import KernelSpec, Operands
from rlx.ir.dtype import DType
from rlx.llvm.builder import Function, Module, Value, f32, f64, i64, vec
from rlx.llvm.math import cos, sin
from rlx.llvm.storage import load, memory_type
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
        self.spec, self.f = spec, f
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
                f.store(re.to(f32), f.gep(o["y"], at, f32))
            else:
                f.store(f.concat(re.to(f32), im.to(f32)), f.gep(o["y"], at, 8))

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
        pair = f.load(f.gep(o["x"], start + j * o["inner"], 8), vec(2, f32))
        re, im = f.extract(pair, 0).to(f64), f.extract(pair, 1).to(f64)
        if spec.kind == "irfft":
            im = f.select(mirrored.ne(0), -im, im)
            is_real = j.eq(0) | (j * 2).eq(o["n"])  # the imaginary part is ignored there
            im = f.select(is_real, 0.0, im)
        return re, im
