"""The debug ladder and the check for numbers that are not finite."""

from __future__ import annotations

import numpy as np
import pytest

import rlx
from rlx import Session
from rlx.support.settings import SETTINGS, debug_level


def network() -> rlx.Graph:
    g = rlx.Graph("net")
    h = g.matmul(g.input("x", ["n", 4]), g.param("w", [4, 4]))
    with g.block("head"):
        h = g.matmul(h, g.param("v", [4, 4]))
    g.set_outputs(h)
    return g


def run(device: str, w: np.ndarray) -> None:
    f = Session(device).compile(network())
    f.set_params({"w": w, "v": np.eye(4, dtype=np.float32)})
    f.run(x=np.ones((3, 4), np.float32))


@pytest.mark.parametrize("device", ["reference", "cpu"])
def test_each_rung_adds_to_the_one_below(
    device: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = []
    for level in range(8):
        monkeypatch.setenv("RLX_DEBUG", str(level))
        run(device, np.eye(4, dtype=np.float32))
        shown.append(capsys.readouterr().err)
    assert shown[0] == ""
    assert "net: 5 nodes" in shown[1]
    assert "GFLOP/s" in shown[2]
    assert "graph net" in shown[3]
    assert "lir net" in shown[4]
    assert ("define void @kernel" in shown[5]) == (device == "cpu")
    assert "GFLOP/s" not in shown[1]
    assert "lir net" not in shown[3]


def test_a_rung_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong in ("8", "-1", "yes"):
        monkeypatch.setenv("RLX_DEBUG", wrong)
        with pytest.raises(rlx.OptionError, match="RLX_DEBUG"):
            debug_level()


@pytest.mark.parametrize("device", ["reference", "cpu"])
def test_the_first_bad_node_is_named(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLX_CHECK_NAN", "1")
    run(device, np.eye(4, dtype=np.float32))
    bad = np.eye(4, dtype=np.float32)
    bad[2, 1] = np.nan
    with pytest.raises(rlx.NumericsError) as caught:
        run(device, bad)
    text = str(caught.value)
    assert "3 of 12 elements" in text
    assert "at [0, 1]" in text
    assert "test_debug.py" in text
    assert "head" not in text, "the second product is not the first bad one"


def test_settings_are_documented() -> None:
    assert len({s.name for s in SETTINGS}) == len(SETTINGS)
    assert all(s.name.startswith("RLX_") and s.meaning for s in SETTINGS)
