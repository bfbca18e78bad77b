"""A token's logits, keys and values have the same bits however many tokens run with it.

Prompts in one piece, in chunks and token by token, with neighbours in a batch, after a prefix that
was there already, verified after speculation; texts alone and in a batch.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "goldens"))
import tiny_encoders
from encoder_files import write_model
from test_generate import Letters
from tiny import CONFIGS, VOCAB, write_folder

import rlx
from rlx.formats.fetch import cached
from rlx.models.decoder_runner import DecoderRunner
from rlx.models.language_model import LanguageModel
from rlx.models.model_file import ModelFile

SMOLLM2 = cached("smollm2-135m")
BATCHED = ("llama", "gpt2", "gemma2", "qwen3", "mixtral", "gpt_oss", "deepseek_v2")


def prompt(length: int) -> list[int]:
    return [int(t) for t in np.random.default_rng(length).integers(0, VOCAB - 1, length)]


@pytest.fixture
def letters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelFile, "tokenizer", lambda self: Letters())


def same(found: Any, wanted: Any) -> None:
    """Equal bits; floats as integers, so that NaN and the sign of 0 count."""
    found, wanted = (np.ascontiguousarray(x) for x in (found, wanted))
    assert found.dtype == wanted.dtype and found.shape == wanted.shape
    np.testing.assert_array_equal(found.view(np.uint8), wanted.view(np.uint8))


def run_in_chunks(folder: Path, tokens: list[int], chunk: int, kv: str) -> tuple[Any, Any]:
    """Logits of all tokens, and what they leave behind."""
    file = ModelFile.open(folder)
    runner = DecoderRunner(file, context=min(100, file.config.context), kv=kv, chunk=chunk)
    logits = np.array(runner.rows(tokens[: runner.context]))
    states = {name: np.array(state.copy_out()) for name, state in runner._states.items()}
    runner.close()
    return logits, states


@pytest.mark.parametrize("name", CONFIGS)
def test_chunks_of_a_prompt(name: str, tmp_path: Path) -> None:
    write_folder(name, tmp_path)
    check_chunks(tmp_path, (1, 7, 64) if name in ("llama", "qwen3_next") else (1, 7), "f32")


@pytest.mark.parametrize("kv", ["f16", "bf16"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "deepseek_v2"])
def test_chunks_with_a_small_kv_cache(name: str, kv: str, tmp_path: Path) -> None:
    write_folder(name, tmp_path)
    check_chunks(tmp_path, (1, 7, 64), kv)


def check_chunks(folder: Path, chunks: tuple[int, ...], kv: str) -> None:
    tokens = prompt(90)
    logits, states = run_in_chunks(folder, tokens, 512, kv)
    for chunk in chunks:
        found, left = run_in_chunks(folder, tokens, chunk, kv)
        same(found, logits)
        assert left.keys() == states.keys()
        for name, state in states.items():
            same(left[name], state)


@pytest.mark.parametrize("name", BATCHED)
def test_neighbours_in_a_batch(name: str, tmp_path: Path, letters: None) -> None:
    """The engine gives what the model alone gives: tokens, and log probabilities bit for bit."""
    write_folder(name, tmp_path)
    settings = [
        {"temperature": 0.0, "logprobs": 3, "max_tokens": 9},
        {"temperature": 0.9, "seed": 5, "logprobs": 3, "max_tokens": 9},
        {"temperature": 1.2, "seed": 5, "top_k": 0, "top_p": 1.0, "logprobs": 3, "max_tokens": 9},
    ]
    prompts = [prompt(n) for n in (1, 70, 17, 64, 5, 100, 2)]
    asked = [(p, settings[i % 3]) for i, p in enumerate(prompts)]
    file = ModelFile.open(tmp_path)
    with LanguageModel(file, DecoderRunner(file, kv="f32")) as model:
        alone = [model.generate(p, stream=False, **s) for p, s in asked]
    with rlx.Engine(tmp_path, requests=3, kv="f32") as engine:
        for order in (asked, asked[::-1]):  # other neighbours, and prefixes that are known
            replies = [engine.submit(p, **s) for p, s in order]
            found = [reply.wait() for reply in replies]
            wanted = alone if order is asked else alone[::-1]
            assert [g.tokens for g in found] == [g.tokens for g in wanted]
            assert [g.logprobs for g in found] == [g.logprobs for g in wanted]


def test_speculation(tmp_path: Path, letters: None) -> None:
    write_folder("llama", tmp_path)
    file = ModelFile.open(tmp_path)
    with LanguageModel(file, DecoderRunner(file, context=120, kv="f16")) as model:
        for seed in range(4):
            given = [5, 9, 7, 3] * (seed + 2)
            options = {"seed": seed, "temperature": 0.3 * seed, "max_tokens": 40, "stream": False}
            plain = model.generate(given, **options)
            for count in (1, 4, 7):
                assert model.generate(given, speculate=count, **options).tokens == plain.tokens


def test_prefixes_and_repetition(tmp_path: Path, letters: None) -> None:
    """The same request again, from the beginning and after a part that is in the KV cache."""
    write_folder("qwen3", tmp_path)
    file = ModelFile.open(tmp_path)
    given, options = prompt(60), {"seed": 3, "logprobs": 2, "max_tokens": 20, "stream": False}
    with LanguageModel(file, DecoderRunner(file, kv="f16", chunk=32)) as model:
        first = model.generate(given, **options)
        for shared in (0, 59, 31, 7, 40, 64):
            other = (first.tokens and given + first.tokens)[:shared] + prompt(5)
            model.generate(other, max_tokens=1, stream=False)
            again = model.generate(given, **options)
            assert again.reused_tokens == min(shared, 59)
            assert again.tokens == first.tokens and again.logprobs == first.logprobs


@pytest.mark.parametrize("name", tiny_encoders.CONFIGS)
def test_texts_in_a_batch(name: str, tmp_path: Path) -> None:
    """Texts of other lengths beside it, other places in the batch, and none at all."""
    rng, words = np.random.default_rng(4), ["the", "cat", "sat", "on", "a", "mat"]
    texts = [" ".join(rng.choice(words, n)) for n in (1, 2, 3, 5, 8, 12, *range(1, 14)) * 2]
    with rlx.load(write_model(tmp_path, name)) as model:
        assert isinstance(model, rlx.EncoderModel)
        alone = np.array([model.embed(t) for t in texts])
        for batch in (32, 7, 2):
            same(model.embed(texts, batch=batch), alone)
        same(model.embed(texts[::-1])[::-1], alone)
        unit = np.array([model.embed(t, normalize=True) for t in texts])
        same(model.embed(texts, normalize=True), unit)


# -- a real model with packed weights -----------------------------------------------------------

TEXT = "The lighthouse keeper wrote down every ship that passed, its flag and its hour. " * 12


@pytest.mark.parametrize("kv", [pytest.param("f16", marks=pytest.mark.nightly), "q8_0"])
def test_smollm2_in_chunks(kv: str) -> None:
    """200 tokens, in chunks and token by token, on one and two threads."""
    wanted = None
    for chunk, threads in ((512, 2), (64, 2), (7, 2), (1, 2), (512, 1)):
        file = ModelFile.open(Path(str(SMOLLM2)))
        tokens = file.tokenizer().encode(TEXT)[:200]
        runner = DecoderRunner(file, context=256, kv=kv, chunk=chunk, threads=threads)
        found = np.array(runner.rows(tokens))
        runner.close()
        wanted = found if wanted is None else wanted
        same(found, wanted)


@pytest.mark.parametrize("times", [5, pytest.param(20, marks=pytest.mark.nightly)])
def test_smollm2_answers_the_same(times: int) -> None:
    """Repeated, in a batch, after speculation: one answer for one question and seed."""
    chats = [[{"role": "user", "content": f"Name {n} rivers, and why they matter."}]
             for n in (1, 3)]  # fmt: skip
    options: dict[str, Any] = {"seed": 7, "temperature": 0.9, "max_tokens": 24}
    with rlx.load(str(SMOLLM2), context=512) as model:
        assert isinstance(model, LanguageModel)
        wanted = [model.chat(chat, stream=False, **options) for chat in chats]
        for _ in range(times):
            found = [model.chat(chat, stream=False, **options) for chat in chats]
            assert [g.tokens for g in found] == [g.tokens for g in wanted]
        for chat, plain in zip(chats, wanted, strict=True):
            assert model.chat(chat, stream=False, speculate=4, **options).tokens == plain.tokens
    with rlx.Engine(str(SMOLLM2), context=512, requests=4) as engine:
        replies = [engine.chat(chat, **options) for chat in chats * 3]
        assert [r.wait().tokens for r in replies] == [g.tokens for g in wanted] * 3
