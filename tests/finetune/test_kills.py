"""Fine-tuning killed with SIGKILL at random moments ends in the bits of a run that was not."""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from finetune_models import write_llama

SCRIPT = Path(__file__).with_name("finetune_process.py")


def run(model: Path, out: Path, steps: int, kill_after: float | None = None) -> str | None:
    """The digest at the end of a run; None where it was killed, so long after its first step."""
    command = [sys.executable, str(SCRIPT), str(model), str(out), str(steps)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    timer = None
    for line in process.stdout:
        if line.startswith("start") and kill_after is not None and timer is None:
            timer = threading.Timer(kill_after, process.send_signal, [signal.SIGKILL])
            timer.start()
        if line.startswith("end"):
            process.wait()
            if timer is not None:
                timer.cancel()
            return line.split()[1]
    assert process.wait() == -signal.SIGKILL
    return None


def killed(model: Path, out: Path, steps: int, kills: int, seed: int, within: float) -> int:
    """How often a run was killed before it reached its end by itself, or all kills were spent."""
    rng = random.Random(seed)
    for count in range(kills):
        if run(model, out, steps, rng.uniform(0, within)) is not None:
            return count
    return kills


@pytest.mark.slow
def test_a_killed_run_ends_with_the_same_bits(tmp_path: Path) -> None:
    model = write_llama(tmp_path / "model")
    expected = run(model, tmp_path / "straight", 24)
    assert expected is not None
    kills = killed(model, tmp_path / "killed", 24, 2, 1, 0.3)
    assert run(model, tmp_path / "killed", 24) == expected and kills >= 1
    assert not list((tmp_path / "killed").rglob(".new-*"))  # what kills left is removed


@pytest.mark.nightly
def test_fifty_kills_of_a_fine_tuning(tmp_path: Path) -> None:
    model, total = write_llama(tmp_path / "model"), 0
    expected = run(model, tmp_path / "straight", 200)
    for turn in range(50):
        if total >= 50:
            break
        total += killed(model, tmp_path / f"{turn}", 200, 10, turn, 1.0)
        assert run(model, tmp_path / f"{turn}", 200) == expected
        shutil.rmtree(tmp_path / f"{turn}")
    assert total >= 50
