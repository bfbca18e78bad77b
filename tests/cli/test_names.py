"""Names of models: near misses ask, and `rlx rm` deletes what was fetched and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cli_support import write_tiny

from rlx.formats.catalogue import near


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("smolm2", "smollm2-135m"),
        ("SmolLM2-135", "smollm2-135m"),
        ("smollm2-135m-instrct", "smollm2-135m"),
        ("all-minilm-l6", "all-minilm-l6-v2"),
        ("hello", None),
        ("small", None),
        ("defaults", None),
        ("smile", None),
    ],
)
def test_what_is_near(text: str, meant: str | None) -> None:
    found = near(text)
    assert (found and found.name) == meant


@pytest.mark.parametrize("command", ["run", "embed"])
def test_a_near_miss_asks(rlx: Any, command: str) -> None:
    done = rlx(command, "smolm2")
    assert (done.exit_code, done.stdout) == (2, "")
    said = " ".join(done.stderr.replace("│", " ").split())
    assert f"'smolm2' is no model; did you mean smollm2-135m? Then: rlx {command} smoll" in said


def test_a_file_without_its_ending_asks(
    rlx: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tiny(tmp_path / "story.gguf")
    monkeypatch.chdir(tmp_path)
    done = rlx("run", "story")
    assert done.exit_code == 2 and "did you mean story.gguf?" in done.stderr


def test_prompts_of_several_words_are_prompts(rlx: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def load(name: str, *_: object) -> None:
        asked.append(name)
        raise KeyboardInterrupt

    monkeypatch.setattr("rlx.cli.run.load_model", load)
    assert rlx("run", "what is smolm2 ?").exit_code == 130
    assert rlx("run", "hello").exit_code == 130
    assert asked == ["smollm2-135m"] * 2


def test_with_a_prompt_it_is_an_error_with_a_hint(rlx: Any) -> None:
    for name in ("smolm2", "smolm2.gguf"):
        done = rlx("run", name, "Hi")
        assert done.exit_code == 1 and "did you mean smollm2-135m?" in done.stderr


@pytest.fixture
def fetched(own_cache: Path) -> Path:
    model = own_cache / "models" / "smollm2-135m"
    model.mkdir(parents=True)
    (model / "weights").write_bytes(b"12345")
    return model


def test_rm(rlx: Any, fetched: Path) -> None:
    kept = rlx("rm", "smollm2", input="n\n")
    assert "Delete smollm2-135m (5 B)?" in kept.stderr
    assert kept.exit_code == 1 and fetched.is_dir()
    assert rlx("rm", "smollm2").exit_code == 1 and fetched.is_dir()  # nobody to ask
    done = rlx("rm", "smollm2", "SmolLM2-135M", "--yes", "--json")
    assert json.loads(done.stdout) == {"models": ["smollm2-135m"], "bytes": 5}
    assert not fetched.exists()


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("smolm2", "did you mean smollm2-135m?"),
        ("minilm", "rlx list"),
        ("Qwen/Qwen3-0.6B", "its own cache"),
        ("../..", "its own cache"),
    ],
)
def test_rm_of_what_is_not_there(rlx: Any, fetched: Path, name: str, hint: str) -> None:
    done = rlx("rm", "smollm2", name, "--yes")
    assert done.exit_code == 1
    assert "no fetched model of this name" in done.stderr and hint in done.stderr
    assert fetched.is_dir(), "all or nothing"


def test_rm_never_deletes_files_of_the_user(rlx: Any, tiny: Path) -> None:
    assert rlx("rm", tiny, "--yes").exit_code == 1
    assert tiny.is_file()
