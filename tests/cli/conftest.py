"""A tiny model, and a way to run commands on it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "goldens"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "models"))
from cli_support import write_tiny
from encoder_files import write_model
from typer.testing import CliRunner

from rlx.cli.app import app


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("models") / "tiny.gguf")


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same without a chat template."""
    return write_tiny(tmp_path_factory.mktemp("models") / "base.gguf", template=None)


@pytest.fixture(scope="session")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("bert"))


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Nothing of the user's is read or written."""
    monkeypatch.setenv("RLX_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("RLX_DEBUG", raising=False)
    return tmp_path / "cache"


Rlx = Callable[..., Any]


@pytest.fixture
def rlx() -> Rlx:
    """Run a command in this process: exit_code, stdout and stderr of the result."""

    def call(*arguments: object, input: str | None = None) -> Any:
        given: Sequence[str] = [str(a) for a in arguments]
        return CliRunner().invoke(app, given, input=input, prog_name="rlx")

    return call
