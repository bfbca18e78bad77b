"""The README's two commands are what its readers and the checks of every change run."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_every_change_is_checked_as_the_readme_says() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^\$ (python3 -m venv .*pytest.*)$", readme, re.MULTILINE)
    run = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    lines = [line for line in run.splitlines() if line and not line.startswith(("#", "set", "cd"))]
    assert lines == [command]
