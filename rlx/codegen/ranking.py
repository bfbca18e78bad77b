"""The best k elements of a row: keys that compare as integers, and heaps of them.

An entry is a key with the element's index, larger being better: a NaN before all numbers, then the
greatest (or least), and of equal ones the first. Keys of up to 32 bits share one word with the
index; wider ones have a word of their own.
"""

from __future__ import annotations

from rlx.codegen.emit import Function, Module, Value, i32, i64, ptr, vec
from rlx.codegen.region.registers import from_memory, raw_type, register_type
from rlx.ir.dtype import DType, bool_
from rlx.ir.dtype import i32 as i32_dtype
from rlx.support.records import dataclass

_LAST = 0xFFFFFFFF

Entry = list[Value]


@dataclass(frozen=True)
class Ranking:
    dtype: DType
    largest: bool = True
    nan_first: bool = True  # or as -inf

    @property
    def wide(self) -> bool:
        return self.dtype.bits == 64

    @property
    def words(self) -> int:
        """Words of an entry."""
        return 2 if self.wide else 1

    @property
    def bytes(self) -> int:
        return 8 * self.words

    def keys(self, f: Function, x: Value) -> Value:
        """Keys of elements in registers: i32, or i64 for wide types."""
        if self.dtype.is_float:
            return self._float_keys(f, x)
        type_ = i64 if self.wide else i32
        key = x.to(type_, signed=self.dtype.kind == "int") if x.type.bits < type_.bits else x
        if self.dtype.kind == "uint" and self.dtype.bits >= 32:
            key = key ^ -(1 << self.dtype.bits - 1)
        return key if self.largest else ~key

    def _float_keys(self, f: Function, x: Value) -> Value:
        """The bits of a float order it, once those of negative numbers are turned round."""
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
        if self.wide:
            return [key, ~index]
        return [key.to(i64) << 32 | _LAST - index]

    def index(self, f: Function, entry: Entry) -> Value:
        return ~entry[1] if self.wide else _LAST - (entry[0] & _LAST)

    def key(self, f: Function, entry: Entry) -> Value:
        return entry[0] if self.wide else entry[0].ashr(32).to(i32)

    def worse(self, f: Function, a: Entry, b: Entry) -> Value:
        if not self.wide:
            return a[0] < b[0]
        return (a[0] < b[0]) | (a[0].eq(b[0]) & (a[1] < b[1]))

    def load(self, f: Function, heap: Value, at: Value) -> Entry:
        base = f.gep(heap, at, self.bytes)
        return [f.load(base, i64, 8 * k) for k in range(self.words)]

    def store(self, f: Function, entry: Entry, heap: Value, at: Value) -> None:
        base = f.gep(heap, at, self.bytes)
        for k, word in enumerate(entry):
            f.store(word, base, 8 * k)

    @property
    def lanes_bits(self) -> int:
        return 32 if self.dtype is bool_ else max(register_type(self.dtype).bits, 32)


@dataclass(frozen=True)
class Ascending(Ranking):
    """Entries that are plain indices, smaller being better."""

    dtype: DType = i32_dtype

    def worse(self, f: Function, a: Entry, b: Entry) -> Value:
        return a[0] > b[0]


class Heaps:
    """Functions of a module that keep entries in a heap whose root is the worst."""

    def __init__(self, m: Module, ranking: Ranking, name: str = "heap") -> None:
        self.m, self.ranking, self.name = m, ranking, name
        self.sift = self._emit_sift()
        self.sort = self._emit_sort()

    def _emit_sift(self) -> Function:
        """void sift(ptr heap, i64 size, i64 at): let the entry at `at` sink to its place."""
        params = [("heap", ptr), ("size", i64), ("at", i64)]
        f, r = self.m.function(f"{self.name}_sift", params, internal=True), self.ranking
        heap = f["heap"]
        entry = r.load(f, heap, f["at"])

        def down(at: Value, child: Value) -> list[Value]:
            r.store(f, r.load(f, heap, child), heap, at)
            return [child, self._worse_child(f, child, entry)]

        start = f["at"]
        at, _ = f.while_(
            [start, self._worse_child(f, start, entry)], lambda at, child: child.ne(-1), down
        )
        r.store(f, entry, heap, at)
        return f

    def _worse_child(self, f: Function, at: Value, entry: Entry) -> Value:
        """The worse child of a place if it is worse than `entry`, else -1."""
        r, heap, size = self.ranking, f["heap"], f["size"]
        left = at * 2 + 1

        def look() -> Value:
            right = f.min(left + 1, size - 1)
            one, other = r.load(f, heap, left), r.load(f, heap, right)
            second = r.worse(f, other, one)
            child = f.select(second, right, left)
            chosen = [f.select(second, b, a) for a, b in zip(one, other, strict=True)]
            return f.select(r.worse(f, chosen, entry), child, -1)

        [found] = f.if_(left < size, look, lambda: f.i64(-1))
        return found

    def _emit_sort(self) -> Function:
        """void sort(ptr heap, i64 size): entries in any order, best first afterwards."""
        params = [("heap", ptr), ("size", i64)]
        f, r = self.m.function(f"{self.name}_sort", params, internal=True), self.ranking
        heap, size = f["heap"], f["size"]
        self.make(f, heap, size)
        for i in f.range(1, size):
            last = size - i
            worst, other = r.load(f, heap, f.i64(0)), r.load(f, heap, last)
            r.store(f, worst, heap, last)
            r.store(f, other, heap, f.i64(0))
            f.call(self.sift, heap, last, f.i64(0))
        return f

    def make(self, f: Function, heap: Value, size: Value) -> None:
        """Entries in any order become a heap."""
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
        self.make(f, heap, k)
        lanes = f.target.lanes(r.lanes_bits)
        whole = k + (n - k & -lanes)

        def look(i: Value, bar: Value) -> Value:
            """Most vectors have nothing that is better than the worst of the best."""
            better = r.read_keys(f, row, i, lanes) > f.splat(bar, lanes)
            [new] = f.if_(f.any(better), lambda: self._offer(f, i, i + lanes), lambda: bar)
            return new

        bar = r.key(f, r.load(f, heap, f.i64(0)))
        f.loop(k, whole, lanes, [bar], look)
        self._offer(f, whole, n)
        f.call(self.sort, heap, k)
        return f

    def _offer(self, f: Function, lo: Value, hi: Value) -> Value:
        """Elements lo … hi - 1 to the heap; gives the key to beat from then on."""
        r, heap = self.ranking, f["heap"]
        for i in f.range(lo, hi):
            entry = r.entry(f, r.read_keys(f, f["row"], i, 1), i)
            root = r.load(f, heap, f.i64(0))

            def replace(entry: Entry = entry) -> None:
                r.store(f, entry, heap, f.i64(0))
                f.call(self.sift, heap, f["k"], f.i64(0))

            f.if_(r.worse(f, root, entry), replace)
        return r.key(f, r.load(f, heap, f.i64(0)))
