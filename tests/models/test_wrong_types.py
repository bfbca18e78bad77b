"""What is no text, no token, no setting and no model: an error that says what is expected."""

from __future__ import annotations

import copy
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "cli"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "goldens"))
from cli_support import write_tiny
from encoder_files import write_model

import rlx
from rlx.errors import FormatError, InputError, OptionError, RlxError, UnsupportedError


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("models") / "tiny.gguf")


@pytest.fixture(scope="module")
def model(file: Path) -> Iterator[Any]:
    with rlx.load(file) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with rlx.load(write_model(tmp_path_factory.mktemp("bert"))) as loaded:
        yield loaded


PROMPTS = [None, 3, 3.5, True, b"abc", [1.5], [None], {1: 2}, {1}, object(), np.array([1.5])]


@pytest.mark.parametrize("prompt", PROMPTS, ids=lambda p: f"{type(p).__name__}-{str(p)[:8]}")
def test_prompts_are_texts_or_tokens(model: Any, prompt: Any) -> None:
    with pytest.raises(InputError, match=r"not token ids|not a prompt"):
        model.generate(prompt, stream=False, max_tokens=1)
    with pytest.raises(InputError, match=r"not token ids|not a prompt"):
        model.perplexity(prompt)
    with pytest.raises(InputError, match=r"not token ids|not a prompt"):
        model.logits(prompt)


def test_tokens_of_any_sequence_are_prompts(model: Any) -> None:
    answers = [
        model.generate(p, stream=False, max_tokens=2, temperature=0).tokens
        for p in ([1, 2], (1, 2), np.array([1, 2]), iter([1, 2]))
    ]
    assert answers == [answers[0]] * 4


SETTINGS: list[tuple[str, Any]] = [
    ("stop", 3), ("stop", None), ("stop_tokens", 3), ("logit_bias", 3), ("speculate", "x"),
    ("speculate", 1.5), ("regex", 3), ("grammar", 3), ("json_schema", 3),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), SETTINGS, ids=str)
def test_settings_have_types(model: Any, name: str, value: Any) -> None:
    with pytest.raises(OptionError, match=rf"\[{name}\]"):
        model.generate("a", stream=False, max_tokens=1, **{name: value})


@pytest.mark.parametrize("grammar", ["root ::= foo", "start: foo"])
def test_an_undefined_rule(model: Any, grammar: str) -> None:
    with pytest.raises(OptionError, match="foo"):
        model.generate("a", stream=False, max_tokens=1, grammar=grammar)


@pytest.mark.parametrize("texts", [None, 3, 3.5, b"abc", object()], ids=lambda t: str(t)[:9])
def test_embed_takes_texts(model: Any, encoder: Any, texts: Any) -> None:
    for embeds in (model, encoder):
        with pytest.raises(InputError, match="not several texts"):
            embeds.embed(texts)
        with pytest.raises(InputError, match="only text can be tokenised"):
            embeds.embed(["a", texts])


@pytest.mark.parametrize("path", [None, 3, b"x", [1], "", "x" * 5000], ids=lambda p: str(p)[:9])
def test_models_are_paths_or_names(path: Any) -> None:
    with pytest.raises(InputError, match=r"not a model|no such model"):
        rlx.load(path)


OPTIONS: list[tuple[str, Any]] = [
    ("context", "x"), ("context", 1.5), ("context", 2**70), ("quant", 3), ("artifact", 3),
    ("draft", 3), ("adapters", 3), ("adapters", "x"), ("adapters", [3]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), OPTIONS, ids=str)
def test_options_of_load_have_types(file: Path, name: str, value: Any) -> None:
    with pytest.raises((InputError, OptionError), match=rf"\[{name}\]"):
        rlx.load(file, **{name: value})


ENGINES: list[tuple[str, Any]] = [
    ("cache_tokens", "x"), ("cache_tokens", 2**60), ("cache_tokens", -1), ("requests", 2**40),
    ("requests", "x"), ("requests", 0), ("waiting", None), ("artifact", 3), ("adapters", "x"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), ENGINES, ids=str)
def test_options_of_an_engine_have_types(file: Path, name: str, value: Any) -> None:
    with pytest.raises((InputError, OptionError), match=rf"\[{name}\]"):
        rlx.Engine(file, **{name: value})


def test_an_engine_takes_several_prompts(file: Path) -> None:
    with rlx.Engine(file) as engine:
        for prompts in (None, 3, "a", b"x"):
            with pytest.raises(InputError, match="not several texts"):
                engine.generate(prompts)
        for prompt in (None, 3, b"x", [1.5]):
            with pytest.raises(InputError, match=r"not token ids|not a prompt"):
                engine.generate(["a", prompt], max_tokens=1)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no FIFOs here")
@pytest.mark.parametrize("name", ["model.gguf", "model"])
def test_a_fifo_is_no_model(tmp_path: Path, name: str) -> None:
    """Opening one waits for a writer, for ever."""
    os.mkfifo(tmp_path / name)
    with pytest.raises(InputError, match="not a regular file; got a FIFO"):
        rlx.load(tmp_path / name)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no FIFOs here")
def test_fifos_in_a_folder_and_as_artifacts(tmp_path: Path, file: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(FormatError, match="no model in the folder"):
        rlx.load(tmp_path)
    with pytest.raises(RlxError, match="not a regular file"):
        rlx.load(file, artifact=tmp_path / "config.json")


@pytest.mark.parametrize(
    "duplicate", [lambda o: pickle.loads(pickle.dumps(o)), copy.deepcopy], ids=["pickle", "copy"]
)
def test_models_are_loaded_not_pickled(
    model: Any, encoder: Any, file: Path, duplicate: Callable[[Any], Any]
) -> None:
    with rlx.Engine(file) as engine:
        for held in (model, encoder, engine, model.tokenizer):
            with pytest.raises(UnsupportedError, match="pickled") as e:
                duplicate(held)
            assert "in each process" in e.value.hint
    with pytest.raises(UnsupportedError) as e:
        duplicate(model.generate("a"))
    assert "pickle its result" in e.value.hint
    result = model.generate("a", stream=False, max_tokens=2)
    assert duplicate(result) == result
