"""Models of a server: loaded on first use and once, unloaded when idle, errors for all."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from rlx.errors import FormatError, OutOfMemoryError
from rlx.serve import model_pool
from rlx.serve.api_errors import ApiError
from rlx.serve.model_pool import ModelPool, ModelSpec
from rlx.support.progress import current


class Fake:
    """A model that only knows whether it is open."""

    is_encoder = False

    def __init__(self, name: str) -> None:
        self.name, self.closed = name, False

    def is_for(self, use: str) -> bool:
        return use != "embeddings"

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was loaded; an error in `fails` is raised instead."""
    found: list[Any] = []

    def load(spec: ModelSpec, *_: Any) -> Fake:
        time.sleep(0.02)
        found.append(Fake(spec.name))
        found[-1].thread = threading.current_thread()
        return found[-1]  # type: ignore[no-any-return]

    monkeypatch.setattr(model_pool, "load_served", load)
    return found


def specs(*names: str) -> list[ModelSpec]:
    return [ModelSpec(name, f"{name}.gguf") for name in names]


def test_a_model_is_loaded_once_for_all_who_wait(loads: list[Any]) -> None:
    async def main() -> None:
        pool = ModelPool(specs("a", "b"))
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0.001)

        ticking = asyncio.ensure_future(tick())
        leases = await asyncio.gather(*(pool.acquire("ab"[i % 2], "chat") for i in range(10)))
        ticking.cancel()
        assert ticks > 5  # the loop went on
        assert sorted(m.name for m in loads) == ["a", "b"]
        assert len({m.thread for m in loads}) == 1  # one at a time
        assert {lease.model.name for lease in leases} == {"a", "b"}
        await pool.close()
        assert all(m.closed for m in loads)
        with pytest.raises(ApiError, match="shutting down"):
            await pool.acquire("a", "chat")

    asyncio.run(main())


def test_an_error_is_told_to_all_and_the_next_one_tries_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tries = []

    def load(spec: ModelSpec, *_: Any) -> Fake:
        tries.append(spec.name)
        time.sleep(0.02)
        if len(tries) == 1:
            raise FormatError("not a model", where="/secret/place")
        return Fake(spec.name)

    monkeypatch.setattr(model_pool, "load_served", load)

    async def main() -> None:
        pool = ModelPool(specs("a"))
        told = await asyncio.gather(
            *(pool.acquire("a", "chat") for _ in range(5)), return_exceptions=True
        )
        assert all(isinstance(e, ApiError) and e.status == 500 for e in told)
        assert "not a model" in str(told[0]) and "secret" not in str(told[0])
        assert tries == ["a"]
        (await pool.acquire("a", "chat")).release()
        assert tries == ["a", "a"]
        await pool.close()

    asyncio.run(main())


def test_idle_models_are_unloaded_but_not_those_in_use(loads: list[Any]) -> None:
    async def main() -> None:
        pool = ModelPool(specs("a", "b"), idle_seconds=0.05)
        used = await pool.acquire("a", "chat")
        (await pool.acquire("b", "chat")).release()
        await asyncio.sleep(0.06)
        await pool.unload_idle()
        assert [m.closed for m in loads] == [False, True]
        assert [m.loaded for m in pool.models()] == [True, False]
        used.release()
        used.release()  # a second time does nothing
        await pool.unload_idle()
        assert not loads[0].closed  # just used
        await asyncio.sleep(0.06)
        await pool.unload_idle()
        assert loads[0].closed
        (await pool.acquire("a", "chat")).release()
        assert len(loads) == 3
        await pool.close()

    asyncio.run(main())


def test_memory_is_made_by_unloading_the_least_recently_used(
    loads: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    free = 1000
    monkeypatch.setattr(
        model_pool, "free_memory", lambda: free + 500 * sum(m.closed for m in loads)
    )
    for name in "abc":
        (tmp_path / name).write_bytes(b"x" * (1200 if name == "c" else 10))

    async def main() -> None:
        pool = ModelPool([ModelSpec(name, str(tmp_path / name)) for name in "abc"])
        for name in "ab":
            (await pool.acquire(name, "chat")).release()
        (await pool.acquire("a", "chat")).release()
        (await pool.acquire("c", "chat")).release()  # needs 1500: one must go
        assert {m.name for m in loads if m.closed} == {"b"}
        await pool.close()

    asyncio.run(main())


def test_a_load_without_memory_is_tried_again_after_others_went(
    loads: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = model_pool.load_served

    def load(spec: ModelSpec, *given: Any) -> Any:
        if spec.name == "big" and not all(m.closed for m in loads):
            raise OutOfMemoryError("no memory")
        return plain(spec, *given)

    monkeypatch.setattr(model_pool, "load_served", load)

    async def main() -> None:
        pool = ModelPool(specs("a", "big"))
        used = await pool.acquire("a", "chat")
        with pytest.raises(ApiError) as told:
            await pool.acquire("big", "chat")
        assert told.value.status == 503
        used.release()
        (await pool.acquire("big", "chat")).release()
        assert loads[0].closed
        await pool.close()

    asyncio.run(main())


def test_names_aliases_adapters_and_other_configurations(loads: list[Any]) -> None:
    async def main() -> None:
        a = ModelSpec("a", "a.gguf", ("alias",), (("fine", "f"), ("other", "o")))
        pool = ModelPool([a, *specs("b")])
        for name, adapter in (("a", None), ("alias", None), ("fine", "fine"), ("a:other", "other")):
            with await pool.acquire(name, "chat") as lease:
                assert (lease.model.name, lease.adapter) == ("a", adapter)
        assert [(m.name, m.parent) for m in pool.models()] == [
            ("a", None), ("fine", "a"), ("other", "a"), ("b", None),
        ]  # fmt: skip
        with pytest.raises(ApiError) as told:
            await pool.acquire("c", "chat")
        assert (told.value.status, told.value.code) == (404, "model_not_found")
        with pytest.raises(ApiError, match="not for embeddings"):
            await pool.acquire("a", "embeddings")
        used = await pool.acquire("b", "chat")
        pool.configure([a, *specs("c")])
        await pool.unload_idle()
        assert [m.closed for m in loads] == [False, False]  # a stays, b is in use
        used.release()
        await pool.unload_idle()
        assert [m.closed for m in loads] == [False, True]
        await pool.close()

    asyncio.run(main())


def test_what_the_command_line_calls_models() -> None:
    assert ModelSpec.of("dir/Some-Model.Q4.gguf").name == "Some-Model.Q4"
    named = ModelSpec.of("mine=dir/x=y.gguf")
    assert (named.name, named.path) == ("mine", "dir/x=y.gguf")
    assert ModelSpec.of("owner/name").name == "name"
    assert "owner/name" in ModelSpec.of("owner/name").aliases


@pytest.mark.parametrize(("pause", "steps"), [(0.0, [0, 1, 2, 3]), (60.0, [])])
def test_a_load_that_takes_long_says_what_it_does(
    monkeypatch: pytest.MonkeyPatch, pause: float, steps: list[int]
) -> None:
    def load(spec: ModelSpec, *_: Any) -> Fake:
        current().expect("compiling kernels", 3)
        for _ in range(3):
            current().advance("compiling kernels")
        return Fake(spec.name)

    monkeypatch.setattr(model_pool, "load_served", load)
    monkeypatch.setattr(model_pool, "_PAUSE", pause)
    events: list[tuple[str, int]] = []

    async def main() -> None:
        loop = threading.current_thread()

        def on_event(event: str, **fields: Any) -> None:
            assert threading.current_thread() is loop
            events.append((event, fields.get("done", -1)))

        pool = ModelPool(specs("a"), on_event=on_event)
        (await pool.acquire("a", "chat")).release()
        await pool.close()

    asyncio.run(main())
    assert events[:-2] == [("model_loading", done) for done in steps]
    assert events[-2:] == [("model_loaded", -1), ("model_unloaded", -1)]
