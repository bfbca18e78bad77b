"""The engine under load: an answer is that of its request alone, whatever comes, goes or fails."""

from __future__ import annotations

import asyncio
import gc
import random
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "goldens"))
from test_generate import Letters
from tiny import VOCAB, write_folder

import rlx
from rlx.models.batch.paged_builder import PAGE
from rlx.models.batch.request import Request
from rlx.models.model_file import ModelFile

ENDLESS: dict[str, Any] = {"seed": 5, "logit_bias": {VOCAB - 1: -1e4}}  # but for max_tokens


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("llama")
    write_folder("llama", made)
    return made


@pytest.fixture
def engine(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[rlx.Engine]:
    monkeypatch.setattr(ModelFile, "tokenizer", lambda self: Letters())
    with rlx.Engine(folder, requests=4, kv="f32", cache_tokens=10 * PAGE, waiting=64) as made:
        yield made


def slowed(engine: rlx.Engine, seconds: float) -> None:
    """Every run takes so long at least."""
    run = engine.runner.run

    def slow(scheduled: Any) -> Any:
        time.sleep(seconds)
        return run(scheduled)

    engine.runner.run = slow  # type: ignore[method-assign]


def until(holds: Any) -> None:
    end = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.001)


def random_requests(rng: random.Random, count: int) -> list[tuple[list[int], dict[str, Any]]]:
    """Prompts that share prefixes, greedy and seeded settings, penalties, stop strings."""
    stems = [[rng.randrange(VOCAB - 1) for _ in range(n)] for n in (3, 64, 70, 100)]
    found = []
    for _ in range(count):
        tail = [rng.randrange(VOCAB - 1) for _ in range(rng.randrange(1, 10))]
        settings: dict[str, Any] = {"max_tokens": rng.randrange(1, 18)}
        settings |= rng.choice(
            [{"temperature": 0}, {"seed": rng.randrange(99), "temperature": 1.0},
             {"temperature": 0, "repetition_penalty": 2.0}, {"temperature": 0, "logprobs": 2},
             {"seed": 3, "top_k": 5, "stop": [chr(256 + rng.randrange(VOCAB))]}]
        )  # fmt: skip
        if rng.random() < 0.3:
            settings["speculate"] = rng.randrange(1, 6)
        found.append((rng.choice(stems) + tail, settings))
    return found


def answer(result: rlx.Generation) -> tuple[Any, ...]:
    return result.tokens, result.text, result.finish_reason, result.logprobs


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_an_answer_in_a_crowd_is_that_of_the_request_alone(engine: rlx.Engine, seed: int) -> None:
    """Random arrivals, priorities, users, deadlines and cancels, of readers of three kinds."""
    rng = random.Random(seed)
    given = random_requests(rng, 60)
    alone = [answer(engine.submit(p, **s).wait()) for p, s in given]
    found: dict[int, tuple[Any, ...]] = {}
    replies: list[rlx.Reply] = []

    async def read(number: int, reply: Any) -> None:
        text, tokens, rows = "", list[int](), list[Any]()
        async for chunk in reply.chunks():
            text, tokens = text + chunk.text, tokens + chunk.tokens
            rows += chunk.logprobs or []
        found[number] = tokens, text, reply.result.finish_reason, rows

    async def load() -> None:
        tasks = []
        for number in rng.sample(range(len(given)), len(given)):
            prompt, settings = given[number]
            terms: dict[str, Any] = {"priority": rng.randrange(-2, 3), "user": rng.choice("abc")}
            fate = rng.random()
            if fate < 0.1:
                terms["deadline"] = 1e-4
            reply = engine.submit(prompt, **settings, **terms)
            replies.append(reply)
            if fate < 0.3:
                reply.close()
            elif fate < 0.5:
                next(reply, None)
                del reply
                replies.pop()
            else:
                tasks.append(asyncio.create_task(read(number, reply)))
            if rng.random() < 0.3:
                await asyncio.sleep(0.002)
        await asyncio.gather(*tasks)

    asyncio.run(load())
    assert len(found) >= 20
    assert found == {number: alone[number] for number in found}
    for reply in replies:
        assert reply.wait().finish_reason in ("stop", "length", "cancelled", "timeout")
    until(lambda: engine.stats().running == engine.stats().waiting == 0)
    assert engine.stats().pages_used == 0 and len(engine._scheduler.free_rows) == 4


@pytest.mark.slow
def test_drafts_change_no_answer_and_save_runs(engine: rlx.Engine) -> None:
    """Prompt lookup in the run of all; greedy, seeded, with penalties and log probabilities."""
    prompt = [7, 8, 9, 10, 11, 12] * 6
    for settings in (
        {"temperature": 0}, {"seed": 4, "temperature": 1.5}, {"temperature": 0, "logprobs": 3},
        {"temperature": 0, "repetition_penalty": 1.3}, {"seed": 1, "stop": [chr(256 + 8)]},
    ):  # fmt: skip
        plain = answer(engine.submit(prompt, max_tokens=40, **settings).wait())
        replies = [engine.submit(prompt, max_tokens=40, speculate=n, **settings) for n in (4, 9)]
        assert [answer(reply.wait()) for reply in replies] == [plain, plain]
    # 99 follows itself: the draft is right as long as the bias has it drawn
    again: dict[str, Any] = {"temperature": 0, "logit_bias": {99: 1e4}, "max_tokens": 60}
    before = engine.stats()
    plain = answer(engine.submit([99] * 9, **again).wait())
    middle = engine.stats()
    assert answer(engine.submit([99] * 9, speculate=5, **again).wait()) == plain
    after = engine.stats()
    # the last n-gram ended one token ago, so a draft has one token
    assert after.runs - middle.runs <= (middle.runs - before.runs) * 0.6
    assert after.drafted >= after.accepted >= middle.accepted + 25


def test_chunks_join_what_is_ready_and_wake_a_loop_once_per_run(engine: rlx.Engine) -> None:
    slowed(engine, 0.005)
    woken = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        call = loop.call_soon_threadsafe
        loop.call_soon_threadsafe = lambda *a: (woken.append(1), call(*a))[1]  # type: ignore
        replies = [engine.submit([i], max_tokens=12, temperature=0) for i in range(4)]

        async def read(reply: Any) -> list[Any]:
            return [chunk async for chunk in reply.chunks()]

        runs = engine.stats().runs
        before = threading.active_count()
        parts = await asyncio.gather(*(read(r) for r in replies))
        assert threading.active_count() == before
        assert len(woken) <= engine.stats().runs - runs + 1
        for chunks, reply in zip(parts, replies, strict=True):
            assert "".join(c.text for c in chunks) == reply.result.text
            assert [t for c in chunks for t in c.tokens] == reply.result.tokens
            assert chunks[0].logprobs is None
        late = engine.submit([1], max_tokens=12, temperature=0)
        await asyncio.to_thread(until, lambda: late.ended)
        (whole,) = [chunk async for chunk in late.chunks()]
        assert whole.tokens == late.result.tokens
        assert (
            await engine.submit([1], max_tokens=3, **ENDLESS).wait_async()
        ).finish_reason == "length"

    asyncio.run(main())


def test_a_task_that_ends_cancels_its_request(engine: rlx.Engine) -> None:
    slowed(engine, 0.01)

    async def main() -> None:
        reply = engine.submit([1], max_tokens=100, **ENDLESS)

        async def read() -> None:
            async for _ in reply.chunks():
                pass

        task = asyncio.create_task(read())
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.to_thread(until, lambda: engine.stats().running == 0)
        assert reply.result.finish_reason == "cancelled"

    asyncio.run(main())


def test_a_cancelled_request_runs_no_more(engine: rlx.Engine) -> None:
    """Its slot is free before the next run, and so is its place in the queue."""
    slowed(engine, 0.02)
    running = [engine.submit([i], max_tokens=100, **ENDLESS) for i in range(4)]
    waiting = engine.submit([9], max_tokens=2)
    until(lambda: engine.stats().running == 4)
    waiting.close()
    assert waiting.wait().finish_reason == "cancelled" and waiting.result.tokens == []
    running[0].close()
    tokens = len(running[0].wait().tokens)
    next_one = engine.submit([7], max_tokens=1, **ENDLESS)
    assert next_one.wait().finish_reason == "length"
    assert len(running[0].result.tokens) == tokens
    for reply in running:
        reply.close()


def test_deadlines_end_running_and_waiting_requests(engine: rlx.Engine) -> None:
    slowed(engine, 0.02)
    running = [engine.submit([i], max_tokens=100, **ENDLESS, deadline=0.2) for i in range(4)]
    waiting = engine.submit([9], max_tokens=100, **ENDLESS, deadline=0.05)
    assert waiting.wait().finish_reason == "timeout" and waiting.result.tokens == []
    for reply in running:
        assert reply.wait().finish_reason == "timeout" and reply.result.tokens
    assert engine.stats().finished["timeout"] == 5


def test_an_urgent_request_goes_before_those_who_wait(engine: rlx.Engine) -> None:
    slowed(engine, 0.002)
    order: list[str] = []
    replies = {f"{i}": engine.submit([i], max_tokens=8) for i in range(12)}
    replies["urgent"] = engine.submit([99], max_tokens=8, priority=9)

    def wait(name: str) -> None:
        replies[name].wait()
        order.append(name)

    threads = [threading.Thread(target=wait, args=(name,)) for name in replies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert order.index("urgent") <= 8


def test_a_short_prompt_does_not_wait_for_a_long_one(engine: rlx.Engine) -> None:
    slowed(engine, 0.002)
    engine._scheduler.timer.room = lambda decodes: 8  # type: ignore[method-assign]
    long = engine.submit([1] * 120, max_tokens=1, **ENDLESS)
    short = engine.submit([2] * 8, max_tokens=1)
    short.wait()
    assert not long.ended
    assert long.wait().finish_reason == "length"


def test_equal_prompts_that_come_together_share_pages(engine: rlx.Engine) -> None:
    slowed(engine, 0.005)
    rng = random.Random(9)
    prompt = [rng.randrange(VOCAB - 1) for _ in range(110)]
    before = engine.stats()
    replies = [engine.submit(prompt, max_tokens=5, seed=i) for i in range(4)]
    reused = sorted(reply.wait().reused_tokens for reply in replies)
    assert reused == [0, PAGE, PAGE, PAGE]
    after = engine.stats()
    assert after.prefix_hits - before.prefix_hits == 3
    assert after.prefix_tokens - before.prefix_tokens == 3 * PAGE
    assert after.tokens_in - before.tokens_in == 440
    fed = sum(len(reply.result.tokens) - 1 for reply in replies)  # the last one is never run
    assert after.tokens_run - before.tokens_run <= 440 - 3 * PAGE + fed + 4


def test_draining_finishes_what_was_accepted(engine: rlx.Engine) -> None:
    slowed(engine, 0.001)
    replies = [engine.submit([i], max_tokens=5) for i in range(20)]
    assert engine.drain(20)
    assert {reply.wait().finish_reason for reply in replies} <= {"stop", "length"}
    with pytest.raises(rlx.EngineClosedError, match="finishes"):
        engine.submit([1])


def test_draining_cancels_what_is_left(engine: rlx.Engine) -> None:
    slowed(engine, 0.02)
    replies = [engine.submit([i], max_tokens=100, **ENDLESS) for i in range(8)]
    assert not engine.drain(0.1)
    assert "cancelled" in {reply.wait().finish_reason for reply in replies}
    assert engine.stats().pages_used == 0


def test_one_that_fails_harms_no_other(engine: rlx.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = [engine.submit([i], max_tokens=10, temperature=0).wait().tokens for i in range(3)]
    receive = Request.receive

    def fails(request: Request, token: int, logits: Any) -> None:
        if len(request.result.tokens) == 2 and request.settings.seed == 13:
            raise ZeroDivisionError("of this one")
        receive(request, token, logits)

    monkeypatch.setattr(Request, "receive", fails)
    bad = engine.submit([5], max_tokens=10, seed=13)
    good = [engine.submit([i], max_tokens=10, temperature=0) for i in range(3)]
    with pytest.raises(ZeroDivisionError):
        bad.wait()
    assert bad.result.finish_reason == "error" and len(bad.result.tokens) == 2
    assert [reply.wait().tokens for reply in good] == expected
    assert engine.stats().finished["error"] == 1 and engine.stats().pages_used == 0

    async def read() -> None:
        async for _ in engine.submit([5], max_tokens=10, seed=13).chunks():
            pass

    with pytest.raises(ZeroDivisionError):
        asyncio.run(read())


def test_a_fault_of_the_scheduler_leaves_nobody_waiting(engine: rlx.Engine) -> None:
    slowed(engine, 0.01)
    replies = [engine.submit([i], max_tokens=100, **ENDLESS) for i in range(6)]
    engine._scheduler.next_tokens = lambda: 1 // 0  # type: ignore
    for reply in replies:
        with pytest.raises(ZeroDivisionError):
            reply.wait()
    with pytest.raises(rlx.EngineClosedError):
        engine.submit([1])


def arrays(engine: rlx.Engine) -> int:
    """Arrays as large as the vocabulary that requests hold."""
    vocab = engine.runner.config.vocab
    gc.collect()
    found = [o for o in gc.get_objects() if type(o).__name__ == "Penalties"]
    held = [a for one in found for a in vars(one).values() if isinstance(a, np.ndarray)]
    return sum(array.size == vocab for array in held)


def test_only_requests_that_run_hold_arrays_of_the_vocabulary(engine: rlx.Engine) -> None:
    """Neither those who wait nor replies that nobody reads."""
    slowed(engine, 0.1)  # nothing ends while arrays are counted, among all that a process has
    others = arrays(engine)  # of engines that are there besides
    penalised = {"repetition_penalty": 1.5, **ENDLESS}
    replies = [engine.submit([i], max_tokens=100, **penalised) for i in range(12)]
    until(lambda: len(replies[0].result.tokens) > 1)
    assert arrays(engine) - others == 4 * 2
    for reply in replies:
        reply.close()
    until(lambda: engine.stats().running == 0)
    assert arrays(engine) == others


def test_a_closed_loop_does_not_stop_the_engine(engine: rlx.Engine) -> None:
    slowed(engine, 0.01)
    reply = engine.submit([1], max_tokens=30, **ENDLESS)

    async def begin() -> None:
        iterator = reply.chunks()
        task = asyncio.ensure_future(anext(aiter(iterator)))
        await asyncio.sleep(0)
        task.cancel()

    asyncio.run(begin())
    assert engine.submit([2], max_tokens=3, **ENDLESS).wait().finish_reason == "length"


def test_samplers_are_compiled_by_the_caller(engine: rlx.Engine) -> None:
    """A draw that needs its own executable makes nobody else wait for the compiler."""
    sampler, threads = engine.runner.sampler, list[str]()
    compiles = sampler._compile

    def compile_here(name: str, spec: Any) -> Any:
        threads.append(threading.current_thread().name)
        return compiles(name, spec)

    sampler._compile = compile_here
    options = {"max_tokens": 8, "seed": 4, "presence_penalty": 0.5}
    expected = engine.submit([1, 2, 1, 2], **options).wait().tokens
    assert threads == []  # all rows are drawn by the one that is there
    assert engine.submit([1, 2, 1, 2], speculate=2, **options).wait().tokens == expected
    assert threads == [threading.current_thread().name]
