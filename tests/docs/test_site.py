"""The site builds without a warning, and a browser fetches nothing from elsewhere for it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from blocks import ROOT


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return folder


def test_pages_are_there(site: Path) -> None:
    pages = {p.relative_to(site).as_posix() for p in site.rglob("*.html")}
    written = {p.with_suffix(".html").name for p in (ROOT / "docs").glob("*.md")}
    assert pages >= written | {"index.html", "contributing.html", "results.html", "api/ir.html"}


def test_the_api_is_what_docstrings_say(site: Path) -> None:
    text = (site / "api" / "runtime.html").read_text(encoding="utf-8")
    assert 'id="rlx.runtime.session.Session"' in text
    assert 'id="rlx.runtime.compiled.CompiledGraph.run"' in text


def test_nothing_is_fetched_from_elsewhere(site: Path) -> None:
    loads = re.compile(r'<(?:script|link|img)[^>]+(?:src|href)="(?:https?:)?//[^"]+"')
    for page in site.rglob("*.html"):
        assert not loads.findall(page.read_text(encoding="utf-8")), page.name
