"""The other end of the pipe, for servers run as scripts: commands in, answers out, a line each.

A command {"do": NAME, …} calls the server's method of that name with the rest of it.
"""

from __future__ import annotations

import json
import sys
from typing import Any


def serve(server: Any, **about: object) -> None:
    """Say that the server is ready, and answer until there are no more commands."""
    _say({"ready": True, "load": server.load, **about})
    for line in sys.stdin:
        command = json.loads(line)
        _say(getattr(server, command.pop("do"))(**command))


def ids(count: int) -> list[int]:
    """Some tokens, the same for everybody."""
    return [100 + i % 1000 for i in range(count)]


def _say(answer: dict[str, object]) -> None:
    print(json.dumps(answer), flush=True)
