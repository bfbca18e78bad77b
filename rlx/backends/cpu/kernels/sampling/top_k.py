"""Top-k: sort keys that compare as integers, heaps of them, and the kernel.

An entry is a key with the element's index; larger is better: NaN first, then the largest (or
smallest) elements, of equal ones the first. A key of up to 32 bits shares an i64 with the index; a
wider one has an i64 of its own.

Top-p (nucleus) filtering keeps the fewest best tokens whose weights sum to a share of the total. No
sort is needed, only a radix select: weights are summed in buckets by the leading bits of the
tokens' keys, which gives the leading bits of the nucleus's last key; then by the next bits, among
the keys with that prefix.
"""

from __future__ import annotations

from rlx.backends.cpu.kernels.spec import KernelSpec
from rlx.ir.dtype import DType, bool_
from rlx.ir.dtype import i32 as i32_dtype
from rlx.llvm.builder import Function, Module, Type, Value, f64, i32, i64, ptr, vec
from rlx.llvm.nest.registers import from_memory, raw_type, register_type
from rlx.support.records import dataclass

_MAX_INDEX = 0xFFFFFFFF

Entry = list[Value]


@dataclass(frozen=True)
class Ranking:
    dtype: DType
    largest: bool = True
    nan_first: bool = True  # else NaN counts as -inf

    @property
    def is_wide(self) -> bool:
        return self.dtype.bits == 64

    @property
    def num_words(self) -> int:
        """Number of i64 in an entry."""
        return 2 if self.is_wide else 1

    @property
    def bytes(self) -> int:
        return 8 * self.num_words

    def keys(self, f: Function, x: Value) -> Value:
        """Keys of elements in registers: i32, or i64 for wide types."""
        if self.dtype.is_float:
            return self._float_keys(f, x)
        type_ = i64 if self.is_wide else i32
        key = x.to(type_, signed=self.dtype.kind == "int") if x.type.bits < type_.bits else x
        if self.dtype.kind == "uint" and self.dtype.bits >= 32:
            key = key ^ -(1 << self.dtype.bits - 1)
        return key if self.largest else ~key

    def _float_keys(self, f: Function, x: Value) -> Value:
        """The bits of a float as an integer in the same order: negative ones inverted."""
        with f.exact():
            bits = (x + 0.0).bits()  # -0 becomes 0
        sign = bits.type.bits - 1
        key = bits ^ (bits.ashr(sign) & (1 << sign) - 1)
        if not self.nan_first:
            lowest = -1 << sign - (8 if sign == 31 else 11)  # the bits of -inf
            return f.select(x.is_nan(), lowest ^ (1 << sign) - 1, key)
        key = key if self.largest else ~key
        return f.select(x.is_nan(), (1 << sign) - 1, key)

    def read_keys(self, f: Function, row: Value, at: Value, lanes: int) -> Value:
        """Keys of `lanes` elements of a row."""
        raw = f.load(f.gep(row, at, self.dtype.bytes), vec(lanes, raw_type(self.dtype)))
        return self.keys(f, from_memory(f, raw, self.dtype))

    def entry(self, f: Function, key: Value, index: Value) -> Entry:
        if self.is_wide:
            return [key, ~index]
        return [key.to(i64) << 32 | _MAX_INDEX - index]

    def index(self, f: Function, entry: Entry) -> Value:
        return ~entry[1] if self.is_wide else _MAX_INDEX - (entry[0] & _MAX_INDEX)

    def key(self, f: Function, entry: Entry) -> Value:
        return entry[0] if self.is_wide else entry[0].ashr(32).to(i32)

    def worse(self, f: Function, a: Entry, b: Entry) -> Value:
        if not self.is_wide:
            return a[0] < b[0]
        return (a[0] < b[0]) | (a[0].eq(b[0]) & (a[1] < b[1]))

    def load(self, f: Function, heap: Value, at: Value) -> Entry:
        base = f.gep(heap, at, self.bytes)
        return [f.load(base, i64, 8 * k) for k in range(self.num_words)]

    def store(self, f: Function, entry: Entry, heap: Value, at: Value) -> None:
        base = f.gep(heap, at, self.bytes)
        for k, arg in enumerate(entry):
            f.store(arg, base, 8 * k)

    @property
    def key_bits(self) -> int:
        return 32 if self.dtype is bool_ else max(register_type(self.dtype).bits, 32)


@dataclass(frozen=True)
class Ascending(Ranking):
    """Entries that are plain indices; smaller is better."""

    dtype: DType = i32_dtype

    def worse(self, f: Function, a: Entry, b: Entry) -> Value:
        return a[0] > b[0]


class Heaps:
    """Heap functions of a module; the root is the worst entry."""

    def __init__(self, m: Module, ranking: Ranking, name: str = "heap") -> None:
        self.m, self.ranking, self.name = m, ranking, name
        self.sift = self._emit_sift()
        self.sort = self._emit_sort()

    def _emit_sift(self) -> Function:
        """void sift(ptr heap, i64 size, i64 at): sift the entry at `at` down."""
        params = [("heap", ptr), ("size", i64), ("at", i64)]
        f, r = self.m.function(f"{self.name}_sift", params, internal=True), self.ranking
        heap = f["heap"]
        entry = r.load(f, heap, f["at"])
        place = f.carry([f["at"], self._worse_child(f, f["at"], entry)])
        for _ in place.forever():
            at, child = place.values
            place.break_unless(child.ne(-1))
            r.store(f, r.load(f, heap, child), heap, at)
            place.values = [child, self._worse_child(f, child, entry)]
        r.store(f, entry, heap, place.values[0])
        return f

    def _worse_child(self, f: Function, at: Value, entry: Entry) -> Value:
        """The worse child of a node if it is worse than `entry`, else -1."""
        r, heap, size = self.ranking, f["heap"], f["size"]
        left = at * 2 + 1
        found = f.carry()
        for exists in f.either(left < size, found):
            if not exists:
                found.values = [f.i64(-1)]
                continue
            right = f.min(left + 1, size - 1)
            left_entry, right_entry = r.load(f, heap, left), r.load(f, heap, right)
            right_is_worse = r.worse(f, right_entry, left_entry)
            child = f.select(right_is_worse, right, left)
            chosen = [
                f.select(right_is_worse, b, a) for a, b in zip(left_entry, right_entry, strict=True)
            ]
            found.values = [f.select(r.worse(f, chosen, entry), child, -1)]
        return found.values[0]

    def _emit_sort(self) -> Function:
        """void sort(ptr heap, i64 size): heapsort, best first."""
        params = [("heap", ptr), ("size", i64)]
        f, r = self.m.function(f"{self.name}_sort", params, internal=True), self.ranking
        heap, size = f["heap"], f["size"]
        self.heapify(f, heap, size)
        for i in f.range(1, size):
            last = size - i
            worst, right_entry = r.load(f, heap, f.i64(0)), r.load(f, heap, last)
            r.store(f, worst, heap, last)
            r.store(f, right_entry, heap, f.i64(0))
            f.call(self.sift, heap, last, f.i64(0))
        return f

    def heapify(self, f: Function, heap: Value, size: Value) -> None:
        """Build a heap of unordered entries."""
        half = size >> 1
        for i in f.range(0, half):
            f.call(self.sift, heap, size, half - 1 - i)

    def emit_select(self) -> Function:
        """void select(ptr row, i64 n, i64 k, ptr heap): the k best of n elements, best first."""
        params = [("row", ptr), ("n", i64), ("k", i64), ("heap", ptr)]
        f, r = self.m.function(f"{self.name}_select", params, internal=True), self.ranking
        row, n, k, heap = f["row"], f["n"], f["k"], f["heap"]
        for i in f.range(0, k):
            r.store(f, r.entry(f, r.read_keys(f, row, i, 1), i), heap, i)
        self.heapify(f, heap, k)
        lanes = f.target.lanes(r.key_bits)
        whole = k + (n - k & -lanes)
        threshold = f.carry([r.key(f, r.load(f, heap, f.i64(0)))])
        for i in threshold.range(k, whole, lanes):
            # a vector's elements are pushed if any beats the heap's root; most have none
            [old] = threshold.values
            better = r.read_keys(f, row, i, lanes) > f.splat(old, lanes)
            for pushes in f.either(f.any(better), threshold):
                threshold.values = [self._push(f, i, i + lanes) if pushes else old]
        self._push(f, whole, n)
        f.call(self.sort, heap, k)
        return f

    def _push(self, f: Function, lo: Value, hi: Value) -> Value:
        """Push elements lo … hi - 1. Returns the new root key, the threshold."""
        r, heap = self.ranking, f["heap"]
        for i in f.range(lo, hi):
            entry = r.entry(f, r.read_keys(f, f["row"], i, 1), i)
            root = r.load(f, heap, f.i64(0))
            for _ in f.when(r.worse(f, root, entry)):
                r.store(f, entry, heap, f.i64(0))
                f.call(self.sift, heap, f["k"], f.i64(0))
        return r.key(f, r.load(f, heap, f.i64(0)))


@dataclass(frozen=True)
class TopK(KernelSpec):
    """args: x, values, indices, rows, n, k, scratch, step

    Rows are contiguous. Each worker has `step` bytes of scratch memory: k entries.
    """

    dtype: DType
    largest: bool

    def entry_bytes(self) -> int:
        return Ranking(self.dtype, self.largest).bytes

    def emit(self, m: Module) -> None:
        ranking = Ranking(self.dtype, self.largest)
        select = Heaps(m, ranking).emit_select()
        f = m.kernel()
        x, values, indices = (f.arg(f["args"], at) for at in range(3))
        rows, n, k = (f.arg(f["args"], at, i64) for at in (3, 4, 5))
        step = f.arg(f["args"], 7, i64)
        heap = f.gep(f.arg(f["args"], 6), f["tid"].to(i64) * step)
        lo, hi = f.split(rows)
        for row in f.range(lo, hi):
            source = f.gep(x, row * n, self.dtype.bytes)
            f.call(select, source, n, k, heap)
            for i in f.range(0, k):
                index = ranking.index(f, ranking.load(f, heap, i))
                element = f.load(f.gep(source, index, self.dtype.bytes), raw_type(self.dtype))
                to = row * k + i
                f.store(element, f.gep(values, to, self.dtype.bytes))
                f.store(index.to(i32), f.gep(indices, to, 4))


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
        state = f.carry([f.i64(self.type.bits), f.i64(0), f.const(0.0, f64)])
        for _ in state.forever():  # each round extends the prefix, the key bits above `shift`
            shift, prefix, mass = state.values
            state.break_unless(shift > 0)
            low = f.max(shift - BITS, 0)
            width = shift - low
            self._histogram(buckets, shift, prefix, low)
            last, mass = self._crossing_bucket(buckets, (f.i64(1) << width) - 1, mass)
            state.values = [low, prefix << width | last, mass]
        _, threshold, mass = state.values
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
            for _ in f.when(begin.eq(prefix)):
                bucket = f.gep(buckets, (key >> low) - (begin << shift - low), 8)
                f.store(f.load(bucket, f64) + self._weight(i).to(f64), bucket)

    def _crossing_bucket(self, buckets: Value, top: Value, mass: Value) -> tuple[Value, Value]:
        """The bucket, from the best on, in which the target is reached, and the mass before it."""
        f = self.f

        def after(bits: Value, mass: Value) -> Value:
            return mass + f.load(f.gep(buckets, bits, 8), f64)

        state = f.carry([top, mass])
        for _ in state.forever():
            bits, mass = state.values
            state.break_unless((after(bits, mass) < f["target"]) & (bits > 0))
            state.values = [bits - 1, after(bits, mass)]
        bits, mass = state.values
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
        kept = f.carry([mass])
        for i in kept.range(0, whole, lanes):
            keys = self.ranking.read_keys(f, f["row"], i, lanes)
            at = f.gep(f["memory"], i, self.type)
            ties = f.carry(kept.values)
            for has_tie in f.either(f.any(keys.eq(threshold_keys)), ties):
                if has_tie:
                    for j in ties.range(i, i + lanes):
                        ties.values = [element(j, ties.values[0])]
                else:
                    ties.values = kept.values
            kept.values = ties.values
            w = f.load(at, vec(lanes, self.type))
            f.store(f.select(keys >= threshold_keys, w, 0.0), at)
        for i in kept.range(whole, n):
            kept.values = [element(i, kept.values[0])]
