"""Compile caches: executables by key with eviction and pinning, and by bucket of a dimension.

    f = BucketedCompileCache(model, "seq", [64, 256, 1024])      # 1…64, 65…256, 257…1024
    f = BucketedCompileCache(model, "seq", largest=4096)         # powers of two: 1…16, 17…32, …
    (y,) = f.run(x=x)                                            # any length up to the largest

The memory of a bucket is planned for its upper end, as a bounded dynamic dimension. Nothing is
padded: kernels compute as many rows as a run has, and outputs have its size.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import field, replace
from typing import Any, Generic, NamedTuple, TypeVar

from rlx.backends.buffer import Buffer
from rlx.backends.registry import Device
from rlx.errors import BindingError, InputError, OptionError
from rlx.ir.binding import UpTo, infer_sizes
from rlx.ir.graph import Graph
from rlx.ir.module import GraphModule
from rlx.ir.op import Array
from rlx.ir.shape import Shape
from rlx.runtime.compiled import CompiledGraph
from rlx.runtime.params import ParamStore
from rlx.runtime.session import Session
from rlx.specialize.options import CompileOptions
from rlx.support.gc_pause import without_gc
from rlx.support.records import dataclass
from rlx.support.settings import debug, debug_level

T = TypeVar("T")
Material = Mapping[str, object]
_POLICIES = ("fifo", "lru")
_MAX_EVICTED = 1024


@dataclass
class _Entry(Generic[T]):
    value: T
    size: int
    material: Material
    token: object
    pinned: bool = False


@dataclass
class CacheCounters:
    hits: int = 0
    misses: int = 0
    evictions: int = 0


@dataclass
class _Pending:
    """A value that one thread computes; others that need it wait."""

    done: threading.Event = field(default_factory=threading.Event)


class CompileCache(Generic[T]):
    """A thread-safe cache; a value is computed once per key, by the first thread that needs it.

    `capacity` bounds the number of entries, `capacity_bytes` their size. The oldest ("fifo") or the
    least recently used ("lru") entry is evicted first, a pinned one never. `material` is what a key
    stands for: `explain` uses it to say why a lookup missed, and two materials under one key are an
    error.
    """

    def __init__(
        self, capacity: int = 8, eviction: str = "fifo", capacity_bytes: int | None = None
    ) -> None:
        if not isinstance(capacity, int) or capacity < 1:
            raise OptionError("a cache holds at least one entry", where="capacity", got=capacity)
        if capacity_bytes is not None and capacity_bytes < 1:
            raise OptionError("not a size", where="capacity_bytes", got=capacity_bytes)
        if eviction not in _POLICIES:
            raise OptionError("unknown eviction", got=repr(eviction), expected=", ".join(_POLICIES))
        self.capacity, self.capacity_bytes, self.eviction = capacity, capacity_bytes, eviction
        self.counters = CacheCounters()
        self._entries: OrderedDict[Hashable, _Entry[T]] = OrderedDict()
        self._evicted: OrderedDict[Hashable, None] = OrderedDict()
        self._pending: dict[Hashable, _Pending] = {}
        self._lock = threading.Lock()

    def get(self, key: Hashable) -> T | None:
        """The value, or None; a hit costs a lookup."""
        with self._lock:
            entry = self._find(key)
            return None if entry is None else entry.value

    def _find(self, key: Hashable) -> _Entry[T] | None:
        entry = self._entries.get(key)
        if entry is not None:
            self.counters.hits += 1
            if self.eviction == "lru":
                self._entries.move_to_end(key)
        return entry

    def get_or_make(
        self,
        key: Hashable,
        make: Callable[[], T],
        *,
        size: Callable[[T], int] = lambda value: 0,
        material: Callable[[], Material] = dict,
        token: object = None,
    ) -> T:
        """The value of `key`, computed on a miss, by one thread.

        `token` is a cheap proxy of the material: the material is compared only if the token differs
        from that of the entry.
        """
        while True:
            with self._lock:
                entry = self._find(key)
                pending = self._pending.get(key) if entry is None else None
                if entry is None and pending is None:
                    mine = self._pending[key] = _Pending()
                    self.counters.misses += 1
                    break
            if entry is not None:
                if token is not None and token != entry.token:
                    _require_same(key, material(), entry.material)
                return entry.value
            assert pending is not None
            pending.done.wait()
        try:
            if debug_level():
                debug(1, f"cache: {str(key)[:24]}: {self.explain(key, material() or None)}")
            with without_gc():
                value = make()
            entry = _Entry(value, size(value), dict(material()), token)
            with self._lock:
                self._entries[key] = entry
                self._evicted.pop(key, None)
                self._evict(key)
            return value
        finally:
            with self._lock:
                del self._pending[key]
            mine.done.set()

    def _evict(self, newest: Hashable) -> None:
        total = self.num_bytes
        limit = total if self.capacity_bytes is None else self.capacity_bytes
        for key in list(self._entries):
            if len(self._entries) <= self.capacity and total <= limit:
                return
            if key != newest and not self._entries[key].pinned:
                total -= self._entries.pop(key).size
                self.counters.evictions += 1
                self._evicted[key] = None
                if len(self._evicted) > _MAX_EVICTED:
                    self._evicted.popitem(last=False)

    def pin(self, key: Hashable, pinned: bool = True) -> None:
        """Exempt an entry from eviction, or no longer."""
        with self._lock:
            if key not in self._entries:
                raise OptionError("no such entry to pin", got=str(key)[:24])
            self._entries[key].pinned = pinned
            if not pinned:
                self._evict(key)

    def explain(self, key: Hashable, material: Mapping[str, Any] | None = None) -> str:
        """Why `key` hits or misses: what differs from the nearest entry."""
        with self._lock:
            if key in self._entries:
                return "hit"
            if key in self._evicted:
                return f"miss: it was evicted ({self.eviction}, at most {self.capacity} entries)"
            if not self._entries:
                return "miss: the cache is empty"
            if material is None:
                return f"miss: none of the {len(self._entries)} entries has this key"
            wanted = dict(material)
            cached = [e.material for e in self._entries.values()]
        nearest = min(cached, key=lambda there: _distance(wanted, there))
        if not _distance(wanted, nearest):
            return "miss: another key of the same material"
        return f"miss: differs from the nearest entry in {_difference(wanted, nearest)}"

    def seen(self) -> list[Hashable]:
        """Keys of entries, and of those evicted lately."""
        with self._lock:
            return [*self._entries, *self._evicted]

    @property
    def num_bytes(self) -> int:
        return sum(e.size for e in self._entries.values())

    def remove(self, key: Hashable) -> None:
        """Remove an entry if it exists, pinned or not."""
        with self._lock:
            self._entries.pop(key, None)

    def clear(self) -> None:
        with self._lock:
            self._entries.clear()

    def values(self) -> list[T]:
        """All values, in order of eviction."""
        with self._lock:
            return [e.value for e in self._entries.values()]

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Hashable]:
        return iter(list(self._entries))


def _require_same(key: Hashable, material: Material, cached: Material) -> None:
    if _distance(material, cached):
        raise OptionError(
            "one key for two different contents", where=str(key)[:24],
            got=_difference(material, cached), hint="use a key for each",
        )  # fmt: skip


def _distance(a: Material, b: Material) -> int:
    return sum(a.get(k) != b.get(k) for k in a.keys() | b.keys())


def _difference(wanted: Material, cached: Material) -> str:
    names = sorted(k for k in wanted.keys() | cached.keys() if wanted.get(k) != cached.get(k))
    return ", ".join(f"{k} ({cached.get(k)} cached, {wanted.get(k)} requested)" for k in names)


SMALLEST_BUCKET = 16  # executables for fewer rows would not differ


class Bucket(NamedTuple):
    """Sizes from `low` to `high`, both included."""

    low: int
    high: int

    def __str__(self) -> str:
        return f"{self.low} … {self.high}"


class BucketedCompileCache:
    """A graph compiled once per bucket of one symbol. Other symbols may stay open.

    `buckets` are upper ends, or (low, high) pairs; by default they are powers of two up to
    `largest`. All executables share parameters, and states of static shape.
    """

    def __init__(
        self,
        graph: Graph | GraphModule,
        symbol: str = "seq",
        buckets: Iterable[int | tuple[int, int]] | None = None,
        *,
        largest: int | None = None,
        device: Device | str = "cpu",
        options: CompileOptions | Mapping[str, Any] | None = None,
        params: ParamStore | None = None,
        capacity: int = 64,
        eviction: str = "lru",
    ) -> None:
        if (buckets is None) == (largest is None):
            raise OptionError("give either buckets or largest", where="BucketedCompileCache")
        self.symbol = symbol
        self.buckets = power_of_two_buckets(largest) if buckets is None else _buckets(buckets)
        self.params = params if params is not None else ParamStore()
        self.cache: CompileCache[CompiledGraph] = CompileCache(capacity, eviction)
        self._template = Session(device).template(graph, options)
        self.signature = self._template.signature
        self._states: dict[str, Buffer] = {}
        if symbol not in self._template.open_symbols:
            raise BindingError(
                "not a symbol that is open", where=self.signature.name, got=symbol,
                expected=", ".join(sorted(self._template.open_symbols)) or "none is",
            )  # fmt: skip

    def bucket(self, size: int) -> Bucket:
        """The bucket of a size."""
        for bucket in self.buckets:
            if bucket.low <= size <= bucket.high:
                return bucket
        raise BindingError(
            "a size outside every bucket", where=self.symbol, got=size,
            expected=" or ".join(map(str, _merged(self.buckets))),
        )  # fmt: skip

    def get(self, size: int) -> CompiledGraph:
        """The compiled graph for `size`, shared by its bucket."""
        bucket = self.bucket(size)
        return self.cache.get_or_make(bucket, lambda: self._compile(bucket))

    def _compile(self, bucket: Bucket) -> CompiledGraph:
        options = self._template.options
        bound = options.binding.with_size(self.symbol, UpTo(bucket.high))
        template = self._template.with_options(replace(options, binding=bound))
        compiled = CompiledGraph(template, self.params)
        for name, shape in self.signature.states.items():
            if shape.is_static:
                compiled.bind_state(name, self._state(name, shape))
        return compiled

    def _state(self, name: str, shape: Shape) -> Buffer:
        new = self._template.backend.allocator.alloc(shape.static_dims, shape.dtype.numpy)
        return self._states.setdefault(name, new)  # other threads may compile buckets too

    def run(
        self, inputs: Mapping[str, Any] | None = None, /, *,
        sizes: Mapping[str, int] | None = None, **named: Any,
    ) -> tuple[Array, ...]:  # fmt: skip
        """Run the executable of the inputs' bucket; see `CompiledGraph.run`."""
        given = {**(inputs or {}), **named}
        return self.get(self._size(given, sizes)).run(given, sizes=sizes)

    def _size(self, given: Mapping[str, Any], sizes: Mapping[str, int] | None) -> int:
        if sizes and self.symbol in sizes:
            return sizes[self.symbol]
        known = self.signature.inputs
        shown = [
            (n, known[n], a.shape) for n, a in given.items() if n in known and hasattr(a, "shape")
        ]
        found = infer_sizes(shown, {**self._template.binding.sizes, **(sizes or {})})
        if self.symbol not in found:
            raise InputError(
                "the size cannot be inferred from the inputs", where=self.symbol,
                hint=f"pass sizes={{{self.symbol!r}: n}} to run",
            )  # fmt: skip
        return found[self.symbol]

    def set_param(self, name: str, array: Any) -> BucketedCompileCache:
        """Set one parameter, for all buckets."""
        self.get(self.buckets[0].low).set_param(name, array)
        return self

    def set_params(self, arrays: Mapping[str, Any]) -> BucketedCompileCache:
        self.get(self.buckets[0].low).set_params(arrays)
        return self

    def __len__(self) -> int:
        """How many executables are compiled."""
        return len(self.cache)


def power_of_two_buckets(
    largest: int | None, smallest: int = SMALLEST_BUCKET
) -> tuple[Bucket, ...]:
    """Powers of two from `smallest` on, and `largest` itself at the end."""
    if not isinstance(largest, int) or largest < 1:
        raise OptionError("not a largest size", where="largest", got=largest)
    ends = [min(smallest, largest)]
    while ends[-1] < largest:
        ends.append(min(2 * ends[-1], largest))
    return _buckets(ends)


def _buckets(given: Iterable[int | tuple[int, int]]) -> tuple[Bucket, ...]:
    found: list[Bucket] = []
    for item in given:
        low: Any = found[-1].high + 1 if found else 1
        high: Any = item
        if isinstance(item, (tuple, list)) and len(item) == 2:
            low, high = item
        whole = all(isinstance(n, int) and not isinstance(n, bool) for n in (low, high))
        if not whole or not 0 <= low <= high:
            raise OptionError(
                "not a bucket", got=item, expected="a rising upper end, or (low, high)"
            )
        if found and low <= found[-1].high:
            raise OptionError("buckets overlap", got=f"{found[-1]} and {low} … {high}")
        found.append(Bucket(low, high))
    if not found:
        raise OptionError("no buckets at all", where="buckets")
    return tuple(found)


def _merged(buckets: Iterable[Bucket]) -> list[Bucket]:
    """Adjacent buckets merged, for error messages."""
    found: list[Bucket] = []
    for bucket in buckets:
        if found and bucket.low == found[-1].high + 1:
            found[-1] = Bucket(found[-1].low, bucket.high)
        else:
            found.append(bucket)
    return found
