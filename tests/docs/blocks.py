"""The code of a page: its blocks, what they print, and the commands it shows."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
_FENCE = re.compile(r"^```(\w*)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_TITLE = re.compile(r'title="([^"]+)"')
_ANYTHING = r"[^\n]*"  # on a line
_ENDS = {"|", "<", ">", "&&"}
CUT = "-- end of a block --"


class Block(NamedTuple):
    language: str
    title: str  # the file that it is, where it has a name
    text: str


def blocks(page: Path) -> list[Block]:
    found = []
    for language, options, text in _FENCE.findall(page.read_text(encoding="utf-8")):
        title = _TITLE.search(options)
        found.append(Block(language, title[1] if title else "", text))
    return found


def script(found: list[Block]) -> str:
    """The Python blocks of a page as one program that marks where each ends."""
    parts = [b.text for b in found if b.language == "python" and not b.title]
    return "".join(f'{text}\nprint("{CUT}", flush=True)\n' for text in parts)


def promised(found: list[Block]) -> dict[int, str]:
    """What a block prints, by its number among those that run: the text block right behind it."""
    wanted, number = {}, -1
    for before, block in zip([None, *found], found, strict=False):
        number += block.language == "python" and not block.title
        if block.language == "text" and before is not None and before.language == "python":
            wanted[number] = block.text
    return wanted


def fits(printed: str, wanted: str) -> bool:
    """Whether it is that text; "…" stands for anything on its line, on a line alone for lines."""
    lines = [re.escape(line).replace("…", _ANYTHING) for line in wanted.strip().split("\n")]
    pattern = "\n".join(".*" if line == _ANYTHING else line for line in lines)
    return re.fullmatch(pattern, printed.strip(), re.DOTALL) is not None


class Command(NamedTuple):
    words: list[str]  # behind `rlx`
    alone: bool  # nothing is piped into it or out of it
    printed: str  # what the page shows below it


def commands(page: Path) -> list[Command]:
    """Each `rlx` in a console block."""
    found = []
    for block in blocks(page):
        if block.language != "console":
            continue
        for line, printed in re.findall(r"^\$ ([^\n]*)\n((?:(?!\$ )[^\n]*\n)*)", block.text, re.M):
            words = shlex.split(line)
            at = next((i for i, w in enumerate(words) if w == "rlx" or w.endswith("/rlx")), None)
            if at is None:
                continue
            rest = words[at + 1 :]
            end = next((i for i, word in enumerate(rest) if word in _ENDS), len(rest))
            found.append(Command(rest[:end], at == 0 and end == len(rest), printed))
    return found
