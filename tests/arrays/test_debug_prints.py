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


@pytest.mark.parametrize("jitted", [False, True])
def test_the_branch_that_runs_prints(jitted: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """Branches that print different things, also what only they read, a loop and a branch."""

    def f(x: Any, y: Any) -> Any:
        def rows(v: Any) -> Any:
            rlx.scan(lambda c, r: (rlx.debug.print("row {}", r), (c, None))[1], 0, y)
            return v + 1

        def less(v: Any) -> Any:
            rlx.debug.print("less {} {}", v, rnp.sum(y))
            return rlx.switch(v + 5, [nothing, deeper], v)

        def deeper(v: Any) -> Any:
            rlx.debug.print("deeper")
            return v

        def nothing(v: Any) -> Any:
            return v * 2

        return rlx.cond(x > 0, rows, less, x), rlx.debug.print("end")

    run = rlx.jit(f) if jitted else f
    y = rnp.asarray(np.array([1, 2], np.float32))
    for x, result, lines in (
        (3, 4, ["row 1.0", "row 2.0"]),
        (-5, -10, ["less -5 3.0"]),
        (-4, -4, ["less -4 3.0", "deeper"]),
    ):
        assert int(run(rnp.asarray(x), y)[0]) == result
        assert capsys.readouterr().out.splitlines() == [*lines, "end"]


def test_a_branch_that_only_prints(capsys: pytest.CaptureFixture[str]) -> None:
    f = rlx.jit(lambda x: rlx.cond(x > 0, lambda: rlx.debug.print("yes"), lambda: None))
    for x in (1, -1, 2):
        assert f(rnp.asarray(x)) is None
    assert capsys.readouterr().out == "yes\nyes\n"


def test_prints_of_branches_in_a_loop(capsys: pytest.CaptureFixture[str]) -> None:
    def even(i: Any) -> Any:
        rlx.debug.print("{} even", i)

    @rlx.jit
    def f(n: Any) -> Any:
        def step(i: Any, c: Any) -> Any:
            rlx.cond(i % 2 == 0, even, lambda i: None, i)
            return c + i

        return rlx.fori_loop(0, 4, step, n)

    assert int(f(rnp.asarray(1))) == 7
    assert capsys.readouterr().out.splitlines() == ["0 even", "2 even"]
    with pytest.raises(rlx.UnsupportedError, match="inside a while_loop"):
        rlx.jit(lambda x: rlx.while_loop(lambda c: c < 3, lambda c: (even(c), c + 1)[1], x))(
            rnp.asarray(0)
        )


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
