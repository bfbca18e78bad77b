"""docs/glossary.md in step with the code: what it names is there, and every term stands once."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/glossary.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| ([^|]+?) \| (.+) \|$", PAGE, re.MULTILINE)
SOURCES = "\n".join(f.read_text(encoding="utf-8") for f in sorted((ROOT / "rlx").rglob("*.py")))
NAMES = sorted(set(re.findall(r"`([^`]+)`", PAGE)))


@pytest.mark.parametrize("name", NAMES)
def test_code_that_it_names_exists(name: str) -> None:
    if name.startswith("rlx/"):
        assert (ROOT / name).exists()
    elif name.startswith("rlx "):  # a command
        assert re.search(rf"[\"(]{name.split()[1]}\b", SOURCES)
    else:
        for word in re.findall(r"[A-Za-z_][\w]*", name):
            assert re.search(rf"\b{word}\b", SOURCES), word


def test_terms_stand_once_and_in_tables() -> None:
    terms = [t for t, _ in ROWS if t not in ("term", "---")]
    assert len(terms) > 100
    twice = {t for t in terms if terms.count(t) > 1}
    assert not twice, twice
