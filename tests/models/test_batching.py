"""Continuous batching: the same tokens as one by one, pages shared, nothing leaked."""

from __future__ import annotations

import asyncio
import random
import sys
import threading
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
from rlx.models.decoder_runner import DecoderRunner
from rlx.models.language_model import LanguageModel
from rlx.models.model_file import ModelFile

ARCHITECTURES = ("llama", "gpt2", "gemma2", "qwen3", "mixtral", "gpt_oss", "deepseek_v2")
RNG = np.random.default_rng(5)
LENGTHS = (1, 3, 70, 17, 64, 5, 100, 2)
PROMPTS = [[int(t) for t in RNG.integers(0, VOCAB - 1, n)] for n in LENGTHS]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for name in ARCHITECTURES:
        found[name] = tmp_path_factory.mktemp(name)
        write_folder(name, found[name])
    return found


@pytest.fixture(autouse=True)
def letters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelFile, "tokenizer", lambda self: Letters())


@pytest.fixture
def engine(folders: dict[str, Path]) -> Iterator[rlx.Engine]:
    with rlx.Engine(folders["llama"], requests=4, kv="f32", cache_tokens=1024) as made:
        yield made


def alone(folder: Path, prompt: list[int], **settings: Any) -> rlx.Generation:
    file = ModelFile.open(folder)
    with LanguageModel(file, DecoderRunner(file, kv="f32")) as model:
        found: rlx.Generation = model.generate(prompt, stream=False, **settings)
        return found


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_answers_are_those_of_one_by_one(folders: dict[str, Path], name: str, device: str) -> None:
    """Learned positions, windows, capped scores, norms of heads and latents among them."""
    prompts = PROMPTS if device == "cpu" else PROMPTS[:3]
    expected = [alone(folders[name], p, max_tokens=12, temperature=0) for p in prompts]
    with rlx.Engine(folders[name], requests=3, kv="f32", device=device) as engine:
        found = engine.generate(prompts, max_tokens=12, temperature=0)
    assert [g.tokens for g in found] == [g.tokens for g in expected]
    assert [g.text for g in found] == [g.text for g in expected]
    assert [g.finish_reason for g in found] == [g.finish_reason for g in expected]


def test_settings_belong_to_the_request(engine: rlx.Engine, folders: dict[str, Path]) -> None:
    settings = [
        {"seed": 1, "temperature": 1.0}, {"seed": 2, "temperature": 0.7, "top_k": 3},
        {"temperature": 0, "repetition_penalty": 3.0}, {"temperature": 0, "logprobs": 2},
    ]  # fmt: skip
    replies = [engine.submit(PROMPTS[2], max_tokens=10, **s) for s in settings]
    for reply, chosen in zip(replies, settings, strict=True):
        expected = alone(folders["llama"], PROMPTS[2], max_tokens=10, **chosen)
        assert reply.wait().tokens == expected.tokens
        assert [sorted(row) for row in reply.result.logprobs] == [
            sorted(row) for row in expected.logprobs
        ]


def test_equal_prefixes_are_prefilled_once(engine: rlx.Engine, folders: dict[str, Path]) -> None:
    first = PROMPTS[6]  # a full page and more
    second = [*PROMPTS[6][:80], 9, 8, 7]
    assert engine.submit(first, max_tokens=4, temperature=0).wait().reused_tokens == 0
    again = engine.submit(second, max_tokens=8, temperature=0).wait()
    assert again.reused_tokens == PAGE
    assert again.tokens == alone(folders["llama"], second, max_tokens=8, temperature=0).tokens
    assert engine.pages.held == 0


def test_text_streams_and_a_reply_can_be_awaited(engine: rlx.Engine) -> None:
    reply = engine.submit(PROMPTS[1], max_tokens=6, temperature=0)
    pieces = list(reply)
    assert 1 <= len(pieces) <= len(reply.result.tokens)  # those that are ready come as one
    assert "".join(pieces) == reply.result.text
    assert list(reply) == []

    async def read() -> str:
        return "".join([p async for p in engine.submit(PROMPTS[1], max_tokens=6, temperature=0)])

    assert asyncio.run(read()) == reply.result.text


def test_stop_strings_end_an_answer(engine: rlx.Engine) -> None:
    text = engine.submit(PROMPTS[1], max_tokens=8, temperature=0).wait().text
    stopped = engine.submit(PROMPTS[1], max_tokens=8, temperature=0, stop=[text[3:5]]).wait()
    assert (stopped.text, stopped.finish_reason) == (text[: text.index(text[3:5])], "stop")
    nothing = engine.submit(PROMPTS[1], max_tokens=0).wait()
    assert (nothing.text, nothing.finish_reason) == ("", "length")


def test_a_thousand_cancelled_requests_leave_no_page(engine: rlx.Engine) -> None:
    rng = random.Random(3)
    for _ in range(250):
        replies = [
            engine.submit(rng.choice(PROMPTS), max_tokens=28, seed=rng.randrange(99))
            for _ in range(4)
        ]
        for reply in replies:
            for _ in range(rng.randrange(3)):
                next(reply, None)
            reply.close()
        for reply in replies:
            assert reply.wait().finish_reason in ("cancelled", "stop", "length")
    engine.submit(PROMPTS[0], max_tokens=1).wait()  # the step that lets go of the last ones
    assert engine.pages.held == 0
    assert sorted(engine._scheduler.free_rows) == [0, 1, 2, 3]


def test_a_full_context_ends_an_answer(engine: rlx.Engine, folders: dict[str, Path]) -> None:
    prompt = PROMPTS[6]
    found = engine.submit(prompt, temperature=0).wait()
    expected = alone(folders["llama"], prompt, temperature=0)
    assert (found.tokens, found.finish_reason) == (expected.tokens, expected.finish_reason)


def test_more_requests_than_pages_take_turns(folders: dict[str, Path]) -> None:
    with rlx.Engine(folders["llama"], requests=8, kv="f32", cache_tokens=3 * PAGE) as engine:
        found = engine.generate(PROMPTS[:6] * 2, max_tokens=20, temperature=0)
    assert [g.tokens for g in found[:6]] == [g.tokens for g in found[6:]]


@pytest.mark.parametrize(
    ("tokens", "settings", "message"),
    [
        ([], {}, "no tokens to run"),
        ([VOCAB], {}, "no such token"),
        ([1] * 129, {}, "longer than the context"),
        ([1], {"overflow": "shift"}, "cannot shift"),
        ([1] * 40, {"max_tokens": 30}, "would not suffice for this request alone"),
        ([1], {"colour": 3}, "unknown setting"),
    ],
)
def test_what_cannot_run_is_refused(
    folders: dict[str, Path], tokens: list[int], settings: dict[str, Any], message: str
) -> None:
    with (
        rlx.Engine(folders["llama"], requests=2, cache_tokens=PAGE) as engine,
        pytest.raises(rlx.RlxError, match=message),
    ):
        engine.submit(tokens, **settings)


def test_a_kv_cache_beyond_memory_is_refused(folders: dict[str, Path]) -> None:
    with pytest.raises(rlx.InputError, match="memory would not suffice"):
        rlx.Engine(folders["llama"], cache_tokens=1 << 50)
    with pytest.raises(rlx.OptionError, match="requests"):
        rlx.Engine(folders["llama"], requests=0)


def test_a_full_queue_and_a_closed_engine_refuse(folders: dict[str, Path]) -> None:
    engine = rlx.Engine(folders["llama"], requests=1, waiting=1)
    replies = []
    with pytest.raises(rlx.QueueFullError, match="too many requests wait") as full:
        for _ in range(200):
            replies.append(engine.submit(PROMPTS[6], max_tokens=28))
    assert 1 <= full.value.retry_after <= 600
    engine.close()
    engine.close()
    assert {r.wait().finish_reason for r in replies} <= {"cancelled", "stop", "length"}
    with pytest.raises(rlx.EngineClosedError, match="closed"):
        engine.submit([1])


def test_threads_submit_at_once(engine: rlx.Engine) -> None:
    expected = [g.text for g in engine.generate(PROMPTS[:4], max_tokens=9, temperature=0)]
    found: dict[int, list[str]] = {}

    def ask(number: int) -> None:
        found[number] = [
            engine.submit(p, max_tokens=9, temperature=0).wait().text for p in PROMPTS[:4]
        ]

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == dict.fromkeys(range(6), expected)


def test_a_fault_reaches_those_who_wait(
    engine: rlx.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(engine.runner, "run", lambda shares: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            engine.submit([1], max_tokens=2).wait()
    assert engine.pages.held == 0
    assert engine.submit([1], max_tokens=2, temperature=0).wait().finish_reason == "length"
