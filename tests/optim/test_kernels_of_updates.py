"""An update inside `rlx.jit` compiles no kernels of its own for numbers that are known."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import rlx
import rlx.numpy as rnp
from rlx import optim
from rlx.numpy import dispatch

OPTIMIZERS = [optim.AdamW(1e-3, weight_decay=0.1), optim.SGD(1e-2, momentum=0.9), optim.Lion(1e-4)]


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: type(o).__name__)
def test_a_jitted_update_runs_no_op_by_itself(
    optimizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = {"w": rnp.asarray(np.ones((4, 8), np.float32))}
    state = optimizer.init(params)

    def fail(*args: Any) -> Any:
        raise AssertionError("an op of its own")

    monkeypatch.setattr(dispatch, "_compile_form", fail)
    updated, _ = rlx.jit(optimizer.update)(params, state, params)
    assert np.all(np.asarray(updated["w"]) < 1)  # a step against a positive gradient


def test_a_trace_has_a_number_once() -> None:
    graph = rlx.jit(lambda x: (x * 0.5 + 2) * 0.5 - 2).lower(np.ones(3, np.float32)).into_graph()
    assert [n.op.name for n in graph.nodes].count("constant") == 2
    mixed = rlx.jit(lambda x, y: (x * 2, y * 2, x * 0.0, x * -0.0)).lower(
        np.ones(3, np.float32), np.ones(3, np.float64)
    )
    # 2 in f32 and in f64, and both zeros
    assert [n.op.name for n in mixed.into_graph().nodes].count("constant") == 4
