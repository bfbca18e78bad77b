"""Peers of `rlx bench`, each a script of this folder run by a Python that has the peer installed.

One JSON command a line in, one JSON answer a line out.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlx.errors import RlxError


class PeerMissing(RlxError):
    """The peer is not installed where it was looked for, or has ended."""


class Peer:
    """Starts the script `server` with `python` and asks it things. `install` says how to get what
    the script needs, `option` names another Python; `env` is added to the environment."""

    def __init__(
        self,
        python: str,
        server: Path,
        *arguments: object,
        install: str,
        option: str = "--peer-python",
        env: Mapping[str, str] | None = None,
    ) -> None:
        self._name = server.stem
        self._hint = f"{python} {install}; or name a Python that has it with {option}"
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115
        command = [python, str(server), *map(str, arguments)]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                text=True,
                env={**os.environ, **(env or {})},
            )
        except OSError as e:
            raise self._missing(f"{python}: {e.strerror}") from e
        self.hello = self._answer()

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self._errors.seek(0)
            said = self._errors.read().strip().splitlines()
            raise self._missing(said[-1] if said else f"exit {self._process.returncode}")
        found: dict[str, Any] = json.loads(line)
        return found

    def _missing(self, got: str) -> PeerMissing:
        return PeerMissing("the peer does not answer", where=self._name, got=got, hint=self._hint)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._errors.close()

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_SERVER = Path(__file__).with_name("llama_cpp_server.py")


def start_llama_cpp(
    python: str,
    model: Path | str,
    threads: int,
    context: int,
    *words: str,
    env: Mapping[str, str] | None = None,
) -> Peer:
    """The same model file in llama.cpp. What it can be asked, and what `words` it takes, stands in
    `llama_cpp_server.py`."""
    install = "-m pip install llama-cpp-python"
    return Peer(python, _SERVER, model, threads, context, *words, install=install, env=env)
