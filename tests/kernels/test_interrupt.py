"""Ctrl-C in the middle of one long kernel."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import threading
from typing import Any

import numpy as np
import pytest

from rlx import GraphModule, Session, UpTo
from rlx.backends.cpu import executable, interruptible
from rlx.backends.cpu.interruptible import LONG_FLOPS, AsideRun, long_check
from rlx.ir.dim import sym

SIZE = 4096  # a product of 137 GFLOP: seconds on a few cores


def test_one_long_kernel_is_interrupted() -> None:
    """A process that interrupts itself, uses the pool again, and leaves."""
    source = f"""
        import os, signal, threading, time
        import numpy as np
        from rlx import GraphModule, Session

        def compiled(build):
            return Session("cpu").compile(GraphModule.define("g", build), {{"threads": 1}})

        n = {SIZE}
        product = compiled(lambda g: g.matmul(g.input("x", [n, n]), g.input("y", [n, n])))
        small = compiled(lambda g: g.exp(g.input("x", [4])))
        x = np.ones((n, n), np.float32)
        sent = []

        def interrupt():
            time.sleep(0.2)
            sent.append(time.perf_counter())
            os.kill(os.getpid(), signal.SIGINT)

        threading.Thread(target=interrupt).start()
        try:
            product.run(x=x, y=x)
            print("not interrupted")
        except KeyboardInterrupt:
            print("interrupted", time.perf_counter() - sent[0] < 0.5)
        print(small(np.zeros(4, np.float32)).tolist())
        print((product(x, x) == n).all(), flush=True)
        threading.Thread(target=interrupt).start()
        product.run(x=x, y=x)
    """
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(source)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    out, err = child.communicate(timeout=120)
    assert out.splitlines() == ["interrupted True", "[1.0, 1.0, 1.0, 1.0]", "True"], out + err
    assert child.returncode == -signal.SIGINT and err.endswith("KeyboardInterrupt\n")


def product(binding: dict[str, Any] | None = None) -> Any:
    module = GraphModule.define(
        "g", lambda g: g.matmul(g.input("x", ["n", 2048]), g.param("w", [2048, 2048]))
    )
    return Session("cpu").compile(module, binding=binding)


def test_only_long_runs_go_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    """2·n·2048² operations: 8 million a row, long from 239 rows on."""
    aside: list[object] = []
    real = AsideRun.run
    monkeypatch.setattr(AsideRun, "run", lambda self: (aside.append(self), real(self)))
    w = np.eye(2048, dtype=np.float32)
    for f in (product(), product({"n": UpTo(256)})):
        f.set_param("w", w)
        for rows, long in ((1, False), (238, False), (239, True), (256, True)):
            aside.clear()
            x = np.full((rows, 2048), rows, np.float32)
            np.testing.assert_array_equal(f.run(x=x)[0], x)
            assert bool(aside) is long
    assert product({"n": 8}).executable._long is None


def test_the_thread_of_a_caller_that_gets_no_signals_runs_it_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(executable, "AsideRun", None)
    f = product().set_param("w", np.eye(2048, dtype=np.float32))
    x, found = np.ones((256, 2048), np.float32), []
    thread = threading.Thread(target=lambda: found.append(f.run(x=x)[0]))
    thread.start()
    thread.join()
    np.testing.assert_array_equal(found[0], x)


def test_profiles_are_taken_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    f = product().set_param("w", np.eye(2048, dtype=np.float32))
    x = np.ones((256, 2048), np.float32)
    f.run(x=x)
    monkeypatch.setattr(executable, "AsideRun", None)
    with f.recording() as recording:
        f.run(x=x)
    assert recording.profile().seconds > 0


def test_errors_come_back() -> None:
    def fail() -> None:
        raise KeyError("there")

    run = AsideRun(fail)
    with pytest.raises(KeyError, match="there"):
        run.run()
    run.wait()


def test_a_run_that_never_began_never_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupted before its thread started: whoever waits for it takes it over."""
    started: list[object] = []
    monkeypatch.setattr(interruptible._thread, "start_new_thread", lambda *_: 1 / 0)
    run = AsideRun(lambda: started.append(1))
    with pytest.raises(ZeroDivisionError):
        run.run()
    run.wait()
    run._work()
    assert not started and not run.done


def test_what_counts_as_long() -> None:
    n = sym("n")
    check = long_check([(n * 1000, 8), (4, n * n)], ["n"])
    assert [check(k) for k in (1, 15_811, 15_812, LONG_FLOPS // 1000 + 1)] == [
        False, False, True, True,
    ]  # fmt: skip
