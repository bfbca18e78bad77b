"""A peer in a process of its own."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


class PeerMissing(Exception):
    """The peer is not installed where it was looked for."""


class Peer:
    """Starts `server` with `python` and asks it things."""

    def __init__(self, python: str, server: str, *args: object, requirements: str) -> None:
        command = [python, str(HERE / server), *map(str, args)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        line = self._process.stdout.readline() if self._process.stdout else ""
        if not line:
            raise PeerMissing(
                f"the peer did not start: {' '.join(command)}\n"
                f"install it: {python} -m pip install -r bench/{requirements}, "
                "or name a Python that has it with --peer-python"
            )
        self.hello: dict[str, Any] = json.loads(line)

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
