"""docs/settings.md has the table of settings that the code has, and misspelt ones are warned of."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from rlx.support.settings import SETTINGS

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")


def test_the_table_is_that_of_the_code() -> None:
    rows = re.findall(r"^\| `(RLX_\w+)` \| (.*?) ?\| (.+) \|$", PAGE, re.MULTILINE)
    assert rows == [(s.name, f"`{s.default}`" if s.default else "", s.meaning) for s in SETTINGS]


def test_the_table_is_the_only_one_and_complete() -> None:
    known = {s.name for s in SETTINGS}
    for file in sorted([*(ROOT / "rlx").rglob("*.py"), *(ROOT / "docs").glob("*.md")]):
        named = set(re.findall(r"\bRLX_[A-Z_]*[A-Z]\b", file.read_text(encoding="utf-8")))
        assert named <= known, file


def started(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    given = {n: v for n, v in os.environ.items() if not n.startswith("RLX_")}
    return subprocess.run(
        [sys.executable, *command], env=given | environment, capture_output=True, text=True,
        check=True,
    )  # fmt: skip


def test_misspelt_variables_are_warned_of() -> None:
    line = "RLX_NUM_THREAD is no setting of RLX; did you mean RLX_NUM_THREADS?"
    code = "import rlx; rlx.Session('reference'); rlx.Session('cpu').compile"
    code += "(rlx.GraphModule.define('g', lambda g: g.exp(g.input('x', [2])))).run(x=[1, 2])"
    done = started("-c", code, RLX_NUM_THREAD="2", RLX_CACHE="0")
    assert done.stderr.count(line) == 1
    shown = started("-m", "rlx", "list", RLX_NUM_THREAD="2", RLX_ABACUS="1")
    assert shown.stderr.count(f"warning: {line}\n") == 1
    assert "RLX_ABACUS is no setting of RLX; docs/settings.md lists those there are" in shown.stderr


def test_known_variables_are_not() -> None:
    done = started("-m", "rlx", "list", RLX_NUM_THREADS="1", RLX_DEBUG="0", OTHER_RLX_X="1")
    assert done.stderr == ""
