"""Variants that use one arena: results, memory, and a run that another one left behind."""

from __future__ import annotations

import numpy as np
import pytest

from rlx import Graph, Session
from rlx.backends.cpu.interruptible import AsideRun
from rlx.runtime.compiled import CompiledGraph


def compiled() -> CompiledGraph:
    """softmax(x·w)·w + x, by way of the arena."""
    g = Graph("shared")
    x, w = g.input("x", ["n", 256]), g.param("w", [256, 256])
    g.set_outputs(g.matmul(g.softmax(g.matmul(x, w), axis=-1), w) + x)
    f = Session("cpu").compile(g).share_arenas()
    return f.set_param("w", np.random.default_rng(1).normal(size=(256, 256)).astype("f4"))


def expected(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    z = x.astype("f8") @ w
    z = np.exp(z - z.max(axis=-1, keepdims=True))
    return z / z.sum(axis=-1, keepdims=True) @ w + x


def test_variants_take_turns_in_the_largest_arena() -> None:
    f, rng = compiled(), np.random.default_rng(2)
    w, arenas = f.params.get("w"), {}
    for rows in (3, 40, 5, 17, 3, 64, 40, 5):
        x = rng.normal(size=(rows, 256)).astype("f4")
        # sums of 256 products, of numbers up to 4, in f32
        np.testing.assert_allclose(f.run(x=x)[0], expected(x, w), rtol=1e-4, atol=1e-3)
        arenas[rows] = f.executable.arena
        arenas[rows].array.fill(0xFF)  # NaNs: nothing is expected of what others left
    assert arenas[5] is arenas[40] and arenas[17] is arenas[40]
    assert arenas[3] is not arenas[40] and arenas[64].nbytes > arenas[40].nbytes


def test_without_leave_each_has_its_own() -> None:
    g = Graph("own")
    x = g.input("x", ["n", 256])
    g.set_outputs(g.matmul(g.softmax(x, axis=-1), g.transpose(x, axes=(1, 0))))
    f, arenas = Session("cpu").compile(g), []
    for rows in (8, 4):
        f.run(x=np.ones((rows, 256), "f4"))
        arenas.append(f.executable.arena)
    assert arenas[0] is not arenas[1]


def test_an_interrupted_run_ends_before_another_uses_its_arena(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    f = compiled()
    x = {n: np.ones((n, 256), "f4") for n in (40, 5)}
    for given in x.values():
        f.run(x=given)
    waited: list[object] = []
    monkeypatch.setattr(AsideRun, "wait", lambda self: waited.append(self))
    small = f.executable
    f.run(x=x[40])
    large = f.executable
    left = AsideRun(lambda: None)
    large._abandoned.append((large, left))  # type: ignore[attr-defined]
    f.run(x=x[5])
    assert f.executable is small and small is not large
    assert waited == [left] and not large._abandoned  # type: ignore[attr-defined]
