"""Generation on a tiny model: tokens, prefix reuse, settings."""

from __future__ import annotations

import asyncio
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "goldens"))
from tiny import PROMPT, STEPS, VOCAB, write_folder

import rlx
from rlx.models.decoder_runner import DecoderRunner
from rlx.models.generation import StopStrings
from rlx.models.language_model import LanguageModel
from rlx.models.model_file import ModelFile
from rlx.models.sampling import GenerationSettings, Penalties

GOLDENS = Path(__file__).resolve().parent.parent / "goldens"


class Letters:
    """A tokenizer for tests: token t is the character chr(256 + t)."""

    end_ids = frozenset({VOCAB - 1})
    bos_id: int | None = None

    def encode(self, text: str) -> list[int]:
        return [ord(c) - 256 for c in text]

    def stream(self) -> Letters:
        return self

    def push(self, token: int) -> str:
        return chr(256 + token)

    def flush(self) -> str:
        return ""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    write_folder("llama", path)
    return path


@pytest.fixture
def model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> LanguageModel:
    monkeypatch.setattr(ModelFile, "tokenizer", lambda self: Letters())
    file = ModelFile.open(folder)
    return LanguageModel(file, DecoderRunner(file, context=40, kv="f32"))


def text(tokens: Any) -> str:
    return "".join(chr(256 + int(t)) for t in tokens)


def golden() -> list[int]:
    return [int(t) for t in np.load(GOLDENS / "logits_llama.npz")["tokens"]]


def test_greedy_is_transformers_greedy(model: LanguageModel) -> None:
    done = model.generate(text(PROMPT), stream=False, temperature=0.0, max_tokens=STEPS)
    assert done.tokens == golden()[len(PROMPT) :]
    assert done.text == text(done.tokens)
    assert done.finish_reason == "length"
    assert done.prompt_tokens == len(PROMPT)
    assert done.reused_tokens == 0
    pieces = list(model.generate(text(PROMPT), temperature=0.0, max_tokens=STEPS))
    assert "".join(pieces) == done.text


def test_a_second_turn_prefills_only_what_is_new(model: LanguageModel) -> None:
    first = model.generate(PROMPT, stream=False, temperature=0.0, max_tokens=4)
    longer = [*PROMPT, *first.tokens[:-1], 7, 8]
    second = model.generate(longer, stream=False, temperature=0.0, max_tokens=5)
    assert second.reused_tokens == len(PROMPT) + 3
    model.runner.tokens = []  # the same without anything to reuse
    fresh = model.generate(longer, stream=False, temperature=0.0, max_tokens=5)
    assert fresh.reused_tokens == 0
    assert fresh.tokens == second.tokens


def test_cancelling_leaves_the_model_usable(model: LanguageModel) -> None:
    expected = model.generate(PROMPT, stream=False, temperature=0.0, max_tokens=8).tokens
    for count in range(1, 6):
        stream = model.generate(PROMPT, temperature=0.0, max_tokens=8)
        for _ in range(count):
            next(stream)
        stream.close()
        assert stream.result.finish_reason == "cancelled"
        assert (
            model.generate(PROMPT, stream=False, temperature=0.0, max_tokens=8).tokens == expected
        )


def test_seeds_repeat_and_differ(model: LanguageModel) -> None:
    def draw(seed: int | None) -> list[int]:
        return model.generate(
            PROMPT, stream=False, temperature=1.5, top_k=0, top_p=1.0, max_tokens=10, seed=seed
        ).tokens

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)
    assert draw(None) != draw(None)


def test_stops(model: LanguageModel) -> None:
    tokens = golden()[len(PROMPT) :]
    by_token = model.generate(
        PROMPT, stream=False, temperature=0.0, max_tokens=STEPS, stop_tokens={tokens[5]}
    )
    first = tokens.index(tokens[5])
    assert by_token.tokens == tokens[:first]
    assert by_token.finish_reason == "stop"
    by_text = model.generate(
        PROMPT, stream=False, temperature=0.0, max_tokens=STEPS, stop=text(tokens[3:5])
    )
    assert by_text.text == text(tokens).partition(text(tokens[3:5]))[0]
    assert by_text.finish_reason == "stop"


def test_bias_and_penalties_act_before_the_draw(model: LanguageModel) -> None:
    forced = model.generate(
        PROMPT, stream=False, temperature=0.0, max_tokens=3, logit_bias={9: 1000.0}
    )
    assert forced.tokens == [9, 9, 9]
    spread = model.generate(
        PROMPT, stream=False, temperature=0.0, max_tokens=12, frequency_penalty=100.0
    )
    assert len(set(spread.tokens)) == 12
    once = model.generate(
        PROMPT, stream=False, temperature=0.0, max_tokens=12, presence_penalty=100.0
    )
    assert once.tokens == spread.tokens
    rows = model.logits(PROMPT)[-1].astype(np.float64)
    seen = np.isin(np.arange(VOCAB), PROMPT)
    rows = np.where(seen, np.where(rows > 0, rows / 1.5, rows * 1.5), rows)
    repeated = model.generate(
        PROMPT, stream=False, temperature=0.0, max_tokens=1, repetition_penalty=1.5
    )
    assert repeated.tokens == [int(rows.argmax())]


def test_logprobs_are_those_of_the_logits(model: LanguageModel) -> None:
    done = model.generate(PROMPT, stream=False, temperature=0.0, max_tokens=1, logprobs=3)
    rows = np.load(GOLDENS / "logits_llama.npz")["logits"][len(PROMPT) - 1].astype(np.float64)
    logs = rows - np.log(np.exp(rows).sum())
    ranked = np.argsort(-logs)[:3]
    assert list(done.logprobs[0]) == ranked.tolist()
    # logits agree with the golden to 1e-4 of the largest, which is below 4
    np.testing.assert_allclose(list(done.logprobs[0].values()), logs[ranked], atol=5e-4)


def test_the_context_is_a_limit_or_shifts(model: LanguageModel) -> None:
    full = model.generate(PROMPT, stream=False, temperature=0.0, max_tokens=100)
    assert full.finish_reason == "length"
    assert len(full.tokens) == 40 - len(PROMPT) + 1
    shifted = model.generate(PROMPT, stream=False, temperature=0.0, max_tokens=60, overflow="shift")
    assert len(shifted.tokens) == 60
    assert shifted.tokens[: len(full.tokens)] == full.tokens
    with pytest.raises(rlx.InputError, match="longer than the context"):
        model.generate([1] * 41)


def test_a_prompt_beyond_the_context_is_shifted_too(model: LanguageModel) -> None:
    """Of a prompt of 50 tokens the younger half of a context of 40 is read."""
    prompt = [(7 * i) % (VOCAB - 1) for i in range(50)]
    options = {"stream": False, "temperature": 0.0, "max_tokens": 5}
    shifted = model.generate(prompt, overflow="shift", **options)
    assert shifted.tokens == model.generate(prompt[-20:], **options).tokens
    assert shifted.prompt_tokens == 50


def test_a_token_can_be_ruled_out(model: LanguageModel) -> None:
    first = golden()[len(PROMPT)]
    without = model.generate(
        PROMPT, stream=False, temperature=0.0, max_tokens=1, logit_bias={first: -np.inf}
    )
    rows = model.logits(PROMPT)[-1]
    assert without.tokens == [int(np.argsort(-rows)[1])]


def test_min_p_keeps_what_is_likely_enough(model: LanguageModel) -> None:
    rows = model.logits(PROMPT)[-1].astype(np.float64)
    kept = np.flatnonzero(np.exp(rows - rows.max()) >= 0.5)
    drawn = {
        model.generate(
            PROMPT, stream=False, temperature=1.0, top_k=0, top_p=1.0, min_p=0.5, max_tokens=1,
            seed=seed,
        ).tokens[0]
        for seed in range(60)
    }  # fmt: skip
    assert drawn <= set(kept.tolist())
    assert len(drawn) > 1 or len(kept) == 1


def test_logits_and_perplexity(model: LanguageModel) -> None:
    tokens = golden()
    wanted = np.load(GOLDENS / "logits_llama.npz")["logits"]
    np.testing.assert_allclose(model.logits(tokens), wanted, atol=1e-4 * np.abs(wanted).max())
    rows = wanted[:-1].astype(np.float64)
    logs = rows - np.log(np.exp(rows).sum(-1, keepdims=True))
    expected = np.exp(-np.mean(logs[np.arange(len(rows)), tokens[1:]]))
    assert model.perplexity(tokens) == pytest.approx(expected, rel=1e-4)


def test_vectors_are_pooled_states(model: LanguageModel, folder: Path) -> None:
    """Logits are the states times the head, so the states of the goldens are known through it."""
    head = ModelFile.open(folder).weights().get("output.weight").array.astype(np.float64)
    wanted = np.load(GOLDENS / "logits_llama.npz")["logits"][: len(PROMPT)]
    states = np.linalg.lstsq(head, wanted.astype(np.float64).T, rcond=None)[0].T
    raw = {p: model.embed(text(PROMPT), pooling=p, normalize=False) for p in ("mean", "last")}
    # 160 equations for 64 numbers: errors of the logits (1e-4 of the largest) are averaged
    np.testing.assert_allclose(raw["mean"], states.mean(0), atol=1e-3)
    np.testing.assert_allclose(raw["last"], states[-1], atol=1e-3)
    many = model.embed([text(PROMPT[:5]), "", text(PROMPT)])
    assert many.shape == (3, head.shape[1]) and many.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(many, axis=1), [1, 0, 1], atol=1e-6)
    unit = raw["mean"] / np.linalg.norm(raw["mean"])
    np.testing.assert_allclose(many[2], unit, atol=1e-6)
    # answers after it are what they were
    done = model.generate(PROMPT, stream=False, temperature=0.0, max_tokens=STEPS)
    assert done.tokens == golden()[len(PROMPT) :]
    with pytest.raises(rlx.OptionError, match="unknown pooling; got first; expected mean or last"):
        model.embed("", pooling="first")
    with pytest.raises(rlx.InputError, match="longer than the context"):
        model.embed(text([1] * 41))


def test_threads_and_asyncio(model: LanguageModel) -> None:
    expected = model.generate(PROMPT, stream=False, temperature=0.0, max_tokens=6)
    found: list[list[int]] = []

    def work() -> None:
        done = model.generate(PROMPT, stream=False, temperature=0.0, max_tokens=6)
        found.append(done.tokens)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert found == [expected.tokens] * 4

    async def collect() -> str:
        return "".join([p async for p in model.agenerate(PROMPT, temperature=0.0, max_tokens=6)])

    assert asyncio.run(collect()) == expected.text


def test_closing_is_final(model: LanguageModel) -> None:
    model.close()
    model.close()
    with pytest.raises(rlx.InputError, match="closed"):
        model.generate(PROMPT)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"temperature": -1}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"overflow": "wrap"}, "overflow"),
        ({"temprature": 1}, r"unknown setting; got temprature.*\n.*did you mean temperature\?"),
        ({"logit_bias": {VOCAB: 1.0}}, "no such token"),
        ({"logit_bias": {"the": 1.0}}, "token ids to numbers"),
        ({"logit_bias": {3: float("nan")}}, "token ids to numbers"),
        ({"max_tokens": 2.5}, "not a whole number"),
        ({"stop": ["end", 3]}, "stop.*expected texts"),
        ({"stop_tokens": ["</s>"]}, "stop_tokens.*expected token ids"),
        ({"seed": "lucky"}, "seed.*whole number"),
    ],
)
def test_bad_settings(model: LanguageModel, settings: dict[str, Any], text: str) -> None:
    with pytest.raises(rlx.OptionError, match=text):
        list(model.generate(PROMPT, **settings))


def test_bad_prompts(model: LanguageModel) -> None:
    with pytest.raises(rlx.InputError, match="no tokens"):
        model.generate([])
    with pytest.raises(rlx.InputError, match="no such token"):
        model.generate([VOCAB])
    with pytest.raises(rlx.InputError, match=r"not token ids; got \['a', 'b'\].*\n.*tokenize"):
        model.logits(["a", "b"])  # type: ignore[list-item]
    with pytest.raises(rlx.InputError, match=r"not token ids; got \[1, 'b'\]"):
        model.generate([1, "b"])
    for wrong in (7, None, b"abc", {"a": 1}):
        with pytest.raises(rlx.InputError, match=r"not a prompt; got (int|None|bytes|dict)"):
            model.generate(wrong)  # type: ignore[arg-type]


def test_an_unknown_device_is_refused_when_loading(tmp_path: Path) -> None:
    with pytest.raises(rlx.OptionError, match="unknown device; got 'tpu'"):
        rlx.load(tmp_path, device="tpu")


def test_stop_strings_across_tokens() -> None:
    watch = StopStrings(["</s>", "stop"])
    shown = "".join(watch.push(p) for p in ["a<", "/", "b", "st", "o", "x<", "/s", ">after"])
    assert shown == "a</bstox"
    assert watch.found == "</s>"
    held = StopStrings(["abc"])
    assert held.push("xab") + held.flush() == "xab"


def test_penalties_count_prompt_and_answer() -> None:
    settings = GenerationSettings(
        repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25, logit_bias={3: 1.0}
    )
    p = Penalties(settings, 5, [1])
    p.count(2)
    p.count(2)
    assert p.factor.tolist() == [1, 2, 2, 1, 1]
    assert p.bias.tolist() == [0, 0, -1.0, 1, 0]


def test_an_unknown_architecture_names_the_nearest(folder: Path, tmp_path: Path) -> None:
    write_folder("llama", tmp_path)
    config = (tmp_path / "config.json").read_text().replace('"llama"', '"lama"')
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(rlx.UnsupportedError, match="nearest is llama"):
        ModelFile.open(tmp_path)


def test_a_prompt_in_chunks_draws_once(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = model.generate(PROMPT, stream=False, temperature=0.0, max_tokens=4)
    monkeypatch.setattr(model.runner, "chunk", 3)
    model.runner.tokens = []
    chunks = model.generate(PROMPT, stream=False, temperature=0.0, max_tokens=4)
    assert chunks.tokens == whole.tokens


def test_devices_may_run_more_of_a_long_prompt_at_once(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = model.runner
    whole = model.generate(PROMPT, stream=False, temperature=0.0, max_tokens=4)
    monkeypatch.setattr(runner, "chunk", 2)
    monkeypatch.setattr(runner, "_long_chunk", 4)
    runner.tokens = []
    chunks = model.generate(PROMPT, stream=False, temperature=0.0, max_tokens=4)
    assert list(runner._long) and chunks.tokens == whole.tokens
    runner._long.clear()


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.0, "max_tokens": 12},
        {"temperature": 1.0, "seed": 5, "max_tokens": 12},
        {"temperature": 1.0, "seed": 5, "max_tokens": 80, "overflow": "shift"},
        {"temperature": 1.0, "seed": 6, "max_tokens": 80},
    ],
)
def test_tokens_drawn_at_once_are_those_drawn_one_by_one(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    answers, calls = [], []
    plain = model.runner.decode_n
    monkeypatch.setattr(model.runner, "decode_n", lambda *a: (calls[-1].append(a[3]), plain(*a))[1])
    for moment in (0.0, 1e9):
        monkeypatch.setattr("rlx.models.generation.SECONDS_PER_CALL", moment)
        model.runner.tokens = []
        calls.append([])
        answers.append(model.generate(PROMPT, stream=False, **settings))
    one, many = answers
    assert set(calls[0]) == {1}
    assert max(calls[1]) > 1
    assert one.tokens == many.tokens
    assert (one.text, one.finish_reason) == (many.text, many.finish_reason)


def test_an_end_token_ends_what_is_drawn_at_once(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlx.models.generation.SECONDS_PER_CALL", 1e9)
    found = model.generate(PROMPT, stream=False, temperature=0.0, max_tokens=12).tokens
    stop = next(t for i, t in enumerate(found) if i >= 4 and t not in found[:i])
    end = found.index(stop)
    answer = model.generate(
        PROMPT, stream=False, temperature=0.0, max_tokens=12, stop_tokens={stop}
    )
    assert answer.tokens == found[:end]
    assert answer.finish_reason == "stop"
    assert model.runner.tokens == [*PROMPT, *found[:end]]  # nothing ran beyond it
