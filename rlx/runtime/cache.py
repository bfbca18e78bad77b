"""Compiled things by key: bounded by entries and bytes, pinned ones kept, misses explained."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from rlx.errors import OptionError

T = TypeVar("T")
_POLICIES = ("fifo", "lru")


@dataclass
class _Entry(Generic[T]):
    value: T
    size: int
    material: Mapping[str, object]
    pinned: bool = False


@dataclass
class CacheCounters:
    hits: int = 0
    misses: int = 0
    evictions: int = 0


@dataclass
class _Pending:
    """A value being made: others that ask for it wait instead of making it too."""

    done: threading.Event = field(default_factory=threading.Event)


class CompileCache(Generic[T]):
    """Values made once per key, by whoever asks first.

    `capacity` bounds the entries, `capacity_bytes` what they hold; the oldest ("fifo") or the least
    recently used ("lru") goes first, pinned ones never. `material` is what a key stands for: it
    lets `explain` say what a miss differed in, and a key met with other material is an error.
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
        self._pending: dict[Hashable, _Pending] = {}
        self._lock = threading.Lock()

    def get(self, key: Hashable) -> T | None:
        """The value, or None; a hit costs a lookup."""
        with self._lock:
            return self._find(key)

    def _find(self, key: Hashable) -> T | None:
        entry = self._entries.get(key)
        if entry is None:
            return None
        self.counters.hits += 1
        if self.eviction == "lru":
            self._entries.move_to_end(key)
        return entry.value

    def get_or_make(
        self,
        key: Hashable,
        make: Callable[[], T],
        *,
        size: Callable[[T], int] = lambda value: 0,
        material: Mapping[str, object] | None = None,
    ) -> T:
        """The value of `key`, made if it is not there; several threads make it once."""
        while True:
            with self._lock:
                found = self._find(key)
                if found is not None:
                    self._check(key, material)
                    return found
                pending = self._pending.get(key)
                if pending is None:
                    mine = self._pending[key] = _Pending()
                    self.counters.misses += 1
                    break
            pending.done.wait()
        try:
            value = make()
            with self._lock:
                self._entries[key] = _Entry(value, size(value), dict(material or {}))
                self._evict(key)
            return value
        finally:
            with self._lock:
                del self._pending[key]
            mine.done.set()

    def _check(self, key: Hashable, material: Mapping[str, object] | None) -> None:
        kept = self._entries[key].material
        if material is not None and kept and kept != dict(material):
            raise OptionError(
                "one key for two different things", where=str(key)[:24],
                got=_difference(dict(material), kept), hint="give each its own key",
            )  # fmt: skip

    def _evict(self, newest: Hashable) -> None:
        def too_much() -> bool:
            full = self.capacity_bytes is not None and self.num_bytes > self.capacity_bytes
            return len(self._entries) > self.capacity or full

        for key in list(self._entries):
            if not too_much():
                return
            if key != newest and not self._entries[key].pinned:
                del self._entries[key]
                self.counters.evictions += 1

    def pin(self, key: Hashable, pinned: bool = True) -> None:
        """Keep an entry whatever else comes."""
        with self._lock:
            if key not in self._entries:
                raise OptionError("no such entry to pin", got=str(key)[:24])
            self._entries[key].pinned = pinned

    def explain(self, key: Hashable, material: Mapping[str, Any] | None = None) -> str:
        """Why `key` hits or misses: what differs from the nearest entry."""
        with self._lock:
            if key in self._entries:
                return "hit"
            if not self._entries:
                return "miss: the cache is empty"
            if material is None:
                return f"miss: none of the {len(self._entries)} entries has this key"
            wanted = dict(material)
            nearest = min(
                (e.material for e in self._entries.values()),
                key=lambda kept: _distance(wanted, kept),
            )
            if not _distance(wanted, nearest):
                return "miss: nothing differs from the nearest entry; it was evicted and remade"
            return f"miss: differs from the nearest entry in {_difference(wanted, nearest)}"

    @property
    def num_bytes(self) -> int:
        return sum(e.size for e in self._entries.values())

    def clear(self) -> None:
        with self._lock:
            self._entries.clear()

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Hashable]:
        return iter(list(self._entries))


def _distance(a: Mapping[str, object], b: Mapping[str, object]) -> int:
    return sum(a.get(k) != b.get(k) for k in a.keys() | b.keys())


def _difference(wanted: Mapping[str, object], kept: Mapping[str, object]) -> str:
    names = sorted(k for k in wanted.keys() | kept.keys() if wanted.get(k) != kept.get(k))
    return ", ".join(f"{k} ({kept.get(k)} there, {wanted.get(k)} asked)" for k in names)
