"""Every Python block in README, CONTRIBUTING and docs runs, one file's blocks in one namespace."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
_BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_python_blocks_run(page: Path, tmp_path: Path) -> None:
    blocks = _BLOCK.findall(page.read_text(encoding="utf-8"))
    if not blocks:
        assert "```python" not in page.read_text(encoding="utf-8")
        return
    script = tmp_path / "blocks.py"
    script.write_text("\n".join(blocks), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_example_runs() -> None:
    done = subprocess.run(
        [sys.executable, "examples/small_network.py"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "logits (2, 9, 100)" in done.stdout
