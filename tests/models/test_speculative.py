"""Speculative decoding: the same tokens in fewer runs, whatever drafts them and however badly."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "goldens"))
from test_generate import Letters
from tiny import VOCAB, write_folder

import rlx
from rlx.models.decoder_runner import DecoderRunner
from rlx.models.language_model import LanguageModel
from rlx.models.model_file import ModelFile
from rlx.models.speculative import PromptLookup

PROMPT = [5, 9, 7, 3, 5, 9, 7, 3, 5, 9]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    write_folder("llama", path)
    return path


@pytest.fixture
def model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LanguageModel]:
    monkeypatch.setattr(ModelFile, "tokenizer", lambda self: Letters())
    with made(folder) as found:
        yield found


def made(folder: Path, draft: LanguageModel | None = None) -> LanguageModel:
    file = ModelFile.open(folder)
    return LanguageModel(file, DecoderRunner(file, context=120, kv="f32"), draft)


def runs_of(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each run of the model has from now on."""
    counts: list[int] = []
    feed, check = model.runner.step, model.runner.verify_draft

    def counted_feed(tokens: Any, *rest: Any) -> Any:
        counts.append(len(tokens))
        return feed(tokens, *rest)

    def counted_check(tokens: Any, *rest: Any) -> Any:
        counts.append(len(tokens))
        return check(tokens, *rest)

    monkeypatch.setattr(model.runner, "step", counted_feed)
    monkeypatch.setattr(model.runner, "verify_draft", counted_check)
    return counts


def tokens(model: LanguageModel, **settings: Any) -> list[int]:
    found: list[int] = model.generate(PROMPT, stream=False, max_tokens=60, **settings).tokens
    return found


@pytest.mark.parametrize("settings", [{"temperature": 0}, {"temperature": 1.2, "seed": 7}])
@pytest.mark.parametrize("count", [1, 3, 8])
def test_drafts_do_not_change_the_tokens(
    model: LanguageModel, settings: dict[str, Any], count: int
) -> None:
    assert tokens(model, speculate=count, **settings) == tokens(model, **settings)


def test_repetitive_text_takes_fewer_runs(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bias makes the model say one token over and over, which is easy to draft."""
    monkeypatch.setattr(model.runner, "verify_draft", lambda ids, *_: [*ids[1:], ids[-1]])
    counts = runs_of(model, monkeypatch)
    assert len(tokens(model, speculate=4, temperature=0)) == 60
    assert len(counts) < 30


def test_a_draft_model_that_is_the_model_is_always_right(
    folder: Path, model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    for settings in ({"temperature": 0}, {"temperature": 0.9, "seed": 3}):
        expected = tokens(model, **settings)
        with made(folder, draft=made(folder)) as pair:
            counts = runs_of(pair, monkeypatch)
            assert tokens(pair, **settings) == expected
            assert counts[1:] == [5] * 12  # 59 tokens after the first, five a run


def test_distributions_are_equal(model: LanguageModel) -> None:
    """The third token over many seeds, drawn with and without drafts of another sequence.

    Two samples of 300 over four tokens: by chance, a statistic above 16.3 has probability 0.001
    (χ² with three degrees of freedom). Draws are independent: the seeds are not the same."""
    settings = {"temperature": 1.0, "top_k": 4, "max_tokens": 3}

    def third(seed: int, **more: Any) -> int:
        found = model.generate(PROMPT, stream=False, seed=seed, **settings, **more).tokens
        return int(found[2]) if len(found) > 2 else VOCAB

    plain = Counter(third(s) for s in range(300))
    drafted = Counter(third(s, speculate=2) for s in range(1000, 1300))
    common = [t for t in plain | drafted if plain[t] + drafted[t] >= 20]
    statistic = sum((plain[t] - drafted[t]) ** 2 / (plain[t] + drafted[t]) for t in common)
    limits = {1: 10.8, 2: 13.8, 3: 16.3, 4: 18.5, 5: 20.5, 6: 22.5, 7: 24.3, 8: 26.1}
    assert len(common) > 1 and statistic < limits[min(len(common) - 1, 8)] + 4 * max(
        0, len(common) - 9
    )


def test_lookup_finds_the_longest_match(model: LanguageModel) -> None:
    lookup = PromptLookup(model.runner, 3)
    assert lookup.find([1, 2, 3], None, None) == []
    seen = [1, 2, 8, 9, 7, 1, 2, 6, 2, 8, 4, 1, 2]
    assert lookup.find(seen, None, None) == [6, 2, 8]  # the last place after 1, 2
    assert lookup.find([*seen, 8, 9], None, None) == [7, 1, 2]


def test_stops_and_limits_hold_among_drafts(model: LanguageModel) -> None:
    plain = model.generate(PROMPT, stream=False, max_tokens=60, temperature=0)
    for count in (5, 6, 7):
        short = model.generate(PROMPT, stream=False, max_tokens=count, temperature=0, speculate=4)
        assert short.tokens == plain.tokens[:count] and short.finish_reason == "length"
    full = model.generate(PROMPT, stream=False, max_tokens=500, temperature=0, speculate=4)
    same = model.generate(PROMPT, stream=False, max_tokens=500, temperature=0)
    assert (full.tokens, full.finish_reason) == (same.tokens, same.finish_reason)


def test_models_that_cannot_draft(folder: Path, tmp_path: Path, model: LanguageModel) -> None:
    with pytest.raises(rlx.OptionError, match="speculate"):
        model.generate(PROMPT, speculate=17)
    with made(folder) as other:
        other.model.config = type("C", (), {"vocab": VOCAB + 1})()
        with pytest.raises(rlx.OptionError, match="same vocabulary"):
            made(folder, draft=other)
