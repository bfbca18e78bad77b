"""Learning-rate schedules: PyTorch's rates, as numbers and traced."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from optim_cases import SCHEDULES, STEPS

import rlx
import rlx.numpy as rnp
from rlx import optim
from rlx.optim import schedules

GOLDEN = np.load(Path(__file__).parents[1] / "goldens" / "optim.npz")


@pytest.mark.parametrize("name", SCHEDULES)
def test_rates_are_those_of_torch(name: str) -> None:
    schedule = eval(SCHEDULES[name][1], vars(schedules))
    traced = rlx.jit(lambda step: schedule(step))
    for i, expected in enumerate(GOLDEN[f"schedule/{name}"]):
        # f64; torch multiplies from step to step and so rounds twice a step
        assert float(schedule(i)) == pytest.approx(expected, rel=1e-13)
        assert float(traced(rnp.asarray(i, dtype="i32"))) == pytest.approx(expected, rel=1e-13)
    assert len(traced.variants()) == 1


def test_schedules_end_where_they_say() -> None:
    assert float(schedules.linear(1, 0.2, 10)(10_000)) == 0.2
    assert float(schedules.cosine(1, 10, 0.2)(10_000)) == pytest.approx(0.2, rel=1e-15)
    assert float(schedules.one_cycle(1, 10)(10_000)) == pytest.approx(1 / 25 / 1e4, rel=1e-12)
    rate = schedules.inverse_sqrt(0.5, 100)
    assert [float(rate(n)) for n in (0, 50, 100, 400)] == [0, 0.25, 0.5, 0.25]
    rate = schedules.chain([(schedules.constant(1), 3), (schedules.linear(1, 0, 4), 4)],
                           schedules.constant(0.5))  # fmt: skip
    assert [float(rate(n)) for n in range(9)] == [1, 1, 1, 1, 0.75, 0.5, 0.25, 0.5, 0.5]


def test_an_optimizer_reads_its_schedule() -> None:
    optimizer = optim.SGD(schedules.linear(1.0, 0.0, STEPS))
    params = {"w": rnp.zeros((1,), dtype="f64")}
    state, step = optimizer.init(params), rlx.jit(optimizer.update)
    moved = []
    for _ in range(STEPS):
        params, state = step({"w": np.ones(1)}, state, params)
        moved.append(-float(params["w"][0]))
    expected = np.cumsum(1 - np.arange(STEPS) / STEPS)
    np.testing.assert_allclose(moved, expected, rtol=1e-14)
