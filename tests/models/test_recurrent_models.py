"""Models with a recurrent state: how much of it a runner may reuse."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "goldens"))
from test_generate import GOLDENS, Letters
from tiny import CONFIGS, PROMPT, STEPS, weights, write_folder, write_safetensors

import rlx
from rlx.errors import FormatError, UnsupportedError
from rlx.models.decoder_runner import DecoderRunner
from rlx.models.language_model import LanguageModel
from rlx.models.model_file import ModelFile

NAMES = ("qwen3_next", "qwen3_5", "mamba2")


@pytest.fixture(autouse=True)
def letters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelFile, "tokenizer", lambda self: Letters())


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {name: tmp_path_factory.mktemp(name) for name in NAMES}
    for name, folder in found.items():
        write_folder(name, folder)
    return found


def load(folder: Path, chunk: int = 512) -> LanguageModel:
    file = ModelFile.open(folder)
    return LanguageModel(file, DecoderRunner(file, context=64, kv="f32", chunk=chunk))


def greedy(model: LanguageModel, prompt: list[int], count: int = STEPS) -> Any:
    return model.generate(prompt, stream=False, temperature=0.0, max_tokens=count)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("chunk", [512, 5, 1])
def test_prompts_in_chunks_give_what_transformers_gives(
    name: str, chunk: int, folders: dict[str, Path]
) -> None:
    wanted = np.load(GOLDENS / f"logits_{name}.npz")["tokens"][len(PROMPT) :]
    with load(folders[name], chunk) as model:
        assert greedy(model, PROMPT).tokens == list(wanted)
        assert greedy(model, PROMPT).tokens == list(wanted)  # from the beginning, with no trace


@pytest.mark.parametrize("name", NAMES)
def test_only_a_longer_prompt_goes_on_from_the_state(name: str, folders: dict[str, Path]) -> None:
    with load(folders[name]) as model:
        first = greedy(model, PROMPT, 4)
        held = [*PROMPT, *first.tokens[:-1]]  # the last token has not been run
        longer = greedy(model, [*held, first.tokens[-1], 7], 4)
        assert longer.reused_tokens == len(held)
        other = [*PROMPT, 9, 9, 9]  # with a common beginning, to which no state can be taken back
        again = greedy(model, other, 4)
        assert again.reused_tokens == 0
        assert greedy(model, PROMPT, 4).tokens == first.tokens
    with load(folders[name]) as fresh:
        assert greedy(fresh, [*held, first.tokens[-1], 7], 4).tokens == longer.tokens
        assert greedy(fresh, other, 4).tokens == again.tokens


def test_the_text_of_a_model_that_sees(tmp_path: Path) -> None:
    """Numbers in text_config, weights in model.language_model."""
    config = json.dumps({"model_type": "qwen3_5", "text_config": CONFIGS["qwen3_5"]})
    (tmp_path / "config.json").write_text(config, encoding="utf-8")
    stored = weights("qwen3_5")
    inner = {n.replace("model.", "model.language_model."): x for n, x in stored.items()}
    write_safetensors(tmp_path / "model.safetensors", inner)
    wanted = np.load(GOLDENS / "logits_qwen3_5.npz")["tokens"][len(PROMPT) :]
    with load(tmp_path) as model:
        assert greedy(model, PROMPT).tokens == list(wanted)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_answers_of_an_engine_are_those_of_one_by_one(name: str, folders: dict[str, Path]) -> None:
    """Prompts of several lengths, in chunks, on rows that others have used; greedy and seeded."""
    rng = np.random.default_rng(1)
    prompts = [[int(t) for t in rng.integers(0, 60, n)] for n in (1, 9, 30, 3, 17, 2, 12)]
    prompts += [[*prompts[2], 5], prompts[2]]
    with load(folders[name]) as model:
        alone = [greedy(model, p, 8).tokens for p in prompts]
        drawn = [model.generate(p, stream=False, seed=3, max_tokens=8).tokens for p in prompts]
    with rlx.Engine(folders[name], requests=3, context=64, kv="f32") as engine:
        engine._scheduler.timer.room = lambda decodes: 7  # type: ignore[method-assign]
        replies = [engine.submit(p, temperature=0, max_tokens=8) for p in prompts]
        replies += [engine.submit(p, seed=3, max_tokens=8) for p in prompts]
        cancelled = engine.submit(prompts[2], max_tokens=30)
        cancelled.close()
        assert [r.wait().tokens for r in replies] == alone + drawn
        assert engine.stats().prefix_hits == 0
        with pytest.raises(UnsupportedError, match="speculative decoding"):
            engine.submit([1], speculate=3)


@pytest.mark.slow
def test_prompts_are_scored_beside_others(folders: dict[str, Path]) -> None:
    """One token a run, as there is room for the logits of one token of each request."""
    with load(folders["mamba2"]) as model:
        logits = np.asarray(model.logits(PROMPT), np.float64)
    logs = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
    with rlx.Engine(folders["mamba2"], requests=2, context=64, kv="f32") as engine:
        other = engine.submit(PROMPT[::-1], max_tokens=20)
        found = engine.submit(PROMPT, prompt_logprobs=2, max_tokens=0).wait().prompt_logprobs
        other.wait()
    assert [len(row) >= 2 for row in found] == [True] * (len(PROMPT) - 1)
    # a token at a time, the recurrence adds in another order than in a chunk
    apart = [abs(row[t] - logs[i, t]) for i, row in enumerate(found) for t in row]
    assert max(apart) < 1e-5 and all(t in row for t, row in zip(PROMPT[1:], found, strict=True))


def test_speculation_is_refused(folders: dict[str, Path]) -> None:
    with (
        load(folders["mamba2"]) as model,
        pytest.raises(UnsupportedError, match="speculative decoding"),
    ):
        model.generate(PROMPT, stream=False, speculate=3)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("qwen3_next", {"linear_num_value_heads": 3}),
        ("qwen3_next", {"linear_num_key_heads": 0}),
        ("mamba2", {"n_groups": 3}),
        ("mamba2", {"state_size": -1}),
        ("mamba2", {"num_heads": 0}),
    ],
)
def test_sizes_that_do_not_fit_are_named(name: str, change: dict[str, Any], tmp_path: Path) -> None:
    write_folder(name, tmp_path)
    config = json.dumps({**CONFIGS[name], **change})
    (tmp_path / "config.json").write_text(config, encoding="utf-8")
    with pytest.raises((FormatError, UnsupportedError)):
        ModelFile.open(tmp_path)


def test_what_would_change_results_is_refused(tmp_path: Path) -> None:
    for name, change in (
        ("qwen3_next", {"linear_key_head_dim": 8}),
        ("mamba2", {"time_step_limit": [0.1]}),
    ):
        config = json.dumps({**CONFIGS[name], **change})
        write_folder(name, tmp_path)
        (tmp_path / "config.json").write_text(config, encoding="utf-8")
        with pytest.raises(UnsupportedError):
            ModelFile.open(tmp_path)
