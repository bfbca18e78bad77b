"""Getting a browser for these tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from chromium import find_chromium

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import install


def test_a_browser_can_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHROMIUM", sys.executable)
    assert find_chromium() == sys.executable
    monkeypatch.setenv("CHROMIUM", "")
    monkeypatch.setenv("PATH", "")
    assert find_chromium() is None


def test_without_rights_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SystemExit, match=r"hint: install one of chromium, .* or set CHROMIUM"):
        install.install_chromium()


def test_a_failure_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def refuse(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        asked.append(command[-2:])
        return subprocess.CompletedProcess(command, 100, "", "E: no network")

    monkeypatch.setattr(install.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(install.subprocess, "run", refuse)
    with pytest.raises(SystemExit, match="update -q failed:\nE: no network"):
        install.install_chromium()
    assert asked == [["update", "-q"]]
