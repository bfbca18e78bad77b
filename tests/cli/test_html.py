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


def test_programs_in_files(rlx: Any, tmp_path: Path) -> None:
    source, plan, page = (tmp_path / name for name in ("net.mir", "net.lir", "report.html"))
    source.write_text(
        'graph net {\n  %0 "x": [n, 64] f32 = input\n  %1 "w": [64, 32] f32 = param\n'
        '  %2 = matmul(%0, %1)  // block top\n  return %2 as "y"\n}\n'
    )
    assert "sizes are open; got n" in rlx("inspect", source, "--html", page).stderr
    assert rlx("inspect", source, "--stage", "lir", "--bind", "n=4", "-o", plan).exit_code == 0
    for file, more in ((source, ["--bind", "n=4"]), (plan, [])):
        done = rlx("inspect", file, "--html", page, *more)
        assert done.exit_code == 0, done.output
        data = json.loads(page.read_text().split('id="data">')[1].split("</script>")[0])
        assert data["hir"] == []
        assert data["measured"]["weights"] == "zeros"
        assert [b["path"] for b in data["blocks"]] == ["", "top"]
