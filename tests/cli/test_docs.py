"""docs/cli.md names every command and option, and every line it shows is one that works."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from test_app import COMMAND, commands

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "cli.md").read_text(encoding="utf-8")
_ENDS = {"|", "<", ">", "&&"}


def shown() -> list[list[str]]:
    """The arguments of each `rlx` in a console block."""
    found = []
    for block in re.findall(r"^```console\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL):
        for line in re.findall(r"^\$ (.*)$", block, re.MULTILINE):
            words = shlex.split(line)
            if "rlx" in words:
                rest = words[words.index("rlx") + 1 :]
                end = next((i for i, word in enumerate(rest) if word in _ENDS), len(rest))
                found.append(rest[:end])
    return found


@pytest.mark.parametrize("words", shown(), ids=" ".join)
def test_lines_are_understood(words: list[str]) -> None:
    """Parsed as the command does it, all values checked, nothing run."""
    command: Any = COMMAND
    rest = list(words)
    while hasattr(command, "commands"):
        command = command.commands[rest.pop(0)]
    context = command.make_context(" ".join(words), rest)
    assert context.params


def test_everything_is_on_the_page() -> None:
    for path, command in commands():
        assert f"rlx {' '.join(path)}" in PAGE, path
        for option in command.params:
            names = [n for n in [*option.opts, *option.secondary_opts] if n.startswith("--")]
            assert all(re.search(rf"{n}\b", PAGE) for n in names), (path, names)


def test_the_error_it_shows(rlx: Any) -> None:
    done = rlx("run", "smolm2.gguf", "Hi")
    assert done.exit_code == 1
    assert done.stderr.splitlines()[0] in PAGE
