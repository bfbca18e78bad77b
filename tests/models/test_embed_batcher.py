"""Embeddings of many callers in common batches: the vectors of each alone, fair, cancellable."""

from __future__ import annotations

import asyncio
import random
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "goldens"))
from encoder_files import write_model
from test_generate import Letters
from tiny import VOCAB, write_folder

import rlx
from rlx.models.batch import embed_batcher
from rlx.models.batch.embed_batcher import EmbedBatcher
from rlx.models.embed_plan import EmbedPlan
from rlx.models.model_file import ModelFile


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with rlx.load(write_model(tmp_path_factory.mktemp("bert"))) as loaded:
        yield loaded


def some_texts(rng: random.Random) -> list[str]:
    return [" ".join("abcdefg"[: rng.randrange(8)]) for _ in range(rng.randrange(1, 6))]


class Recorded:
    """A model that embeds a text as its length, and records what ran; it waits to be let go."""

    def __init__(self) -> None:
        self.rounds: list[list[str]] = []
        self.go = threading.Semaphore(0)
        self.bad = "bad"

    def plan_embed(self, texts: Any, kind: str = "a") -> EmbedPlan:
        return EmbedPlan(kind, list(texts), 1, self.run, lambda rows: rows)

    def run(self, texts: Any) -> Any:
        self.go.acquire()
        self.rounds.append(list(texts))
        for number, text in enumerate(texts):
            if text == self.bad:
                raise ZeroDivisionError(text)
            yield [number], np.array([[len(text)]], np.float32)


@pytest.mark.slow
def test_vectors_are_those_of_each_caller_alone(model: Any) -> None:
    rng = random.Random(4)
    asked = [(some_texts(rng), {"normalize": rng.random() < 0.5}) for _ in range(40)]
    alone = [model.embed(texts, **options) for texts, options in asked]

    async def all_at_once(batcher: EmbedBatcher) -> list[Any]:
        calls = (batcher.embed_async(t, user=rng.choice("ab"), **o) for t, o in asked)
        return await asyncio.gather(*calls)

    with EmbedBatcher(model) as batcher:
        for found, expected in zip(asyncio.run(all_at_once(batcher)), alone, strict=True):
            np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))
        assert batcher.waiting == 0
        assert batcher.embed([]).shape == (0, model.width)
        with pytest.raises(rlx.RlxError):
            batcher.embed([3])  # type: ignore[list-item]


def test_calls_share_batches(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []
    run = model.runner.run
    monkeypatch.setattr(model.runner, "run", lambda *a: (runs.append(1), run(*a))[1])
    with EmbedBatcher(model, wait=0.2) as batcher:
        futures = [batcher.submit(["a b c"]) for _ in range(16)]
        for future in futures:
            future.result()
    assert len(runs) == 1


def test_language_models_embed_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelFile, "tokenizer", lambda self: Letters())
    write_folder("llama", tmp_path)
    rng = random.Random(2)
    texts = ["".join(chr(256 + rng.randrange(VOCAB - 1)) for _ in range(n)) for n in (0, 3, 20)]
    with rlx.load(tmp_path) as model, EmbedBatcher(model) as batcher:
        for pooling in ("mean", "last"):
            futures = [batcher.submit([t], pooling=pooling) for t in texts]
            found = np.concatenate([future.result() for future in futures])
            np.testing.assert_array_equal(found, model.embed(texts, pooling=pooling))
        with pytest.raises(rlx.InputError, match="context"):
            batcher.embed([texts[1] * 1000])


def test_a_few_texts_do_not_wait_for_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embed_batcher, "ROUND", 12)
    model = Recorded()
    with EmbedBatcher(model) as batcher:
        many = batcher.submit(["mm"] * 50, user="many")
        few = batcher.submit(["ff"] * 3, user="few")
        for _ in range(3):
            model.go.release()
        assert few.result(10).tolist() == [[2], [2], [2]]
        assert not many.done()
        for _ in range(50):
            model.go.release()
        assert many.result(10).shape == (50, 1)
    assert all(sum(map(len, texts)) <= 14 for texts in model.rounds)


def test_cancelled_texts_do_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embed_batcher, "ROUND", 4)
    model = Recorded()
    with EmbedBatcher(model) as batcher:
        first, second = batcher.submit(["aaaa"]), batcher.submit(["bbbb"] * 5)
        last = batcher.submit(["cccc"])
        assert second.cancel() and batcher.waiting <= 2
        for _ in range(5):
            model.go.release()
        assert (first.result(10), last.result(10)) == ([[4]], [[4]])

        async def give_up() -> None:
            await asyncio.wait_for(batcher.embed_async(["dddd"] * 3), 0.01)

        for _ in range(5):
            model.go.acquire(blocking=False)
        with pytest.raises(TimeoutError):
            asyncio.run(give_up())
        model.go.release(9)
    assert ["bbbb"] not in model.rounds
    assert batcher.waiting == 0


def test_an_error_is_that_of_its_own_call() -> None:
    model = Recorded()
    model.go.release(99)
    with EmbedBatcher(model, wait=0.1) as batcher:
        futures = [batcher.submit(texts) for texts in (["x"], ["bad", "y"], ["zz"], ["w"])]
        assert [futures[i].result(10)[0, 0] for i in (0, 2, 3)] == [1, 2, 1]
        with pytest.raises(ZeroDivisionError):
            futures[1].result(10)
        other = batcher.submit(["k"], kind="b")  # texts of another kind run apart
        assert other.result(10) == [[1]] and model.rounds[-1] == ["k"]


def test_a_full_queue_and_a_closed_batcher_refuse() -> None:
    model = Recorded()
    batcher = EmbedBatcher(model, waiting=5)
    waits = batcher.submit(["a"] * 4)
    with pytest.raises(rlx.QueueFullError) as full:
        batcher.submit(["a"] * 2)
    assert full.value.retry_after == 1.0
    later = batcher.submit(["b"])
    model.go.release(9)
    batcher.close()
    batcher.close()
    with pytest.raises(rlx.EngineClosedError):
        batcher.submit(["a"])
    for future, size in ((waits, 4), (later, 1)):
        with suppress(CancelledError):
            assert len(future.result(10)) == size
