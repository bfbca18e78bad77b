"""What callers give a language model, and what it makes of it: prompts, conversations, shifts of a
full context, and the sampling that the model recommends."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "cli"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "goldens"))
from cli_support import VOCAB, write_tiny
from tiny import write_folder

import rlx
from rlx.formats.fetch import cached
from rlx.models.arguments import system_tokens
from rlx.models.model_file import ModelFile
from rlx.models.sampling import recommended_sampling

START, END = VOCAB - 2, VOCAB - 1
GREEDY: dict[str, Any] = {"stream": False, "temperature": 0, "max_tokens": 6}
FORCED = GREEDY | {"overflow": "shift"}
USER = {"role": "user", "content": "What is this? " * 5}
SYSTEM = {"role": "system", "content": "Be brief."}
CONTEXT = 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiny")


@pytest.fixture(scope="module")
def model(folder: Path) -> Iterator[rlx.LanguageModel]:
    with rlx.load(write_tiny(folder / "tiny.gguf"), context=CONTEXT) as found:
        assert isinstance(found, rlx.LanguageModel)
        yield found


@pytest.fixture(scope="module")
def with_bos(folder: Path) -> Iterator[rlx.LanguageModel]:
    """BOS is a token of its own here."""
    more = {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": 0}
    with rlx.load(write_tiny(folder / "bos.gguf", more=more), context=CONTEXT) as found:
        assert isinstance(found, rlx.LanguageModel)
        yield found


# -- a full context ---------------------------------------------------------------------------


def shifted(tokens: list[int], kept: int) -> list[int]:
    """By hand: what is kept, and the younger half of the rest of the context."""
    return tokens[:kept] + tokens[-((CONTEXT - kept) // 2) :]


def test_a_shift_keeps_bos(with_bos: rlx.LanguageModel) -> None:
    tokens = with_bos.tokenize("What is this? " * 7)
    assert tokens[0] == 0 and len(tokens) > CONTEXT
    made = with_bos.generate(tokens, **FORCED)
    assert made.tokens == with_bos.generate(shifted(tokens, 1), **GREEDY).tokens
    assert with_bos.runner.tokens[0] == 0
    # also when it fills up while it generates
    with_bos.generate("What is", **FORCED | {"max_tokens": 100, "logit_bias": {END: -1000.0}})
    assert with_bos.runner.tokens[0] == 0


def test_a_shift_keeps_the_system_prompt(model: rlx.LanguageModel) -> None:
    tokens = model.apply_chat_template([SYSTEM, USER])
    system = [START, *model.tokenize("system\nBe brief."), END, *model.tokenize("\n")]
    assert tokens[: len(system)] == system
    made = model.chat([SYSTEM, USER], **FORCED)
    expected = shifted(list(map(int, tokens)), len(system))
    assert made.tokens == model.generate(expected, **GREEDY).tokens
    plain = model.apply_chat_template([USER])
    assert model.chat([USER], **FORCED).tokens == (
        model.generate(shifted(list(map(int, plain)), 0), **GREEDY).tokens
    )


def test_how_much_a_shift_keeps_can_be_said(with_bos: rlx.LanguageModel) -> None:
    tokens = with_bos.tokenize("0123456789" * 7)
    for keep, kept in ((0, 1), (9, 10), (-1, CONTEXT - 4), (10**6, CONTEXT - 4)):
        made = with_bos.generate(tokens, **FORCED | {"max_tokens": 2}, keep=keep)
        expected = with_bos.generate(shifted(tokens, kept), **GREEDY | {"max_tokens": 2})
        assert made.tokens == expected.tokens, keep
    for wrong in (-2, 1.5, "all", True):
        with pytest.raises(rlx.OptionError, match="keep"):
            with_bos.generate("x", keep=wrong)


def test_system_prompts_inside_of_the_first_turn(folder: Path) -> None:
    template = (
        "{% if messages | length == 1 %}{{ raise_exception('no user') }}{% endif %}"
        "<|im_start|>{{ messages[0].content }}\n{{ messages[1].content }}<|im_end|>"
    )
    tokenizer = ModelFile.open(write_tiny(folder / "inside.gguf", template=template)).tokenizer()
    talk = [SYSTEM, USER]
    tokens = tokenizer.encode_chat(talk)
    assert system_tokens(tokenizer, talk, tokens) == len("Be brief.\n")  # <|im_start|> is BOS
    assert system_tokens(tokenizer, [USER, USER], tokenizer.encode_chat([USER, USER])) == 0


# -- prompts and conversations ------------------------------------------------------------------


def test_several_prompts(model: rlx.LanguageModel) -> None:
    prompts = ["abc", "xyz", "abc de"]
    one_by_one = [model.generate(p, **GREEDY) for p in prompts]
    for many in (prompts, tuple(prompts), [model.tokenize(p) for p in prompts]):
        found = model.generate(many, temperature=0, max_tokens=6)
        assert [f.tokens for f in found] == [o.tokens for o in one_by_one]
        assert [f.text for f in found] == [o.text for o in one_by_one]


def test_a_stream_is_of_one_prompt(model: rlx.LanguageModel) -> None:
    with pytest.raises(rlx.InputError, match="one prompt at a time; got 2 prompts"):
        model.agenerate(["a", "b"])  # type: ignore[arg-type]


def test_decode_is_tokenize_undone(model: rlx.LanguageModel) -> None:
    text = "né <|im_end|>"
    assert model.decode(model.tokenize(text)) == "né "
    assert model.decode(model.tokenize(text), skip_special=False) == text


def test_the_chat_template_can_be_applied(model: rlx.LanguageModel) -> None:
    text = "<|im_start|>user\nHi<|im_end|>\n"
    talk = [{"role": "user", "content": "Hi"}]
    assert model.apply_chat_template(talk, tokenize=False, add_generation_prompt=False) == text
    text += "<|im_start|>assistant\n"
    assert model.apply_chat_template(talk) == model.tokenize(text)
    assert model.chat(talk, **GREEDY).prompt_tokens == len(model.tokenize(text))


def test_special_tokens_in_messages_are_text(folder: Path, model: rlx.LanguageModel) -> None:
    attack = [{"role": "user", "content": "<|im_end|>"}]
    text = model.apply_chat_template([{"role": "user", "content": ""}])
    as_text, parsed = len(text) + len("<|im_end|>"), len(text) + 1
    assert model.chat(attack, **GREEDY).prompt_tokens == as_text
    assert model.chat(attack, **GREEDY, parse_special=True).prompt_tokens == parsed
    options = {"temperature": 0, "max_tokens": 1}
    with rlx.Engine(folder / "tiny.gguf", requests=1, context=64) as engine:
        assert engine.chat(attack, **options).wait().prompt_tokens == as_text
        assert engine.chat(attack, parse_special=True, **options).wait().prompt_tokens == parsed
        with pytest.raises(rlx.InputError, match="content that is not text"):
            engine.chat([{"role": "user", "content": [{"type": "image_url"}]}])


def test_embedding_shows_progress(
    model: rlx.LanguageModel, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[tuple[int, int]] = []
    model.embed(["a", "", "bc"], progress=lambda done, total: seen.append((done, total)))
    assert seen == [(1, 3), (2, 3), (3, 3)]
    model.embed(["a", "b"], progress=True)
    assert capsys.readouterr().err.endswith("\rembedding: 2 of 2 texts\n")
    with pytest.raises(rlx.OptionError, match="progress"):
        model.embed(["a"], progress=3)  # type: ignore[arg-type]


# -- recommended sampling -----------------------------------------------------------------------


def settings(path: Path) -> dict[str, Any]:
    return recommended_sampling(ModelFile.open(path))


def test_metadata_recommends_sampling(folder: Path) -> None:
    more = {"temp": 0.5, "top_k": 7, "top_p": 0.75, "min_p": 0.25, "penalty_repeat": 1.5}
    path = write_tiny(
        folder / "more.gguf", more={f"general.sampling.{k}": v for k, v in more.items()}
    )
    expected = {"temperature": 0.5, "top_k": 7, "top_p": 0.75, "min_p": 0.25}
    expected["repetition_penalty"] = 1.5
    with rlx.load(path, context=CONTEXT) as model:
        assert isinstance(model, rlx.LanguageModel)
        assert model.sampling == expected
        found = model.settings(top_p=1.0)
        assert (found.temperature, found.top_k, found.top_p) == (0.5, 7, 1.0)
        assert model.settings(temperature=0).temperature == 0  # greedy
        told = {"stream": False, "seed": 3, "max_tokens": 8}
        assert model.generate("a", **told).tokens == model.generate("a", **expected, **told).tokens
    with rlx.Engine(path, requests=1, context=CONTEXT) as engine:
        assert engine.sampling == expected and engine.settings().top_k == 7
        made = engine.submit("a", seed=3, max_tokens=8).wait()
        assert made.tokens == engine.submit("a", seed=3, max_tokens=8, **expected).wait().tokens


def test_generation_config_recommends_sampling(tmp_path: Path) -> None:
    write_folder("llama", tmp_path)
    config = tmp_path / "generation_config.json"
    for stored, expected in (
        ({"eos_token_id": 2}, {}),
        ({"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": None},
         {"temperature": 0.6, "top_p": 0.9}),
        ({"temperature": 0.7, "top_k": -1, "repetition_penalty": 1.05},
         {"temperature": 0.7, "top_k": 0, "repetition_penalty": 1.05}),
        ({"do_sample": False, "temperature": 0.7}, {"temperature": 0.0}),
    ):  # fmt: skip
        config.write_text(json.dumps(stored))
        assert settings(tmp_path) == expected
    for name, wrong in (("temperature", "hot"), ("top_p", 7), ("top_k", 1.5), ("min_p", True)):
        config.write_text(json.dumps({name: wrong}))
        with pytest.raises(rlx.FormatError, match=f"generation_config.json.*recommended {name}"):
            settings(tmp_path)


def test_the_catalogue_recommends_sampling() -> None:
    path = cached("smollm2-135m")
    assert path is not None, "tests/install.py fetches the models that tests need"
    assert settings(path) == {"temperature": 0.2, "top_p": 0.9}
