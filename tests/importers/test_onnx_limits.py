"""Limits of an ONNX model: loops without an end, tensors too large, files that ask for too much."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import helper
from onnx_models import model, network, value

import rlx
from rlx.onnx import OnnxModel
from rlx.onnx.table import op

node = helper.make_node
TESTS = Path(__file__).parent


def looping(last: Any, trips: str = "", body: Any = None, **constants: Any) -> bytes:
    """x doubles in each iteration of a loop; `last` computes the condition d."""
    nodes = [*(body or [node("Add", ["v", "v"], ["w"])]), last]
    graph = helper.make_graph(
        nodes, "body", [value("i", [], np.int64), value("c", [], np.bool_), value("v", ["n"])],
        [value("d", [], np.bool_), value("w", None)],
    )  # fmt: skip
    loop = node("Loop", [trips, "yes", "x"], ["y"], body=graph)
    given = {"yes": np.array(True), "many": np.array(10**12), **constants}
    proto = model([loop], [value("x", ["n"])], [value("y", None)], given)
    return bytes(proto.SerializeToString())


SAME, YES = node("Identity", ["c"], ["d"]), node("Identity", ["yes"], ["d"])
EARLY = node("Less", ["i", "end"], ["d"])
# a body whose shape changes runs in Python
GROWS = [node("Concat", ["v", "v"], ["t"], axis=0), node("Slice", ["t", "from", "to"], ["w"])]


@pytest.mark.parametrize("trips", ["", "many"])
@pytest.mark.parametrize("last", [SAME, YES])
def test_a_loop_that_does_not_end(last: Any, trips: str) -> None:
    net = OnnxModel(looping(last, trips), max_iterations=1000)
    for _ in range(2):
        with pytest.raises(rlx.RlxError, match="does not end"):
            net.run(x=np.ones(3, "f4"))


def test_a_loop_in_python_that_does_not_end() -> None:
    bounds = {"from": np.array([0]), "to": np.array([4])}
    net = OnnxModel(looping(YES, body=GROWS, **bounds), max_iterations=20)
    with pytest.raises(rlx.FormatError, match=r"does not end.*at most 20 iterations"):
        net.run(x=np.ones(3, "f4"))
    assert net.program.on_host


@pytest.mark.parametrize("end", [0, 5, 8])
def test_a_loop_may_have_all_its_iterations(end: int) -> None:
    data = looping(EARLY, "many", end=np.array(end))
    x = np.arange(3, dtype="f4")
    for limit in (end + 1, 10**6):
        assert np.array_equal(OnnxModel(data, max_iterations=limit)(x), x * 2.0 ** (end + 1))
    if end:
        with pytest.raises(rlx.RlxError, match="does not end"):
            OnnxModel(data, max_iterations=end)(x)


def test_ctrl_c_ends_a_loop() -> None:
    code = f"""
        import sys
        sys.path.insert(0, {str(TESTS)!r})
        import numpy as np
        from test_onnx_limits import YES, looping
        from rlx.onnx import OnnxModel
        net = OnnxModel(looping(YES), max_iterations=2**40)
        print("runs", flush=True)
        try:
            net.run(x=np.ones(3, "f4"))
        except KeyboardInterrupt:
            print("interrupted")
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, cwd=TESTS.parents[1], env=os.environ
    ) as child:
        assert child.stdout is not None and child.stdout.readline() == "runs\n"
        time.sleep(1.0)  # into the loop; before it, Ctrl-C is Python's own
        child.send_signal(signal.SIGINT)
        assert child.stdout.readline() == "interrupted\n"


def padded(*pads: int) -> bytes:
    """Pad by constants, between two operators that are compiled."""
    nodes = [
        node("Softmax", ["x"], ["q"]), node("Pad", ["q", "pads"], ["z"]), node("Abs", ["z"], ["y"])
    ]  # fmt: skip
    constants = {"pads": np.array(pads)}
    proto = model(nodes, [value("x", ["n", 4])], [value("y", None)], constants)
    return bytes(proto.SerializeToString())


@pytest.mark.parametrize("pads", [(0, 67_108_865, 0, 1), (0, 2**40, 0, 0), (2**62, 0, 2**62, 0)])
def test_memory_has_a_limit(pads: tuple[int, ...]) -> None:
    net = OnnxModel(padded(*pads), max_bytes=64 << 20)
    with pytest.raises(rlx.RlxError):
        net.run(x=np.ones((2, 4), "f4"))


def test_tensors_below_the_limit() -> None:
    net = OnnxModel(padded(0, 1, 0, 1 << 20), max_bytes=64 << 20)
    (y,) = net.run(x=np.ones((2, 4), "f4"))
    assert y.shape == (2, 5 + (1 << 20)) and y.sum() == 2
    with pytest.raises(rlx.OutOfMemoryError, match="which is the limit here"):
        net.run(x=np.ones((20, 4), "f4"))
    assert net.run(x=np.ones((2, 4), "f4"))[0].sum() == 2


def test_what_is_taken_away_must_be_there() -> None:
    with pytest.raises(rlx.FormatError, match="more than there is"):
        OnnxModel(padded(0, -(2**32), 0, 2**32)).run(x=np.ones((2, 4), "f4"))


@pytest.mark.parametrize("count", [3, 2**20, 2**31])
def test_parts_are_as_many_as_outputs(count: int) -> None:
    split = node("Split", ["x"], ["a", "b"], num_outputs=count)
    proto = model([split], [value("x", ["n"])], [value("a", None), value("b", None)])
    with pytest.raises(rlx.FormatError, match="not the number of parts"):
        OnnxModel(proto.SerializeToString()).run(x=np.ones(12, "f4"))


def test_names_that_are_no_text() -> None:
    data = network().SerializeToString().replace(b"/stem/Conv", b"/stem/\xff\xfeon")
    net = OnnxModel(data)
    (y,) = net.run(x=np.ones((1, 3, 4, 4), "f4"))
    assert y.shape == (1, 5) and r"stem.xff.xfeon" in net.inspect(batch=1, height=4, width=4)


def test_options_are_limits() -> None:
    for options in ({"max_iterations": 0}, {"max_bytes": -1}):
        with pytest.raises(rlx.OptionError, match="not a limit"):
            OnnxModel(looping(SAME), **options)  # type: ignore[arg-type]


def test_models_do_not_wait_for_each_other() -> None:
    """While one runs something on the host, another runs in another thread."""
    inside, made = threading.Event(), list[Any]()
    fast = OnnxModel(padded(0, 1, 0, 1))

    def other() -> None:
        made.append(fast.run(x=np.ones((2, 4), "f4")))
        inside.set()

    @op("Waits", domain="com.example.limits", on_host=True)
    def waits(node: Any, x: Any) -> Any:
        thread = threading.Thread(target=other)
        thread.start()
        assert inside.wait(timeout=60)
        thread.join()
        return x

    waiting = node("Waits", ["x"], ["y"], domain="com.example.limits")
    proto = model(
        [waiting], [value("x", ["n"])], [value("y", None)], domains=["com.example.limits"]
    )
    assert OnnxModel(proto.SerializeToString())(np.ones(3, "f4")).sum() == 3
    assert made[0][0].shape == (2, 6)


def test_models_of_threads() -> None:
    """Eight models, each traced and run for several sizes in a thread of its own."""
    found: dict[int, list[Any]] = {}

    def work(number: int) -> None:
        net = OnnxModel(padded(0, number, 0, 1))
        found[number] = [net(np.ones((n, 4), "f4")).shape for n in (1, 2, 5)]

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {n: [(b, 5 + n) for b in (1, 2, 5)] for n in range(8)}
