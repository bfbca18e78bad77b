"""Caches of compiled things: order of eviction, bytes, pins, one compilation per key, buckets."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from small_model import CLOSE, WIDTH, build, expected, inputs, weights

import rlx
from rlx import BindingError, BucketedCompileCache, CompileCache, OptionError
from rlx.backends.buffer import HOST


def filled(eviction: str, capacity: int = 2, **more: int) -> CompileCache[str]:
    cache: CompileCache[str] = CompileCache(capacity, eviction, **more)
    for key in "ab":
        cache.get_or_make(key, lambda key=key: f"made {key}", size=lambda v: 10)
    return cache


def test_fifo_drops_the_oldest_and_lru_the_least_used() -> None:
    for eviction, gone in (("fifo", "a"), ("lru", "b")):
        cache = filled(eviction)
        assert cache.get("a") == "made a"
        cache.get_or_make("c", lambda: "made c")
        assert gone not in cache and "c" in cache and len(cache) == 2
        assert cache.counters.evictions == 1
        assert "evicted" in cache.explain(gone)


def test_bytes_bound_a_cache_too() -> None:
    cache = filled("fifo", 8, capacity_bytes=25)
    cache.get_or_make("c", lambda: "c", size=lambda v: 10)
    assert list(cache) == ["b", "c"] and cache.num_bytes == 20
    cache.get_or_make("d", lambda: "d", size=lambda v: 100)  # too large for all: it stays alone
    assert list(cache) == ["d"]


def test_pinned_entries_stay() -> None:
    cache = filled("lru")
    cache.pin("a")
    for key in "cde":
        cache.get_or_make(key, lambda: "more")
    assert "a" in cache and len(cache) == 2
    cache.pin("a", False)
    cache.get_or_make("f", lambda: "more")
    assert "a" not in cache
    with pytest.raises(OptionError, match="no such entry"):
        cache.pin("a")


def test_many_threads_make_a_value_once() -> None:
    cache: CompileCache[int] = CompileCache(4)
    calls: list[int] = []

    def make() -> int:
        calls.append(1)
        time.sleep(0.05)
        return 7

    found: list[int] = []
    threads = [
        threading.Thread(target=lambda: found.append(cache.get_or_make("k", make)))
        for _ in range(8)
    ]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert found == [7] * 8 and len(calls) == 1
    assert (cache.counters.misses, cache.counters.hits) == (1, 7)


def test_a_failure_is_not_kept_and_blocks_nobody() -> None:
    cache: CompileCache[int] = CompileCache(4)
    with pytest.raises(ZeroDivisionError):
        cache.get_or_make("k", lambda: 1 // 0)
    assert cache.get_or_make("k", lambda: 5) == 5


def test_a_key_stands_for_one_thing() -> None:
    cache: CompileCache[int] = CompileCache(4)

    def ask(seq: int) -> int:
        return cache.get_or_make("k", lambda: 1, token=(seq,), material=lambda: {"seq": seq})

    ask(4)
    assert ask(4) == 1
    with pytest.raises(
        OptionError, match=r"one key for two different contents.*4 cached, 5 requested"
    ):
        ask(5)


def test_a_miss_explains_itself() -> None:
    cache: CompileCache[int] = CompileCache(4)
    assert cache.explain("x") == "miss: the cache is empty"
    cache.get_or_make("k", lambda: 1, material=lambda: {"seq": 4, "quant": None})
    cache.get_or_make("l", lambda: 1, material=lambda: {"seq": 9, "quant": "Q4_K"})
    assert cache.explain("k") == "hit"
    reason = cache.explain("m", {"seq": 5, "quant": None})
    assert reason == "miss: differs from the nearest entry in seq (4 cached, 5 requested)"
    assert "none of the 2 entries" in cache.explain("m")


@pytest.mark.parametrize(
    "wrong", [{"capacity": 0}, {"eviction": "random"}, {"capacity_bytes": 0}], ids=str
)
def test_wrong_settings_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(OptionError):
        CompileCache(**wrong)  # type: ignore[arg-type]


# -- buckets --------------------------------------------------------------------------------------


def bucketed(device: str, **settings: object) -> BucketedCompileCache:
    cache = BucketedCompileCache(build(), "seq", device=device, options={"threads": 1}, **settings)  # type: ignore[arg-type]
    return cache.set_params(weights())


@pytest.mark.parametrize("device", ["reference", "cpu"])
def test_one_executable_serves_a_bucket(device: str) -> None:
    f = bucketed(device, buckets=[4, 16])
    for seq in (1, 3, 4, 5, 16):
        x = inputs(2, seq)
        (y,) = f.run(x=x)
        assert y.shape == (2, seq, 8)
        np.testing.assert_allclose(y, expected(x, weights()), **CLOSE)
    assert len(f) == 2
    assert f.get(1) is f.get(4) and f.get(5) is f.get(16) is not f.get(4)
    entry = f.get(7).manifest.find("x")
    assert entry.num_bytes == 2 * 16 * WIDTH * 4  # planned for the upper end


def test_only_live_rows_are_computed() -> None:
    f = bucketed("cpu", buckets=[4096])
    x = inputs(1, 4096)
    f.run(x=x)
    short = min(_seconds(f, x[:, :8]) for _ in range(20))
    long = min(_seconds(f, x) for _ in range(5))
    assert short < long / 20  # 512 times fewer rows, and what a run costs at least
    out = np.full((1, 4096, 8), np.nan, np.float32)
    given = HOST.put(np.ascontiguousarray(x[:, :8]))
    f.get(8).executable.run([given], [HOST.put(out)], {"seq": 8})
    np.testing.assert_allclose(out[:, :8], expected(x[:, :8], weights()), **CLOSE)
    assert np.isnan(out[:, 8:]).all()


def _seconds(f: BucketedCompileCache, x: np.ndarray) -> float:
    start = time.perf_counter()
    f.run(x=x)
    return time.perf_counter() - start


def test_sizes_out_of_range_say_the_range() -> None:
    f = bucketed("reference", largest=100)
    assert [b.high for b in f.buckets] == [16, 32, 64, 100]
    with pytest.raises(BindingError, match=r"outside every bucket; got 101; expected 1 … 100"):
        f.run(x=inputs(1, 101))
    holes = bucketed("reference", buckets=[(2, 4), (8, 16), (17, 20)])
    with pytest.raises(BindingError, match=r"got 5; expected 2 … 4 or 8 … 20"):
        holes.get(5)
    with pytest.raises(rlx.InputError, match="size cannot be inferred"):
        holes.run()


@pytest.mark.parametrize(
    "wrong",
    [{"buckets": []}, {"buckets": [8, 4]}, {"buckets": [(1, 4), (3, 8)]}, {"largest": 0}, {},
     {"buckets": [4], "largest": 8}, {"buckets": ["x"]}],
    ids=str,
)  # fmt: skip
def test_wrong_buckets_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(OptionError):
        BucketedCompileCache(build(), "seq", device="reference", **wrong)  # type: ignore[arg-type]
    with pytest.raises(BindingError, match="not a symbol that is open"):
        BucketedCompileCache(build(), "frames", [4], device="reference")


def test_buckets_share_states() -> None:
    g = rlx.Graph("tally")
    x = g.input("x", ["n"])
    total = g.state_update(g.state("sum", [1]), g.sum(x, 0, keepdims=True), axis=0, start=0)
    g.set_outputs({"sum": total})
    f = BucketedCompileCache(g, "n", [2, 8], device="cpu")
    f.run(x=np.ones(2, np.float32))
    assert f.get(8).read_state("sum")[0] == 2
