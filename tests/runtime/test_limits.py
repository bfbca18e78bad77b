"""Sizes beyond memory, nesting beyond recursion and wrong types: an error of ours, before anything
is allocated."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rlx import Graph, GraphModule, Session, UpTo
from rlx.backends import buffer
from rlx.backends.buffer import HOST
from rlx.errors import (
    AttributeValueError,
    BindingError,
    InputError,
    OutOfMemoryError,
    RlxError,
    ShapeError,
)
from rlx.ir.attrs import MAX_NESTING
from rlx.ir.ops.control import make_body
from rlx.ir.serial import from_bytes, to_bytes

DEVICES = ["cpu", "reference"]
ONE = np.ones(1, np.float32)
Build = Callable[[Any], Any]


def compiled(device: str, build: Build, **options: Any) -> Any:
    return Session(device).compile(GraphModule.define("g", build), **options)


def from_one(build: Callable[[Any, Any], Any]) -> Build:
    """A graph of one input with one element."""
    return lambda g: build(g, g.input("x", [1]))


LARGE: dict[str, Build] = {
    "result": from_one(lambda g, x: g.exp(g.expand(x, shape=[2**40]))),
    "state": from_one(lambda g, x: g.sum(g.state("s", [2**40])) + x),
    "iota": from_one(lambda g, x: x + g.iota([2**40], axis=0)),
    "pad": from_one(lambda g, x: g.pad(x, low=(0,), high=(2**40,))),
}
VAST: dict[str, Build] = {
    "input": lambda g: g.sum(g.input("x", [2**62, 2**62])),
    "param": lambda g: g.exp(g.param("w", [2**62, 2**62])),
    "state": from_one(lambda g, x: g.sum(g.state("s", [2**62, 2**62])) + x),
    "result": from_one(lambda g, x: g.exp(g.expand(x, shape=[2**62, 2**62]))),
    "iota": lambda g: g.iota([2**62], axis=0),
    "pad": from_one(lambda g, x: g.pad(x, low=(0,), high=(2**62,))),
    "product": lambda g: g.matmul(g.input("x", [2**33, 1]), g.input("y", [1, 2**33])),
    "empty": lambda g: g.exp(g.input("x", [0, 2**62, 2**62])),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", LARGE)
def test_more_than_the_machine_has(device: str, case: str) -> None:
    with pytest.raises(OutOfMemoryError, match=r"bytes, which this machine has"):
        compiled(device, LARGE[case]).run(x=ONE)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", VAST)
def test_more_than_can_be_addressed(device: str, case: str) -> None:
    with pytest.raises(ShapeError, match=r"more bytes than can be addressed.* 2\^63"):
        compiled(device, VAST[case])


@pytest.mark.parametrize("device", DEVICES)
def test_bounds_of_dynamic_dimensions(device: str) -> None:
    def sums(g: Any) -> Any:
        return g.sum(g.exp(g.input("x", ["n", "m"])))

    with pytest.raises(OutOfMemoryError, match="which this machine has"):
        compiled(device, sums, binding={"n": UpTo(2**20), "m": UpTo(2**20)}).run(x=ONE[None])
    with pytest.raises(
        OutOfMemoryError, match=r"\[input\] more memory than can be addressed.*up to"
    ):
        compiled(device, sums, binding={"n": UpTo(2**62), "m": UpTo(2**62)}).run(x=ONE[None])
    with pytest.raises(BindingError, match=r"\[n\] an upper bound"):
        compiled(device, sums, binding={"n": UpTo(2**70), "m": UpTo(1)})
    with pytest.raises(BindingError, match=r"\[n\] a size is a non-negative int"):
        compiled(device, sums, binding={"n": 2**70, "m": 1})


def test_memory_is_asked_for_only_if_there_is_any(monkeypatch: pytest.MonkeyPatch) -> None:
    """Overcommitting systems grant more than they have, and kill who uses it."""
    monkeypatch.setattr(buffer, "total_memory", lambda: 2 << 30)
    monkeypatch.setattr(buffer.np, "zeros", lambda *_: pytest.fail("allocated"))
    monkeypatch.setattr(buffer, "map_pages", lambda _: pytest.fail("allocated"))
    for allocate in (lambda: HOST.alloc((3, 1 << 30), np.uint8), lambda: HOST.alloc_arena(3 << 30)):
        with pytest.raises(
            OutOfMemoryError, match="at most 2,147,483,648 bytes, which this machine"
        ):
            allocate()


def test_large_buffers_that_fit_are_allocated() -> None:
    assert HOST.alloc_arena(buffer._VAST).nbytes == buffer._VAST  # zero pages, none is touched


# -- nesting --------------------------------------------------------------------------------------


def negated() -> Graph:
    return make_body(lambda g, x: g.neg(x), ["n"])


def nested(depth: int, otherwise: Callable[[Graph], Graph]) -> Graph:
    """Branches in branches; the innermost is exp. `otherwise` makes the other branch."""
    body = make_body(lambda g, x: g.exp(x), ["n"])
    for _ in range(depth - 1):
        body = make_body(_branches(body, otherwise(body)), ["n"])
    graph = Graph("outer")
    return graph.set_outputs(_branches(body, otherwise(body))(graph, graph.input("x", ["n"])))


def _branches(then: Graph, otherwise: Graph) -> Callable[[Any, Any], Any]:
    return lambda g, x: g.cond(g.constant(np.bool_(True)), x, then=then, otherwise=otherwise)


def test_400_nested_bodies_are_refused() -> None:
    with pytest.raises(AttributeValueError, match="graphs nested too deep; got 25 levels"):
        nested(400, lambda body: negated())


def test_shared_bodies_do_not_explode() -> None:
    """Each level runs the one below twice: 2^400 nodes in 400 graphs."""
    with pytest.raises(AttributeValueError, match=r"graphs nested too deep.* nodes"):
        nested(400, lambda body: body)


def test_the_deepest_nesting_compiles_and_can_be_stored() -> None:
    graph = nested(MAX_NESTING, lambda body: negated())
    assert from_bytes(to_bytes(graph)).same_as(graph)
    (y,) = Session("cpu").compile(graph).run(x=np.zeros(3, np.float32))
    assert y.tolist() == [1, 1, 1]


# -- k > n ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("binding", [None, {"n": 4}, {"n": UpTo(20)}], ids=str)
def test_top_k_of_fewer_elements(device: str, binding: Any) -> None:
    def best(g: Any) -> Any:
        return g.top_k(g.input("x", ["n"]), k=9)

    with pytest.raises((BindingError, ShapeError), match=r"\[top_k\] fewer elements than k"):
        compiled(device, best, binding=binding).run(x=np.ones(4, np.float32))


def test_top_k_of_just_enough_elements() -> None:
    f = compiled("cpu", lambda g: g.top_k(g.input("x", ["n"]), k=3), binding={"n": UpTo(9)})
    values, indices = f.run(x=np.array([1, 3, 2], np.float32))
    assert values.tolist() == [3, 2, 1] and indices.tolist() == [1, 2, 0]


# -- wrong types ----------------------------------------------------------------------------------

NO_NUMBERS = ["hi", None, [1, "x"], [[1], [1, 2]], object(), b"abc", {"a": 1}, 1j, [None]]


@pytest.mark.parametrize("value", NO_NUMBERS, ids=lambda v: type(v).__name__)
def test_run_takes_numbers(value: object) -> None:
    f = compiled("cpu", lambda g: g.exp(g.input("x", ["n"])) + g.param("w", [1]))
    with pytest.raises(InputError):
        f.run(x=value)
    with pytest.raises(InputError, match=r"\[w\]"):
        f.set_params({"w": value})


def test_numbers_in_lists_lose_nothing() -> None:
    f = compiled("cpu", lambda g: g.neg(g.input("x", ["n"], dtype="i32")))
    assert f([1, True])[0] == -1
    for wrong in ([1.5], [2**40], [1j]):
        with pytest.raises(InputError, match="not an array of numbers"):
            f(wrong)


@pytest.mark.parametrize("sizes", [[3], 3, {"n": [1]}, {"n": "a"}, {"n": 1.5}, {3: "a", "n": 1}])
def test_sizes_are_a_mapping_of_ints(sizes: Any) -> None:
    f = compiled("cpu", lambda g: g.input("x", [1]) + g.iota(["n"], axis=0))
    with pytest.raises(BindingError):
        f.run(x=ONE, sizes=sizes)


@pytest.mark.parametrize(
    "call",
    [
        lambda: GraphModule.define("g", None),  # type: ignore[arg-type]
        lambda: GraphModule.define(3, lambda g: g.input("x", [1])),  # type: ignore[arg-type]
        lambda: compiled("cpu", lambda g: g.exp(g.input("x", ["n"])), binding={3: 3}),
    ],
    ids=["no function", "no name", "no symbol"],
)
def test_builders_and_bindings(call: Callable[[], object]) -> None:
    with pytest.raises(RlxError):
        call()


def test_a_refusal_takes_no_time() -> None:
    start = time.perf_counter()
    with pytest.raises(AttributeValueError):
        nested(100_000, lambda body: body)
    assert time.perf_counter() - start < 1
