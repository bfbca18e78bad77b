"""`Loader`: batches of a source, in an order that a seed gives, prefetched in threads."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from rlx.data.sources import Arrays, Data, Source, stack
from rlx.errors import InputError, OptionError

_STATE = ("epoch", "position", "seed", "shuffle", "length", "num_shards", "shard")


def epoch_order(length: int, seed: int, epoch: int) -> Data:
    """The items of an epoch in its order: a permutation that depends on seed and epoch alone."""
    words = np.random.Philox(key=seed % 2**64 + (epoch << 64)).random_raw(length)
    return np.argsort(words, kind="stable")


class Loader:
    """Batches of a source: a tree of arrays, or anything with a length and items by number.

    A `for` loop runs an epoch, or what is left of it; every epoch has another order. `num_shards`
    processes that share a seed get disjoint items. With `drop_last` all batches are full, and all
    shards have as many. `collate` joins items to a batch; by default they are stacked.

    `prefetch` batches are made ahead by `threads` threads, which end with the iterator. The order
    does not depend on them.
    """

    def __init__(
        self, source: Any, batch_size: int, *, shuffle: bool = True, seed: int = 0,
        drop_last: bool = True, num_shards: int = 1, shard: int = 0,
        collate: Callable[[list[Any]], Any] | None = None, threads: int = 1, prefetch: int = 2,
    ) -> None:  # fmt: skip
        is_source = isinstance(source, Source) and not isinstance(source, (dict, list, tuple))
        self.source: Source = source if is_source and not _is_array(source) else Arrays(source)
        self.batch_size, self.shuffle, self.seed = batch_size, bool(shuffle), int(seed)
        self.drop_last, self.num_shards, self.shard = drop_last, num_shards, shard
        self.collate, self.threads, self.prefetch = collate, threads, prefetch
        self.length = len(self.source)
        self._epoch = self._position = self._turn = 0
        self._order: tuple[int, Data] | None = None
        self._check()

    def _check(self) -> None:
        for name, value, low in (
            ("batch_size", self.batch_size, 1), ("num_shards", self.num_shards, 1),
            ("threads", self.threads, 0), ("prefetch", self.prefetch, 0),
        ):  # fmt: skip
            if not isinstance(value, (int, np.integer)) or value < low:
                raise OptionError(
                    f"not a {name}", where="Loader", got=value, expected=f"{low} or more"
                )
        if not 0 <= self.shard < self.num_shards:
            raise OptionError(
                "no such shard", where="Loader", got=self.shard,
                expected=f"0 to {self.num_shards - 1}",
            )  # fmt: skip
        if not len(self):
            raise InputError(
                "no batch fits", where="Loader", got=f"{self.length} items in {self.num_shards} "
                f"shards, batches of {self.batch_size}", hint="drop_last=False gives smaller ones",
            )  # fmt: skip

    # -- order --------------------------------------------------------------------------------

    def _items(self) -> int:
        """How many items of an epoch this shard gives."""
        if not self.drop_last:
            return len(range(self.shard, self.length, self.num_shards))
        return self.length // self.num_shards // self.batch_size * self.batch_size

    def __len__(self) -> int:
        """Batches an epoch."""
        return -(-self._items() // self.batch_size)

    def _indices(self, epoch: int) -> Data:
        """The items of this shard in an epoch, in order."""
        if not self.shuffle:
            return np.arange(self.shard, self.length, self.num_shards)[: self._items()]
        if self._order is None or self._order[0] != epoch:
            self._order = epoch, epoch_order(self.length, self.seed, epoch)
        return self._order[1][self.shard :: self.num_shards][: self._items()]

    # -- iteration ----------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        """The batches of this epoch that are left."""
        self._turn += 1
        return self._epoch_batches(self._turn)

    def repeat(self) -> Generator[Any, None, None]:
        """Batches without an end, epoch after epoch. `close()` ends its threads."""
        while True:
            yield from self

    def _epoch_batches(self, turn: int) -> Iterator[Any]:
        indices = self._indices(self._epoch)
        starts = range(self._position, len(indices), self.batch_size)
        parts = (indices[i : i + self.batch_size] for i in starts)
        made = self._prefetched(parts) if self.threads and self.prefetch else map(self._make, parts)
        try:
            for start, batch in zip(starts, made, strict=True):
                self._require_turn(turn)
                self._position = start + self.batch_size
                if self._position >= len(
                    indices
                ):  # the state behind the last batch is the next epoch
                    self._epoch, self._position = self._epoch + 1, 0
                yield batch
        finally:
            if isinstance(made, Generator):
                made.close()

    def _require_turn(self, turn: int) -> None:
        if turn != self._turn:
            raise InputError(
                "another iteration of this loader began, or its state was loaded", where="Loader",
                hint="one loader serves one loop at a time",
            )  # fmt: skip

    def _make(self, indices: Data) -> Any:
        batch = getattr(self.source, "batch", None)
        if batch is not None and self.collate is None:
            return batch(indices)
        items = [self.source[int(i)] for i in indices]
        return (self.collate or stack)(items)

    def _prefetched(self, parts: Iterator[Data]) -> Iterator[Any]:
        """Batches in order, made by threads that end with this generator. An error comes where its
        batch would have."""
        pool = ThreadPoolExecutor(self.threads, thread_name_prefix="rlx-data")
        ahead: deque[Future[Any]] = deque()
        try:
            for part in parts:
                ahead.append(pool.submit(self._make, part))
                if len(ahead) > self.prefetch:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    # -- state --------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The epoch that the next batch belongs to."""
        return self._epoch

    def state_dict(self) -> dict[str, int]:
        """Where the next batch begins, whatever was made ahead: numbers for a checkpoint."""
        values = (self._epoch, self._position, self.seed, int(self.shuffle), self.length,
                  self.num_shards, self.shard)  # fmt: skip
        return dict(zip(_STATE, values, strict=True))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a loader of the same source, seed and shards was."""
        now = self.state_dict()
        if set(state) != set(now) or not all(type(v) is int and v >= 0 for v in state.values()):
            raise InputError(
                "not the state of a loader", where="Loader", got=str(dict(state))[:80],
                expected=", ".join(_STATE),
            )  # fmt: skip
        other = [k for k in _STATE[2:] if state[k] != now[k]]
        if other or state["position"] >= max(self._items(), 1):
            raise InputError(
                "the state of another loader", where="Loader",
                got=", ".join(f"{k} {state[k]}" for k in other or ["position"]),
                expected=", ".join(f"{k} {now[k]}" for k in other) or f"below {self._items()}",
            )  # fmt: skip
        self._epoch, self._position = state["epoch"], state["position"]
        self._turn += 1


def _is_array(x: object) -> bool:
    return isinstance(x, np.ndarray) or hasattr(x, "__dlpack__")
