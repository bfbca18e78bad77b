"""`rlx inspect --html`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cli_support import LAYERS


def test_a_page_about_a_model(rlx: Any, tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    done = rlx("inspect", tiny, "--html", file, "--variant", "prefill:1x8")
    assert done.exit_code == 0, done.output
    assert done.stdout == ""
    assert f"wrote {file}" in done.stderr
    data = json.loads(file.read_text().split('id="data">')[1].split("</script>")[0])
    facts = dict(data["facts"])
    assert facts["layers"] == str(LAYERS)
    assert facts["sizes"] == "past_seq = 0, seq = 8"
    assert data["measured"]["weights"] == "those of the model"
    paths = [b["path"] for b in data["blocks"]]
    assert {f"blk.{i}" for i in range(LAYERS)} <= {*paths}
    assert [s["results"][0]["shape"] for s in data["lir"] if s["name"] == "ids"] == ["[1, 8]"]


@pytest.mark.parametrize("more", [["--stage", "mir"], ["--json"], ["--diff", "fold", "cse"]])
def test_it_is_about_everything(rlx: Any, tiny: Path, tmp_path: Path, more: list[str]) -> None:
    done = rlx("inspect", tiny, "--html", tmp_path / "report.html", *more)
    assert done.exit_code == 2
    assert "--html is a report on everything" in done.stderr
    assert not (tmp_path / "report.html").exists()
