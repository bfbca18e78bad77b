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


def test_no_page_installs_from_an_index_that_has_no_such_package() -> None:
    """From the clone, or a wheel: an index may have something else under the name."""
    for page in [*(ROOT / "docs").glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]:
        installed = re.findall(r"pip install[^`\n]*", page.read_text(encoding="utf-8"))
        assert not [line for line in installed if re.search(r"(?<![\w/.-])rlx\b(?![-.])", line)], (
            page
        )
    for source in (ROOT / "rlx").rglob("*.py"):
        assert not re.search(r"pip install '?rlx\b", source.read_text(encoding="utf-8")), source
