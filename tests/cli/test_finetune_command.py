"""`rlx finetune`: what it writes and says, and the same command behind a kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

LINES = [{"prompt": f"{name}:", "completion": f" yes {name}"} for name in ("red", "blue", "green")]
SMALL = ("--batch", "2", "--context", "48", "--rank", "2", "--no-pack")


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    path = tmp_path / "lines.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in LINES * 4))
    return path


def test_adapter_chart_and_merged_model(rlx: Any, tiny: Path, lines: Path, tmp_path: Path) -> None:
    out, chart, merged = (tmp_path / n for n in ("tuned", "loss.svg", "merged.gguf"))
    files = ("--out", out, "--plot", chart, "--merge", merged)
    found = rlx("finetune", tiny, lines, "--steps", "80", "--lr", "0.02", *SMALL, *files)
    assert found.exit_code == 0, found.stderr
    assert found.stdout.strip() == str(out)  # all a script needs
    for part in ("12 examples, ", "80 steps, ", "loss ", " left", f"merged: {merged}", "try: rlx"):
        assert part in found.stderr
    assert {p.name for p in out.iterdir()} >= {"adapter_config.json", "adapter_model.safetensors"}
    assert ElementTree.parse(chart).getroot().tag.endswith("svg")
    asked = ("run", "--max-tokens", "8", "--temperature", "0", "--raw", "red:")
    plain = rlx(asked[0], tiny, *asked[1:]).stdout
    beside = rlx(*asked[:1], tiny, "--load-adapter", out, "--adapter", "tuned", *asked[1:]).stdout
    assert "yes red" in beside and "yes red" not in plain
    assert rlx(asked[0], merged, *asked[1:]).stdout == beside


def test_evaluation_and_early_stop_as_json(
    rlx: Any, tiny: Path, lines: Path, tmp_path: Path
) -> None:
    """A rate that makes everything worse: after `patience` evaluations the run is over."""
    options = ("--eval", "0.25", "--eval-every", "2", "--patience", "2", "--lr", "3", "--json")
    out = ("--out", tmp_path / "tuned")
    found = rlx("finetune", tiny, lines, "--steps", "40", "--warmup", "0", *SMALL, *options, *out)
    told = json.loads(found.stdout)
    assert told["steps"] < 40 and told["kind"] == "adapter" and told["merged"] is None
    losses = [e["loss"] for e in told["evaluations"]]
    assert [e["step"] for e in told["evaluations"]] == list(range(2, told["steps"] + 1, 2))
    assert min(losses) == losses[-3]  # the best, and two that were not better


def test_the_same_command_goes_on_after_a_kill(tiny: Path, lines: Path, tmp_path: Path) -> None:
    def command(out: str, *more: str) -> list[str]:
        run = [sys.executable, "-m", "rlx", "finetune", str(tiny), str(lines), "--steps", "16"]
        return [*run, "--save-every", "1", *SMALL, "--out", str(tmp_path / out), *more]

    subprocess.run(command("straight"), check=True, capture_output=True)
    process = subprocess.Popen(command("killed"), stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if "step 5 of 16" in line:
            os.kill(process.pid, signal.SIGKILL)
            break
    assert process.wait() == -signal.SIGKILL
    again = subprocess.run(command("killed"), check=True, capture_output=True, text=True)
    assert "step 16 of 16" in again.stderr and "step 1 of 16" not in again.stderr
    name = "adapter_model.safetensors"
    found = [(tmp_path / out / name).read_bytes() for out in ("straight", "killed")]
    assert found[0] == found[1]
    other = subprocess.run(
        command("killed", "--seed", "1"), capture_output=True, text=True, check=False
    )
    assert other.returncode == 2 and "checkpoints of another run; got seed 1" in other.stderr


def test_what_cannot_run_is_said(rlx: Any, tiny: Path, lines: Path, tmp_path: Path) -> None:
    live = rlx("finetune", tiny, lines, "--live")
    assert live.exit_code == 2 and "no terminal to draw in" in live.stderr
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "ok"}\n{"text": 3}\n')
    found = rlx("finetune", tiny, bad, "--out", tmp_path / "x")
    assert found.exit_code == 1 and "bad.jsonl:2" in found.stderr
    assert not (tmp_path / "x").exists()
