"""The nucleus of a row of tokens: the best ones that together have a share of all weight.

Sorting is not needed: weights are summed by the leading bits of the tokens' keys, which shows by
what the last token of the nucleus begins; then by the bits that follow, of such tokens only.
"""

from __future__ import annotations

from rlx.backends.cpu.kernels.sampling.ranking import Ranking
from rlx.llvm.builder import Function, Module, Type, Value, f64, i64, ptr, vec

BITS = 11  # of a key that are looked at together: 16 KiB of sums


class Nucleus:
    """`cut`: void cut(row, n, target, memory) clears weights in memory, in `type_`, of all tokens
    before which, from the best on, the target has been passed."""

    def __init__(self, m: Module, ranking: Ranking, type_: Type) -> None:
        self.ranking, self.type = ranking, type_
        params = [("row", ptr), ("n", i64), ("target", f64), ("memory", ptr)]
        self.f: Function = m.function("cut", params, internal=True)
        self.cut = self.f
        self.lanes = m.target.lanes(type_.bits)
        self._emit()

    def _emit(self) -> None:
        f = self.f
        sums = f.alloca(8 << BITS)
        start = [f.i64(self.type.bits), f.i64(0), f.const(0.0, f64)]

        def closer(shift: Value, prefix: Value, passed: Value) -> list[Value]:
            """From keys that share all bits above `shift` to those that share some more."""
            low = f.max(shift - BITS, 0)
            width = shift - low
            self._sum_up(sums, shift, prefix, low)
            last, passed = self._crossing(sums, (f.i64(1) << width) - 1, passed)
            return [low, prefix << width | last, passed]

        _, bar, passed = f.while_(start, lambda shift, prefix, passed: shift > 0, closer)
        self._clear(bar, passed)

    def _unsigned(self, at: Value) -> Value:
        """The key of a token, from 0 on."""
        key = self.ranking.read_keys(self.f, self.f["row"], at, 1)
        return (key ^ -(1 << key.type.bits - 1)).to(i64, signed=False)

    def _weight(self, at: Value) -> Value:
        return self.f.load(self.f.gep(self.f["memory"], at, self.type), self.type)

    def _sum_up(self, sums: Value, shift: Value, prefix: Value, low: Value) -> None:
        """Weights of the keys with this prefix, by the bits from `low` on."""
        f = self.f
        wide = vec(f.target.lanes(64), f64)
        for at in f.range(0, 8 << BITS, wide.bytes):
            f.store(f.const(0.0, wide), f.gep(sums, at))
        for i in f.range(0, f["n"]):
            key = self._unsigned(i)
            begin = key >> 1 >> shift - 1  # the shift may be that of all bits

            def add(i: Value = i, key: Value = key, begin: Value = begin) -> None:
                place = f.gep(sums, (key >> low) - (begin << shift - low), 8)
                f.store(f.load(place, f64) + self._weight(i).to(f64), place)

            f.if_(begin.eq(prefix), add)

    def _crossing(self, sums: Value, top: Value, passed: Value) -> tuple[Value, Value]:
        """The bits, from the best on, with which the target is passed, and what passes before."""
        f = self.f

        def after(bits: Value, passed: Value) -> Value:
            return passed + f.load(f.gep(sums, bits, 8), f64)

        bits, passed = f.while_(
            [top, passed],
            lambda bits, passed: (after(bits, passed) < f["target"]) & (bits > 0),
            lambda bits, passed: [bits - 1, after(bits, passed)],
        )
        return bits, passed

    def _clear(self, bar: Value, passed: Value) -> None:
        """Keys above the bar stay, those below go, and of equal ones the first stay."""
        f, lanes, n = self.f, self.lanes, self.f["n"]
        whole = n & -lanes

        def one(i: Value, passed: Value) -> Value:
            w, key = self._weight(i), self._unsigned(i)
            joins = key.eq(bar) & (passed < f["target"])
            stays = bar.ult(key) | joins
            f.store(f.select(stays, w, 0.0), f.gep(f["memory"], i, self.type))
            return f.select(joins, passed + w.to(f64), passed)

        key_type = self.ranking.read_keys(f, f["row"], f.i64(0), 1).type
        edge = f.splat(bar.to(key_type) ^ -(1 << key_type.bits - 1), lanes)

        def some(i: Value, passed: Value) -> Value:
            keys = self.ranking.read_keys(f, f["row"], i, lanes)
            at = f.gep(f["memory"], i, self.type)
            [passed] = f.if_(
                f.any(keys.eq(edge)),
                lambda: f.loop(i, i + lanes, 1, [passed], one),
                lambda: passed,
            )
            w = f.load(at, vec(lanes, self.type))
            f.store(f.select(keys >= edge, w, 0.0), at)
            return passed

        [passed] = f.loop(0, whole, lanes, [passed], some)
        f.loop(whole, n, 1, [passed], one)
