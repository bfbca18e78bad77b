"""Every block in README, CONTRIBUTING and docs is run, or it is a command that is understood.

The Python blocks of a page are one program, from top to bottom. A block with a title is a file
beside it, a text block behind a Python block is what it prints, and commands on files that it wrote
are run.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from blocks import CUT, PAGES, ROOT, blocks, commands, fits, promised, script

LANGUAGES = {"", "python", "console", "text"}


def run_python(folder: Path, *arguments: str) -> str:
    """What a program prints."""
    command = [sys.executable, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_python_blocks_run(page: Path, tmp_path: Path) -> None:
    found = blocks(page)
    assert {b.language for b in found} <= LANGUAGES, "what is not run must be looked at here"
    text = script(found)
    for block in found:
        if block.title:
            (tmp_path / block.title).write_text(block.text, encoding="utf-8")
    name = "onnx_page" if page.stem == "onnx" else page.stem  # not that of a package
    program = tmp_path / f"{name}.py"
    program.write_text(text, encoding="utf-8")
    printed = run_python(tmp_path, program.name).split(f"{CUT}\n")
    for number, wanted in promised(found).items():
        assert fits(printed[number], wanted), f"printed:\n{printed[number]}\nin docs:\n{wanted}"
    for command in commands(page):
        if any((tmp_path / word).is_file() for word in command.words):
            shown = run_python(tmp_path, "-m", "rlx", *command.words)
            assert shown or {"--out", "--html"} & {*command.words}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_files_and_pages_that_are_named_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    named = re.findall(r"`((?:rlx|tests|docs|bench|examples)/[\w./-]+)`", text)
    named += re.findall(r"^\$ .*?((?:tests|examples)/[\w/]+\.py)", text, re.MULTILINE)
    assert [n for n in named if not (ROOT / n).exists()] == []
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    links = re.findall(r"\]\(([^)#:]+)(?:#[\w-]+)?\)", prose)
    assert [n for n in links if not (page.parent / n).exists()] == []


def test_every_page_that_should_run_does() -> None:
    assert {p.name for p in PAGES if script(blocks(p))} >= {"README.md", "tour.md", "errors.md"}


def test_text_fits_with_gaps() -> None:
    assert fits("a 12 b\nc\nd\ne\n", "a … b\n…\ne\n")
    assert not fits("a 12 b\nc", "a … b")
    assert not fits("a.b", "a_b")
