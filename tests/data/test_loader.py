"""Loaders: every item once, the same by seed, resumed to the item, threads that end."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rlx
from rlx import data
from rlx.data import Loader


def items(batches: Any) -> list[list[int]]:
    return [b.tolist() for b in batches]


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 60), st.integers(1, 9), st.integers(1, 4), st.booleans(), st.booleans(),
       st.integers(0, 2**64 - 1))  # fmt: skip
def test_shards_cover_every_item_once(
    n: int, batch: int, shards: int, shuffle: bool, drop_last: bool, seed: int
) -> None:
    found, counts = [], []
    for shard in range(shards):
        try:
            loader = Loader(np.arange(n), batch, shuffle=shuffle, seed=seed, drop_last=drop_last,
                            num_shards=shards, shard=shard, threads=0)  # fmt: skip
        except rlx.InputError:  # no batch fits
            assert (n // shards // batch if drop_last else len(range(shard, n, shards))) == 0
            continue
        made = items(loader)
        assert len(made) == len(loader)
        assert all(len(b) == batch for b in (made if drop_last else made[:-1]))
        counts.append(len(made))
        found += [i for b in made for i in b]
    assert len(set(found)) == len(found)
    if drop_last:
        assert len(set(counts)) <= 1 and len(found) == shards * (n // shards // batch) * batch
    else:
        assert sorted(found) == list(range(n))


def test_each_epoch_is_another_permutation_of_its_seed() -> None:
    def epochs(seed: int, threads: int) -> list[list[list[int]]]:
        loader = Loader(np.arange(50), 5, seed=seed, threads=threads, prefetch=3)
        return [items(loader) for _ in range(3)]

    first = epochs(0, 0)
    assert first == epochs(0, 1) == epochs(0, 3)
    flat = [[i for b in e for i in b] for e in first]
    assert all(sorted(e) == list(range(50)) for e in flat)
    assert len({tuple(e) for e in flat}) == 3 and epochs(1, 1) != first
    for seed, epoch in ((0, 0), (2**63 + 5, 7)):  # the same on every machine
        words = [w for i in range(3) for w in philox(i + 1, seed, epoch)][:11]
        order = data.epoch_order(11, seed, epoch)
        assert order.tolist() == sorted(range(11), key=lambda i: words[i])


def philox(counter: int, *key: int) -> list[int]:
    """Philox4x64-10: J. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011."""
    a, b, c, d, (k, l) = counter, 0, 0, 0, key
    for _ in range(10):
        low, high = a * 0xD2E7470EE14C6C93, c * 0xCA5A826395121157
        a, b, c, d = (high >> 64) ^ b ^ k, high % 2**64, (low >> 64) ^ d ^ l, low % 2**64
        k, l = (k + 0x9E3779B97F4A7C15) % 2**64, (l + 0xBB67AE8584CAA73B) % 2**64
    return [a, b, c, d]


def test_all_permutations_are_as_likely() -> None:
    counts: dict[tuple[int, ...], int] = {}
    for seed in range(2400):
        order = tuple(data.epoch_order(4, seed, seed % 7).tolist())
        counts[order] = counts.get(order, 0) + 1
    assert len(counts) == 24
    # 100 expected of each: chi-square of 23 degrees of freedom is below 50 but once in 1,000
    assert sum((c - 100) ** 2 / 100 for c in counts.values()) < 50


@settings(max_examples=25, deadline=None)
@given(st.integers(6, 40), st.integers(1, 5), st.integers(0, 30), st.integers(0, 2))
def test_a_state_resumes_at_the_very_item(n: int, batch: int, done: int, threads: int) -> None:
    def loader() -> Loader:
        return Loader({"x": np.arange(n)}, batch, seed=3, threads=threads, drop_last=False)

    def take(stream: Any, count: int) -> list[list[int]]:
        return [next(stream)["x"].tolist() for _ in range(count)]

    straight = take(loader().repeat(), done + 20)
    first, second = loader(), loader()
    stream = first.repeat()
    assert take(stream, done) == straight[:done]
    second.load_state_dict(first.state_dict())  # not what was prefetched, but what was given
    assert take(second.repeat(), 20) == straight[done:]
    stream.close()


def test_breaking_off_goes_on_where_it_was() -> None:
    loader = Loader(np.arange(20), 4, shuffle=False)
    for batch in loader:
        if batch[0] == 4:
            break
    assert items(loader) == [[8, 9, 10, 11], [12, 13, 14, 15], [16, 17, 18, 19]]
    assert loader.epoch == 1 and len(items(loader)) == 5


class Broken:
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> int:
        if index == 5:
            raise ValueError("item 5")
        time.sleep(0.001)
        return index


def _threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("rlx-data")]


@pytest.mark.parametrize("threads", [0, 1, 3])
def test_errors_come_in_their_place_and_threads_end(threads: int) -> None:
    loader = Loader(Broken(), 2, shuffle=False, threads=threads, prefetch=4)
    found = []
    with pytest.raises(ValueError, match="item 5"):
        for batch in loader:
            found.append(batch.tolist())
            assert len(_threads()) <= threads
    assert found == [[0, 1], [2, 3]] and not _threads()
    assert loader.state_dict()["position"] == 4
    stream = iter(Loader(np.arange(100), 2, threads=threads))
    next(stream)
    del stream  # nobody iterates any more
    assert not _threads()


def test_an_old_iterator_does_not_go_on() -> None:
    loader = Loader(np.arange(10), 2)
    old = iter(loader)
    next(old)
    next(iter(loader))
    with pytest.raises(rlx.InputError, match="another iteration"):
        next(old)


def test_states_are_checked() -> None:
    loader = Loader(np.arange(10), 2, seed=4)
    state = loader.state_dict()
    for change in ({"seed": 5}, {"length": 11}, {"position": 10}, {"shuffle": 0}, {"shard": 1}):
        with pytest.raises(rlx.InputError, match="state of another loader"):
            loader.load_state_dict(state | change)
    for bad in ({}, state | {"epoch": -1}, state | {"epoch": 1.5}, state | {"epoch": True},
                state | {"more": 1}):  # fmt: skip
        with pytest.raises(rlx.InputError, match="not the state of a loader"):
            loader.load_state_dict(bad)
    for options in ({"batch_size": 0}, {"threads": -1}, {"shard": 1}, {"num_shards": 0}):
        with pytest.raises(rlx.OptionError):
            Loader(np.arange(10), **{"batch_size": 2, **options})
    with pytest.raises(rlx.InputError, match="no batch fits"):
        Loader(np.arange(3), 4)
    with pytest.raises(rlx.ShapeError, match="different numbers of items"):
        Loader({"x": np.arange(3), "y": np.arange(4)}, 1)


def test_items_are_joined_leaf_by_leaf() -> None:
    rows: Any = [{"x": np.full(2, i), "n": i, "text": f"t{i}"} for i in range(4)]
    source = data.Mapped(Rows(rows), lambda row: row | {"n": -row["n"]})
    (batch,) = Loader(source, 4, shuffle=False)
    assert batch["x"].shape == (4, 2) and batch["n"].tolist() == [0, -1, -2, -3]
    assert batch["text"] == ["t0", "t1", "t2", "t3"]
    (pairs,) = Loader(Rows(rows), 4, shuffle=False, collate=len)
    assert pairs == 4
    with pytest.raises(rlx.ShapeError, match="differ in shape"):
        data.stack([np.zeros(2), np.zeros(3)])
    with pytest.raises(rlx.InputError, match="differ in structure"):
        data.stack([{"a": 1}, {"b": 1}])


class Rows:
    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]
