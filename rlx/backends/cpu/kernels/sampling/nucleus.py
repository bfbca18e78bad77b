"""Top-p (nucleus) filtering: the fewest best tokens whose weights sum to a share of the total.

No sort is needed, only a radix select: weights are summed in buckets by the leading bits of the
tokens' keys, which gives the leading bits of the nucleus's last key; then by the next bits, among
the keys with that prefix.
"""

from __future__ import annotations

from rlx.backends.cpu.kernels.sampling.top_k import Ranking
from rlx.llvm.builder import Function, Module, Type, Value, f64, i64, ptr, vec

BITS = 11  # of a key per round: 16 KiB of buckets


class NucleusFilter:
    """`keep_nucleus`: void keep_nucleus(row, n, target, memory) zeroes the weights in memory, of
    `type_`, of all tokens that come after the target mass is reached, best tokens first."""

    def __init__(self, m: Module, ranking: Ranking, type_: Type) -> None:
        self.ranking, self.type = ranking, type_
        params = [("row", ptr), ("n", i64), ("target", f64), ("memory", ptr)]
        self.f: Function = m.function("keep_nucleus", params, internal=True)
        self.keep_nucleus = self.f
        self.lanes = m.target.lanes(type_.bits)
        self._emit()

    def _emit(self) -> None:
        f = self.f
        buckets = f.alloca(8 << BITS)
        start = [f.i64(self.type.bits), f.i64(0), f.const(0.0, f64)]

        def refine(shift: Value, prefix: Value, mass: Value) -> list[Value]:
            """Extend the prefix (the key bits above `shift`) by one round."""
            low = f.max(shift - BITS, 0)
            width = shift - low
            self._histogram(buckets, shift, prefix, low)
            last, mass = self._crossing_bucket(buckets, (f.i64(1) << width) - 1, mass)
            return [low, prefix << width | last, mass]

        _, threshold, mass = f.while_(start, lambda shift, prefix, mass: shift > 0, refine)
        self._zero_others(threshold, mass)

    def _unsigned(self, at: Value) -> Value:
        """The key of a token as an unsigned number."""
        key = self.ranking.read_keys(self.f, self.f["row"], at, 1)
        return (key ^ -(1 << key.type.bits - 1)).to(i64, signed=False)

    def _weight(self, at: Value) -> Value:
        return self.f.load(self.f.gep(self.f["memory"], at, self.type), self.type)

    def _histogram(self, buckets: Value, shift: Value, prefix: Value, low: Value) -> None:
        """Sum the weights of keys with this prefix, in buckets by the bits from `low` on."""
        f = self.f
        wide = vec(f.target.lanes(64), f64)
        for at in f.range(0, 8 << BITS, wide.bytes):
            f.store(f.const(0.0, wide), f.gep(buckets, at))
        for i in f.range(0, f["n"]):
            key = self._unsigned(i)
            begin = key >> 1 >> shift - 1  # two shifts: `shift` may be all bits

            def add(i: Value = i, key: Value = key, begin: Value = begin) -> None:
                bucket = f.gep(buckets, (key >> low) - (begin << shift - low), 8)
                f.store(f.load(bucket, f64) + self._weight(i).to(f64), bucket)

            f.if_(begin.eq(prefix), add)

    def _crossing_bucket(self, buckets: Value, top: Value, mass: Value) -> tuple[Value, Value]:
        """The bucket, from the best on, in which the target is reached, and the mass before it."""
        f = self.f

        def after(bits: Value, mass: Value) -> Value:
            return mass + f.load(f.gep(buckets, bits, 8), f64)

        bits, mass = f.while_(
            [top, mass],
            lambda bits, mass: (after(bits, mass) < f["target"]) & (bits > 0),
            lambda bits, mass: [bits - 1, after(bits, mass)],
        )
        return bits, mass

    def _zero_others(self, threshold: Value, mass: Value) -> None:
        """Keep keys above the threshold, zero those below; of equal ones keep the first."""
        f, lanes, n = self.f, self.lanes, self.f["n"]
        whole = n & -lanes

        def element(i: Value, mass: Value) -> Value:
            w, key = self._weight(i), self._unsigned(i)
            is_kept_tie = key.eq(threshold) & (mass < f["target"])
            is_kept = threshold.ult(key) | is_kept_tie
            f.store(f.select(is_kept, w, 0.0), f.gep(f["memory"], i, self.type))
            return f.select(is_kept_tie, mass + w.to(f64), mass)

        key_type = self.ranking.read_keys(f, f["row"], f.i64(0), 1).type
        threshold_keys = f.splat(threshold.to(key_type) ^ -(1 << key_type.bits - 1), lanes)

        def vector(i: Value, mass: Value) -> Value:
            keys = self.ranking.read_keys(f, f["row"], i, lanes)
            at = f.gep(f["memory"], i, self.type)
            [mass] = f.if_(
                f.any(keys.eq(threshold_keys)),
                lambda: f.loop(i, i + lanes, 1, [mass], element),
                lambda: mass,
            )
            w = f.load(at, vec(lanes, self.type))
            f.store(f.select(keys >= threshold_keys, w, 0.0), at)
            return mass

        [mass] = f.loop(0, whole, lanes, [mass], vector)
        f.loop(whole, n, 1, [mass], element)
