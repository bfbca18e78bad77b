"""FFT passes over many signals, one per lane (Stockham), their plan and twiddle tables.

Complex vectors are a vector of real parts and one of imaginary parts. A pass of radix r reads
x_k = x[q + run·(g + groups·k)], k < r, and writes y[q + run·(r·g + j)] = w^(g·j) · Σ_k x_k·W^(jk),
so that the output of the last pass is in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import cos, pi, sin, sqrt

import numpy as np
import numpy.typing as npt

from rlx.llvm.builder import Function, Module, Type, Value, f32, f64, i64, ptr, vec
from rlx.support.records import dataclass

MAX_RADIX = 61
Table = npt.NDArray[np.float32] | npt.NDArray[np.float64]


def factors(n: int) -> list[int]:
    """Radices of the passes: fours first, then the other prime factors in order."""
    found, rest = [], n
    for p in (4, 2, 3, 5):
        while rest % p == 0:
            found.append(p)
            rest //= p
    p = 7
    while p * p <= rest:
        while rest % p == 0:
            found.append(p)
            rest //= p
        p += 2
    return found + [rest] * (rest > 1)


def is_smooth(n: int) -> bool:
    return all(p <= MAX_RADIX for p in factors(n))


@dataclass(frozen=True)
class Pass:
    """One factor: `groups` sets of twiddles, each for `run` neighbouring butterflies."""

    radix: int
    groups: int
    run: int
    table: int  # offset of its twiddles, in complex numbers


@cache
def passes(n: int) -> tuple[Pass, ...]:
    found, run, table = [], 1, 0
    for radix in factors(n):
        groups = n // (run * radix)
        found.append(Pass(radix, groups, run, table))
        table += groups * (radix - 1)
        run *= radix
    return tuple(found)


def roots(n: int, powers: npt.NDArray[np.int64]) -> npt.NDArray[np.complex128]:
    """exp(−2πi·p/n); the angle is reduced in integers first."""
    found: npt.NDArray[np.complex128] = np.exp(-2j * np.pi * (powers % n) / n)
    return found


def twiddles(n: int, part: Type) -> Table:
    """For each pass, group g and j = 1 … radix − 1: exp(−2πi·g·j / (radix·groups))."""
    parts = [
        roots(p.radix * p.groups, np.arange(p.groups)[:, None] * np.arange(1, p.radix)).ravel()
        for p in passes(n)
    ]
    return as_pairs(np.concatenate([*parts, np.ones(1)]), part)


def as_pairs(values: npt.NDArray[np.complex128], part: Type) -> Table:
    """Complex numbers as interleaved pairs of f32 or f64."""
    if part is f64:
        return values.view(np.float64)
    return values.astype(np.complex64).view(np.float32)


@dataclass(frozen=True)
class Chirp:
    """Bluestein's convolution: its length and tables."""

    length: int
    chirp: Table  # exp(−πi·j²/n)
    kernel: Table  # the transform of the conjugate chirp, divided by the length


@cache
def chirp(n: int, part: Type) -> Chirp:
    length = 1
    while length < 2 * n - 1:
        length *= 2
    j = np.arange(n)
    w = roots(2 * n, j * j)
    other = np.zeros(length, np.complex128)
    other[:n] = w.conj()
    other[length - n + 1 :] = w[1:][::-1].conj()
    return Chirp(length, as_pairs(w, part), as_pairs(np.fft.fft(other) / length, part))


def working_length(n: int) -> int:
    """Buffer length of a transform of `n`, in complex numbers."""
    return n if is_smooth(n) else chirp(n, f32).length


Complex = tuple[Value, Value]


class Passes:
    """The pass functions of one module, one per radix, on numbers with f32 or f64 parts."""

    def __init__(self, m: Module, lanes: int, part: Type = f32) -> None:
        self.m, self.lanes, self.part = m, lanes, part
        self.type = vec(lanes, part)
        self.number_bytes = 2 * self.type.bytes
        self.functions: dict[int, Function] = {}

    def load(self, f: Function, base: Value, index: Value | int) -> Complex:
        address = f.gep(base, index, self.number_bytes)
        return f.load(address, self.type), f.load(address, self.type, self.type.bytes)

    def store(self, f: Function, value: Complex, base: Value, index: Value | int) -> None:
        address = f.gep(base, index, self.number_bytes)
        f.store(value[0], address)
        f.store(value[1], address, self.type.bytes)

    def constant(self, f: Function, table: Value, index: Value | int) -> Complex:
        """An element of a table of pairs, broadcast to all lanes."""
        part = self.part
        address = f.gep(table, index, 2 * part.bytes)
        return f.broadcast_load(address, part, self.lanes), f.broadcast_load(
            address, part, self.lanes, part.bytes
        )

    def of(self, radix: int) -> Function:
        """void pass(ptr from, ptr to, ptr table, i64 groups, i64 run)"""
        if radix not in self.functions:
            params = [("from", ptr), ("to", ptr), ("table", ptr), ("groups", i64), ("run", i64)]
            f = self.m.function(f"radix{radix}", params, internal=True)
            self.functions[radix] = f
            body = self._butterflies if radix in _BUTTERFLIES else self._generic_radix
            body(f, radix)
        return self.functions[radix]

    def _butterflies(self, f: Function, radix: int) -> None:
        span = f["groups"] * f["run"]
        for g in f.range(0, f["groups"]):
            w = [self.constant(f, f["table"], g * (radix - 1) + j) for j in range(radix - 1)]
            for q in f.range(0, f["run"]):
                at = g * f["run"] + q
                x = [self.load(f, f["from"], at + span * k) for k in range(radix)]
                out = _BUTTERFLIES[radix](x)
                first = g * f["run"] * radix + q
                for j, value in enumerate(out):
                    rotated = value if j == 0 else multiply(value, w[j - 1])
                    self.store(f, rotated, f["to"], first + f["run"] * j)

    def _generic_radix(self, f: Function, radix: int) -> None:
        """A larger prime radix: every output is a sum over all inputs."""
        table = self.m.table(f, as_pairs(roots(radix, np.arange(radix)), self.part).tobytes())
        span = f["groups"] * f["run"]
        zero = f.const(0, self.type)
        for g in f.range(0, f["groups"]):
            for j in f.range(0, radix):
                power = f.max(g * (radix - 1) + j - 1, 0)
                w = self.constant(f, f["table"], power)
                first = j.eq(0)
                w = f.select(first, f.const(1.0, self.type), w[0]), f.select(first, zero, w[1])
                for q in f.range(0, f["run"]):
                    start = g * f["run"] + q

                    def term(
                        k: Value, re: Value, im: Value, j: Value = j, start: Value = start
                    ) -> Complex:
                        x = self.load(f, f["from"], start + span * k)
                        root = self.constant(f, table, (j * k).urem(radix))
                        return add((re, im), multiply(x, root))

                    total = f.loop(0, radix, 1, [zero, zero], term)
                    address = (g * radix + j) * f["run"] + q
                    self.store(f, multiply((total[0], total[1]), w), f["to"], address)


def add(a: Complex, b: Complex) -> Complex:
    return a[0] + b[0], a[1] + b[1]


def subtract(a: Complex, b: Complex) -> Complex:
    return a[0] - b[0], a[1] - b[1]


def multiply(a: Complex, b: Complex) -> Complex:
    f = a[0].fn
    return f.fma(a[0], b[0], -(a[1] * b[1])), f.fma(a[0], b[1], a[1] * b[0])


def _scale(a: Complex, by: float) -> Complex:
    return a[0] * by, a[1] * by


def _times_minus_i(a: Complex) -> Complex:
    """−i·a"""
    return a[1], -a[0]


def _radix2(x: Sequence[Complex]) -> list[Complex]:
    return [add(x[0], x[1]), subtract(x[0], x[1])]


def _radix4(x: Sequence[Complex]) -> list[Complex]:
    even, odd = _radix2([x[0], x[2]]), _radix2([x[1], x[3]])
    rotated = _times_minus_i(odd[1])
    return [
        add(even[0], odd[0]),
        add(even[1], rotated),
        subtract(even[0], odd[0]),
        subtract(even[1], rotated),
    ]


def _radix3(x: Sequence[Complex]) -> list[Complex]:
    total, difference = add(x[1], x[2]), _scale(_times_minus_i(subtract(x[1], x[2])), sqrt(3) / 2)
    middle = add(x[0], _scale(total, -0.5))
    return [add(x[0], total), add(middle, difference), subtract(middle, difference)]


def _radix5(x: Sequence[Complex]) -> list[Complex]:
    c1, c2 = cos(2 * pi / 5), cos(4 * pi / 5)
    s1, s2 = sin(2 * pi / 5), sin(4 * pi / 5)
    near, far = add(x[1], x[4]), add(x[2], x[3])
    near_apart, far_apart = subtract(x[1], x[4]), subtract(x[2], x[3])
    first = add(x[0], add(_scale(near, c1), _scale(far, c2)))
    second = add(x[0], add(_scale(near, c2), _scale(far, c1)))
    turn1 = _times_minus_i(add(_scale(near_apart, s1), _scale(far_apart, s2)))
    turn2 = _times_minus_i(subtract(_scale(near_apart, s2), _scale(far_apart, s1)))
    return [
        add(x[0], add(near, far)),
        add(first, turn1),
        add(second, turn2),
        subtract(second, turn2),
        subtract(first, turn1),
    ]


_BUTTERFLIES = {2: _radix2, 3: _radix3, 4: _radix4, 5: _radix5}
