"""`rlx serve`: what its options become, and what is wrong with them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rlx.cli.app import app


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Configurations that would have been served."""
    found: list[Any] = []
    monkeypatch.setattr("rlx.serve.server.serve", lambda config, reread: found.append(config))
    monkeypatch.delenv("RLX_API_KEYS", raising=False)
    return found


def run(*words: str) -> Any:
    return CliRunner().invoke(app, ["serve", *words], prog_name="rlx")


def test_options(served: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLX_API_KEYS", "key-of-environment")
    keys = tmp_path / "keys"
    keys.write_text("key-of-a-file\n")
    keys.chmod(0o600)
    done = run(
        "a=dir/x.gguf", "all-minilm-l6-v2", "--host", "0.0.0.0", "--port", "0", "--api-key",
        "key-of-command", "--api-key-file", str(keys), "--cors-origin", "http://page",
        "--most-tokens", "9", "--requests", "3", "--context", "512", "--load-adapter", "f=there",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    (config,) = served
    assert config.keys == ("key-of-command", "key-of-environment", "key-of-a-file")
    assert (config.host, config.port, config.cors_origins) == ("0.0.0.0", 0, ("http://page",))
    first, second = config.models
    assert (first.name, first.path, first.adapters) == ("a", "dir/x.gguf", (("f", "there"),))
    assert (first.options["requests"], first.options["context"]) == (3, 512)
    assert second.name == "all-minilm-l6-v2" and not second.adapters
    assert config.limits.most_tokens == 9


def test_without_anything_the_default_is_served_to_oneself(served: list[Any]) -> None:
    assert run().exit_code == 0
    assert [m.name for m in served[0].models] == ["smollm2-135m"]
    assert served[0].host == "127.0.0.1" and not served[0].keys


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--host", "0.0.0.0"], "without a key"),
        (["--api-key", "short"], "not an API key"),
        (["--config", "missing.toml"], "missing.toml"),
        (["--most-tokens", "0"], "most_tokens"),
        (["a=x", "--load-adapter", "a=y"], "of one name"),
        (["a=x", "a=y"], "of one name"),
    ],
)
def test_wrong_options(
    words: list[str], why: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RLX_API_KEYS", raising=False)
    monkeypatch.setattr("rlx.serve.server.Server.run", lambda self: None)
    done = run(*words, "--port", "0")
    assert done.exit_code in (1, 2) and why in done.output, done.output


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    done = run()
    assert done.exit_code == 1 and "pip install" in done.output and "uvicorn" in done.output
