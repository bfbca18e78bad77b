"""Checkpoints: kills at random moments, damaged and hostile files, rotation, trees of all kinds."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import zlib
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

import rlx
import rlx.numpy as rnp
from rlx import nn
from rlx.formats.safetensors import write_safetensors
from rlx.numpy.tree import flatten
from rlx.optim import checkpoints as checkpoint
from rlx.optim.checkpoints import CheckpointManager

SCRIPT = Path(__file__).with_name("training_process.py")


# -- kills ----------------------------------------------------------------------------------------


def run(folder: Path, steps: int, kill_after: float | None = None) -> str | None:
    """The digest at the end of a run; None where it was killed, so many seconds after its start."""
    command = [sys.executable, str(SCRIPT), str(folder), str(steps), "1"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    timer = None
    for line in process.stdout:
        if line.startswith("start") and kill_after is not None:
            timer = threading.Timer(kill_after, process.send_signal, [signal.SIGKILL])
            timer.start()
        if line.startswith("end"):
            process.wait()
            if timer is not None:
                timer.cancel()
            return line.split()[1]
    assert process.wait() == -signal.SIGKILL
    return None


def killed_run(folder: Path, steps: int, kills: int, seed: int, within: float) -> tuple[str, int]:
    """The digest of a run that is killed so often, at random moments, and how often it was."""
    rng, count = random.Random(seed), 0
    while count < kills:
        digest = run(folder, steps, rng.uniform(0, within))
        if digest is not None:
            return digest, count
        count += 1
    digest = run(folder, steps)
    assert digest is not None
    return digest, count


def test_killed_runs_end_with_the_same_bits(tmp_path: Path) -> None:
    expected = run(tmp_path / "straight", 150)
    digest, kills = killed_run(tmp_path / "killed", 150, 4, 1, 0.15)
    assert digest == expected and kills >= 2
    assert not list((tmp_path / "killed").glob(".new-*"))  # what kills left is removed


@pytest.mark.nightly
def test_fifty_kills(tmp_path: Path) -> None:
    steps, total = 600, 0
    expected = run(tmp_path / "straight", steps)
    for turn in range(50):
        if total >= 50:
            break
        digest, kills = killed_run(tmp_path / f"{turn}", steps, 10, turn, 0.5)
        assert digest == expected
        total += kills
    assert total >= 50


# -- trees ----------------------------------------------------------------------------------------


def tree() -> dict[str, Any]:
    return {
        "params": {"w": rnp.reshape(rnp.arange(6, dtype="f32"), (2, 3)),
                   "half": np.arange(3).astype(ml_dtypes.bfloat16)},
        "list": [np.float64(0.1), np.array(7), rnp.asarray([True, False])],
        "nothing": None, "empty": np.zeros((0, 2), np.int8),
        "step": 12, "rate": 0.1, "nan": float("nan"), "on": True, "text": "ü \n", "big": 2**70,
    }  # fmt: skip


def test_a_tree_comes_back_as_it_was(tmp_path: Path) -> None:
    path, saved = tmp_path / "c.safetensors", tree()
    checkpoint.save(path, saved)
    found = checkpoint.load(path, tree())
    rows = zip(flatten(saved)[0], flatten(found)[0], strict=True)
    for a, b in rows:
        assert type(a) is type(b)
        if isinstance(a, float) and not isinstance(a, np.generic):
            assert a == b or (a != a and b != b)
        elif hasattr(a, "dtype"):
            assert a.dtype == b.dtype and np.array_equal(np.asarray(a), np.asarray(b))
        else:
            assert a == b
    names = set(load_file(path))  # other libraries read it
    assert names == {"params.w", "params.half", "list.0", "list.1", "list.2", "empty"}
    assert path.stat().st_mode & 0o777 == 0o666 & ~umask()


def umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_modules_are_restored_without_numbers_of_their_own(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 4, key=rlx.random.key(0)), nn.BatchNorm1d(4))
    checkpoint.save(tmp_path / "m", model)
    found = checkpoint.load(tmp_path / "m", nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)))
    for name, x in model.state_dict().items():
        assert np.array_equal(np.asarray(x), np.asarray(found.state_dict()[name]))
    assert set(load_file(tmp_path / "m")) == set(model.state_dict())


def test_a_restored_array_can_be_donated_in_place(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "c", {"w": rnp.ones((1000,))})
    w = checkpoint.load(tmp_path / "c", {"w": rnp.zeros((1000,))})["w"]
    address = w.data.ctypes.data
    assert rlx.jit(lambda w: w + 1, donate="w")(w).data.ctypes.data == address


# -- folders --------------------------------------------------------------------------------------


def test_the_newest_whole_checkpoint_is_found(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path / "run", keep=2)
    start = {"step": 0, "w": np.zeros(4)}
    assert manager.restore(start) is start
    for step in (1, 5, 20):
        manager.save(step, {"step": step, "w": np.full(4, 1.5 * step)})
    assert manager.steps() == [5, 20] and manager.restore(start)["step"] == 20
    newest = manager.path(20)
    whole = newest.read_bytes()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    for cut in (0, 5, 100, len(whole) // 2, len(whole) - 1):
        newest.write_bytes(whole[:cut])
        with pytest.warns(UserWarning, match="checkpoint left out"):
            assert manager.restore(start)["step"] == 5
    for at in range(8, len(whole), 7):  # any damaged byte of header or data is found
        damaged = bytearray(whole)
        damaged[at] ^= 1
        newest.write_bytes(damaged)
        with pytest.warns(UserWarning, match="checkpoint left out"):
            assert manager.restore(start)["step"] == 5
    newest.write_bytes(whole)
    assert manager.restore(start)["step"] == 20
    assert CheckpointManager(tmp_path / "run").steps() == [5, 20]


def test_another_tree_is_an_error_and_not_left_out(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    manager.save(1, {"step": 1, "w": np.zeros(4)})
    for like, message in (
        ({"step": 1}, "another tree; got without none; with w"),
        ({"step": 1, "w": np.zeros(4), "v": 1}, "got without v; with none"),
        ({"step": 1, "w": np.zeros(5)}, r"w is another array; got f64 \[4\]; expected f64 \[5\]"),
        ({"step": 1, "w": np.zeros(4, np.float32)}, "w is another array"),
        ({"step": 1.0, "w": np.zeros(4)}, "step is of another type; got int; expected float"),
        ({"step": np.zeros(1), "w": 1}, "of another type"),
    ):
        with pytest.raises(rlx.InputError, match=message):
            manager.restore(like)
    with pytest.raises(rlx.InputError, match="two leaves of the same path"):
        manager.save(2, {"a.b": 1, "a": {"b": 2}})
    with pytest.raises(rlx.InputError, match=r"checkpoint: f\] not a value"):
        manager.save(2, {"f": print})
    with pytest.raises(rlx.InputError, match="no name for"):
        manager.save(2, {"c": np.zeros(2, np.complex128)})
    with pytest.raises(rlx.OptionError, match="no checkpoint kept"):
        CheckpointManager(tmp_path, keep=0)
    assert manager.steps() == [1] and len(list(tmp_path.iterdir())) == 1


def test_hostile_states_are_format_errors(tmp_path: Path) -> None:
    path = tmp_path / "c"

    def written(state: Any, version: str = "1") -> None:
        text = state if isinstance(state, str) else json.dumps(state)
        metadata = {"rlx_checkpoint": version, "state": text,
                    "checksum": str(zlib.crc32(text.encode()))}  # fmt: skip
        write_safetensors(path, {}, metadata)

    good = {"state": {"n": ["int", 3]}, "checksums": {}}
    written(good)
    assert checkpoint.load(path, {"n": 1}) == {"n": 3}
    written(good, version="2")
    with pytest.raises(rlx.FormatError, match="not a checkpoint"):
        checkpoint.load(path, {"n": 1})
    for state in (
        "[]", "{", "[" * 200_000, {"state": [], "checksums": {}}, {"state": {"n": 3}},
        {"state": {"n": ["int", "3"]}, "checksums": {}}, {"state": {"n": ["int", True]}},
        {"state": {"n": ["eval", "3"]}, "checksums": {}},
        {"state": {"n": [["int"], 3]}, "checksums": {}}, {"state": {}, "checksums": {"n": 1}},
        {"state": {"n": ["float", "x"]}, "checksums": {}},
        {"state": {"n": ["int", 3, 4]}, "checksums": {}},
    ):  # fmt: skip
        written(state)
        with pytest.raises(rlx.FormatError):
            checkpoint.load(path, {"n": 1.0 if "float" in str(state) else 1})
    with pytest.raises(rlx.InputError, match="no such file"):
        checkpoint.load(tmp_path / "none", {})
