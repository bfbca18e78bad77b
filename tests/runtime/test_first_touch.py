"""Arenas whose pages are touched while their program is compiled."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import rlx
import rlx.numpy as rnp
from rlx.backends.cpu import first_touch
from rlx.ir.binding import DimBinding
from rlx.ir.graph import Graph
from rlx.ir.lir import Lir
from rlx.runtime.template import Template, make_template
from rlx.specialize.options import CompileOptions


def planned(rows: Any, **options: Any) -> Lir:
    g = Graph("chain")
    x, w = g.input("x", [rows, 64]), g.input("w", [64, 64])
    h = g.tanh(x @ w)
    g.set_outputs([g.tanh(h @ w) @ w + h])
    backend = rlx.Session("cpu").device.backend
    template: Template = make_template(g, CompileOptions.of(options), backend)
    return template.plan({})


def test_all_is_touched_but_what_callers_own() -> None:
    lir = planned(1024)
    touched = np.zeros(lir.arena_size, bool)
    for first, last in first_touch.touched_spans(lir):
        assert not touched[first:last].any()
        touched[first:last] = True
    for slot in lir.slots.values():
        if slot.offset is not None and slot.kind in ("input", "output", "arena"):
            part = touched[slot.offset : slot.offset + slot.size]
            assert part.all() if slot.kind == "arena" else not part.any()
    assert sum(s.kind == "arena" for s in lir.slots.values()) > 1


def test_a_large_arena_is_zero_and_the_results_are_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    w = np.random.default_rng(0).normal(size=(256, 256)).astype("f4")

    def chain(x: Any) -> Any:
        return rnp.tanh(rnp.tanh(x @ w) @ w) @ w + x

    monkeypatch.setattr(first_touch, "LARGE", 1)
    monkeypatch.setattr(first_touch, "usable_cores", lambda: 2)
    found = rlx.jit(chain, donate=["x"])(rnp.asarray(w, copy=True))
    wide = np.tanh(np.tanh(w @ w.astype("f8")) @ w) @ w + w
    # sums of 256 terms in f32, three times, whose roundings the second product magnifies 16 times
    np.testing.assert_allclose(found, wide, rtol=0, atol=1e-4 * np.abs(wide).max())


def test_small_and_dynamic_arenas_are_left_to_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    with first_touch.arena_touched_ahead(planned(1024)) as arena:
        assert arena is None  # it is small
    monkeypatch.setattr(first_touch, "LARGE", 1)
    monkeypatch.setattr(first_touch, "usable_cores", lambda: 2)
    with first_touch.arena_touched_ahead(planned(1024)) as arena:
        assert arena is not None
    assert not arena.any()
    dynamic = planned("n", binding=DimBinding().set_dynamic("n", 4096))
    with first_touch.arena_touched_ahead(dynamic) as arena:
        assert arena is None
