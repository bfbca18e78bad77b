"""`rlx.debug`: prints inside jitted functions, and checks for NaNs."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest

import rlx
import rlx.numpy as rnp


def test_prints_appear_in_order_at_every_run(capsys: pytest.CaptureFixture[str]) -> None:
    @rlx.jit
    def f(x: Any) -> Any:
        rlx.debug.print("first {:.1f} of {n}", rnp.sum(x), n=x.shape[0])
        y = x * 2
        rlx.debug.print("constant {}", 3)
        rlx.debug.print("tree {}", {"y": y})
        return None

    for n in (2, 3):
        assert f(np.ones(n, np.float32)) is None
    assert len(f.variants()) == 1
    assert capsys.readouterr().out.splitlines() == [
        "first 2.0 of 2", "constant 3", "tree {'y': Array([2., 2.], dtype=float32)}",
        "first 3.0 of 3", "constant 3", "tree {'y': Array([2., 2., 2.], dtype=float32)}",
    ]  # fmt: skip


def test_a_print_keeps_what_no_result_needs(capsys: pytest.CaptureFixture[str]) -> None:
    f = rlx.jit(lambda x: rlx.debug.print("{}", rnp.sum(x)))
    f(np.ones(4, np.float32))
    f(np.ones(4, np.float32))
    assert capsys.readouterr().out == "4.0\n4.0\n"


@pytest.mark.parametrize("jitted", [False, True])
def test_prints_of_a_loop_follow_its_iterations(
    jitted: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    def f(x: Any) -> Any:
        rlx.debug.print("begin")

        def outer(c: Any, row: Any) -> Any:
            def inner(d: Any, r: Any) -> Any:
                rlx.debug.print("{} {}", c, r)
                return d + r, None

            total, _ = rlx.scan(inner, 0.0, row)
            rlx.debug.print("row {}", total)
            return c + 1, None

        return rlx.scan(outer, 0, x, reverse=True)[0]

    x = np.arange(4, dtype=np.float32).reshape(2, 2)
    found = (rlx.jit(f) if jitted else f)(rnp.asarray(x))
    assert int(found) == 2
    lines = ["begin", "0 2.0", "0 3.0", "row 5.0", "1 0.0", "1 1.0", "row 1.0"]
    assert capsys.readouterr().out.splitlines() == lines


def test_a_template_that_does_not_fit_is_an_error() -> None:
    for call in (
        lambda: rlx.debug.print("{}"),
        lambda: rlx.debug.print("{a}", b=1),
        lambda: rlx.debug.print("{", 1),
        lambda: rlx.debug.print(3),  # type: ignore[arg-type]
    ):
        with pytest.raises(rlx.InputError, match=r"debug\.print"):
            call()


def test_nan_checks_name_the_op_and_the_line() -> None:
    def f(x: Any) -> Any:
        y = x * 2
        z = rnp.log(y)
        return rnp.sum(rnp.exp(z) + 1)

    line = inspect.getsourcelines(f)[1] + 2  # of the logarithm, though all ops are one kernel
    jitted, x = rlx.jit(f), np.array([1, -1], np.float32)
    assert np.isnan(float(jitted(x)))
    with rlx.debug.check_nan():
        assert float(jitted(np.ones(2, np.float32))) == pytest.approx(2 * (2 + 1))
        with pytest.raises(rlx.NumericsError, match=rf"(?s)^\[log\].*{file_name()}:{line}"):
            jitted(x)
    assert np.isnan(float(jitted(x)))  # the checks are over


def file_name() -> str:
    return __file__.rpartition("/")[2]


def test_nan_checks_hold_for_ops_outside_jit_and_in_loops() -> None:
    x = rnp.asarray(np.array([1, -1], np.float32))
    with rlx.debug.check_nan():
        with pytest.raises(rlx.NumericsError, match="log"):
            rnp.log(x)
        with pytest.raises(rlx.NumericsError, match="scan"):
            rlx.jit(lambda x: rlx.scan(lambda c, r: (c + rnp.log(r), c), 0.0, x))(x)
