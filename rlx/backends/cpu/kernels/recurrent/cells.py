"""LSTM and GRU: a launch that repeats itself, a step of the sequence each time.

A worker computes the same blocks of units in every step, so that their weights stay in its cache.
A tile is a few rows of the batch against the gates of one block: sums over the units of the step
before, then the functions of the gates. Terms are added one after the other, whatever the tile, so
that a row's numbers do not depend on the batch.

The kernel returns the distance to the next launch: 0 is itself, behind a barrier.
"""

from __future__ import annotations

from rlx.backends.cpu.kernels.spec import KernelSpec, Operands
from rlx.llvm.builder import Function, Module, Value, f32, i64, ptr, vec
from rlx.llvm.math import sigmoid, tanh
from rlx.llvm.target import Target
from rlx.support.records import dataclass

GATES = {"lstm": 4, "gru": 3}
CELL_BYTES = 64  # a worker's counter of steps has a cache line of its own
_POINTERS = ("x_gates", "r", "h", "c", "bias", "y", "last_h", "last_c", "cells")
_MICRO = [("h", ptr), ("r", ptr), ("tile", ptr), ("left", i64)]


def tile_rows(target: Target, gates: int) -> int:
    """Rows of a tile: sums, weights and a unit are in registers."""
    most = 24 if target.num_vector_registers >= 32 else 12
    return most // gates


@dataclass(frozen=True)
class RecurrentStep(KernelSpec):
    """args: as `self.args` lists them; cells_bytes is the distance between workers' counters."""

    cell: str
    hidden: int
    bias: bool
    reverse: bool
    blocked: bool  # r as `layouts.recurrent_blocks` has it, else [H, gates · H]

    @property
    def flushes_denormals(self) -> bool:
        return True

    @property
    def args(self) -> list[str]:
        lstm = self.cell == "lstm"
        given = ["c"] * lstm + ["bias"] * self.bias
        last = ["last_h"] + ["last_c"] * lstm
        return ["x_gates", "r", "h", *given, "y", *last, "cells", "cells_bytes", "steps", "batch"]

    def emit(self, m: Module) -> None:
        _Emitter(self, m).emit()


class _Emitter:
    def __init__(self, spec: RecurrentStep, m: Module) -> None:
        self.spec, self.gates, self.lanes = spec, GATES[spec.cell], m.target.lanes(32)
        self.kind = vec(self.lanes, f32)
        self.rows = tile_rows(m.target, self.gates)
        self.gate_bytes = self.kind.bytes if spec.blocked else 4 * spec.hidden
        self.micro = {n: self._micro(m, n) for n in range(1, self.rows + 1)}
        self.f = m.kernel(result=i64)
        self.o = Operands(self.f, spec.args, _POINTERS)
        self.tile = self.f.alloca(self.rows * self.gates * self.kind.bytes)

    # -- the sums -----------------------------------------------------------------------------

    def _micro(self, m: Module, rows: int) -> Function:
        """void micro(ptr h, ptr r, ptr tile, i64 left): the products of `rows` rows with a block,
        of which `left` units are there."""
        f = m.function(f"rows{rows}", _MICRO, internal=True)
        hidden, gates, size = self.spec.hidden, self.gates, self.kind.bytes
        mask = None if self.spec.blocked else self._tail(f, f["left"])
        unroll = next(n for n in (4, 2, 1) if n == 1 or (hidden % n == 0 and n * rows <= 8))
        sums = f.carry([f.const(0, self.kind)] * (rows * gates))
        for first in sums.range(0, hidden, unroll):
            for k in (first + i for i in range(unroll)):
                weights = f.gep(f["r"], k, gates * self.gate_bytes)
                units = f.gep(f["h"], k, 4)
                row = [
                    f.broadcast_load(units, f32, self.lanes, 4 * hidden * i) for i in range(rows)
                ]
                found = list(sums.values)
                for gate in range(gates):
                    weight = self._load(weights, mask, gate * self.gate_bytes)
                    for i in range(rows):
                        at = i * gates + gate
                        found[at] = f.fma(row[i], weight, found[at])
                sums.values = found
        for at, value in enumerate(sums.values):
            f.store(value, f["tile"], at * size)
        f.ret()
        return f

    # -- a step -------------------------------------------------------------------------------

    def emit(self) -> None:
        f, o, spec = self.f, self.o, self.spec
        cell = f.gep(o["cells"], f["tid"].to(i64) * o["cells_bytes"])
        self.now, steps = f.load(cell, i64), o["steps"]
        for _ in f.when(steps.eq(0)):
            self._copy_states()
            f.ret(f.i64(1))
        self.is_first, self.is_last = self.now.eq(0), (self.now + 1).eq(steps)
        at = steps - 1 - self.now if spec.reverse else self.now
        row_bytes = 4 * spec.hidden
        plane = o["batch"] * row_bytes
        self.y = f.gep(o["y"], at * plane)
        self.x = f.gep(o["x_gates"], at * plane * self.gates)
        before = f.gep(self.y, plane if spec.reverse else -plane)
        self.h = f.select(self.is_first, o["h"], before)
        if spec.cell == "lstm":
            self.c = f.select(self.is_first, o["c"], o["last_c"])
        tiles = f.ceil_div(o["batch"], self.rows)
        height = (o["batch"] + tiles - 1).udiv(f.max(tiles, 1))  # as even as they can be
        blocks = -(-spec.hidden // self.lanes)
        lo, hi = f.split(tiles * blocks)
        for item in f.range(lo, hi):
            block, row = item.udiv(tiles), item.urem(tiles) * height
            self._tile(block, row, f.min(o["batch"] - row, height))
        f.store(self.now + 1, cell)
        f.ret(f.select(self.is_last, f.i64(1), f.i64(0)))

    def _copy_states(self) -> None:
        """No step: the states stay."""
        f, o = self.f, self.o
        pairs = [("h", "last_h")] + [("c", "last_c")] * (self.spec.cell == "lstm")
        lo, hi = f.split(o["batch"] * self.spec.hidden)
        for i in f.range(lo, hi):
            for source, to in pairs:
                f.store(f.load(f.gep(o[source], i, 4), f32), f.gep(o[to], i, 4))

    def _tile(self, block: Value, row: Value, count: Value) -> None:
        f, hidden = self.f, self.spec.hidden
        unit = block * self.lanes
        block_bytes = self.kind.bytes * (hidden * self.gates if self.spec.blocked else 1)
        weights = f.gep(self.o["r"], block, block_bytes)
        rows, left = f.gep(self.h, row, 4 * hidden), f.i64(hidden) - unit
        for n in f.cases(count, range(1, self.rows + 1)):
            f.call(self.micro[n], rows, weights, self.tile, left)
        mask = self._tail(f, left)
        step = self._lstm if self.spec.cell == "lstm" else self._gru
        for i in f.range(0, count):
            at = (row + i) * hidden + unit
            tile = f.gep(self.tile, i, self.gates * self.kind.bytes)
            x = f.gep(self.x, (row + i) * (hidden * self.gates) + unit, 4)
            h = step(at, unit, tile, x, mask)
            self._store(h, f.gep(self.y, at, 4), mask)
            for _ in f.when(self.is_last):
                self._store(h, f.gep(self.o["last_h"], at, 4), mask)

    def _tail(self, f: Function, left: Value) -> Value | None:
        """The lanes that are units; None where all always are."""
        return f.lane_mask(left, self.lanes) if self.spec.hidden % self.lanes else None

    def _load(self, base: Value, mask: Value | None, offset: int = 0) -> Value:
        f = base.fn
        if mask is None:
            return f.load(base, self.kind, offset)
        return f.masked_load(base, self.kind, mask, 0, offset)

    def _store(self, value: Value, base: Value, mask: Value | None) -> None:
        if mask is None:
            self.f.store(value, base)
        else:
            self.f.masked_store(value, base, mask)

    def _parts(self, tile: Value, x: Value, mask: Value | None) -> list[tuple[Value, Value]]:
        """The product with the state, and that with the input, for each gate."""
        f, hidden, size = self.f, self.spec.hidden, self.kind.bytes
        return [
            (f.load(tile, self.kind, g * size), self._load(x, mask, 4 * hidden * g))
            for g in range(self.gates)
        ]

    def _lstm(self, at: Value, unit: Value, tile: Value, x: Value, mask: Value | None) -> Value:
        f = self.f
        i, forget, new, out = (a + b for a, b in self._parts(tile, x, mask))
        c = self._load(f.gep(self.c, at, 4), mask)
        c = sigmoid(forget) * c + sigmoid(i) * tanh(new)
        self._store(c, f.gep(self.o["last_c"], at, 4), mask)
        return sigmoid(out) * tanh(c)

    def _gru(self, at: Value, unit: Value, tile: Value, x: Value, mask: Value | None) -> Value:
        f = self.f
        (hr, xr), (hz, xz), (hn, xn) = self._parts(tile, x, mask)
        if self.spec.bias:
            hn = hn + self._load(f.gep(self.o["bias"], unit, 4), mask)
        h = self._load(f.gep(self.h, at, 4), mask)
        new = tanh(xn + sigmoid(xr + hr) * hn)
        return new + sigmoid(xz + hz) * (h - new)
