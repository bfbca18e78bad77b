"""Derivatives of control flow, of wrappers, and of ops over drawn shapes, in f64.

The oracles are those of test_derivatives_of_ops.py: differences for forward mode, forward mode for
reverse mode, and both for the pullback.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parent))
from derivative_checks import check, check_forward, check_second, pulled_back, tangents_of

from rlx.errors import UnsupportedError
from rlx.ir.attrs import Body
from rlx.ir.dtype import DType
from rlx.ir.graph import Graph
from rlx.ir.interp import evaluate
from rlx.ir.ops.control import make_body
from rlx.ir.shape import Shape
from rlx.passes.grad import vjp_graph

Array = Any


def body(build: Callable[..., Any], *shapes: str) -> Body:
    return Body(make_body(build, *[Shape(*_parsed(s)) for s in shapes]))


def graph_of(build: Callable[..., Any], **shapes: str) -> Graph:
    g = Graph("test")
    found = build(g, *[g.input(k, *_parsed(s)) for k, s in shapes.items()])
    return g.set_outputs(*(found if isinstance(found, (tuple, list)) else [found]))


def _parsed(text: str) -> tuple[tuple[int, ...], DType]:
    dims, _, kind = text.partition("]")
    return tuple(int(d) for d in dims.strip("[").split(",") if d.strip()), DType.of(kind.strip())


def data_of(graph: Graph, seed: int = 0) -> dict[str, Array]:
    rng, data = np.random.default_rng(seed), {}
    for node in graph.sources("input"):
        shape = node.output.shape
        dims = shape.static_dims
        if shape.dtype.is_float:
            data[node.name] = rng.normal(size=dims).astype(shape.dtype.numpy)
        else:
            data[node.name] = rng.integers(0, 2, dims).astype(shape.dtype.numpy)
    return data


def both(graph: Graph, seed: int = 0, near: float = 1e-8) -> None:
    """First and second derivatives, by all float inputs and by each of them alone."""
    data = data_of(graph, seed)
    wrt = [k for k, v in data.items() if v.dtype.kind == "f"]
    check(graph, data, wrt, near)
    for name in wrt if len(wrt) > 1 else ():
        check(graph, data, [name], near)
    check_second(graph, data, wrt, near)


# -- cond -----------------------------------------------------------------------------------------


def branches(g: Graph, flag: Any, x: Any, y: Any, count: Any) -> Any:
    """The first branch does not use y, the second not x; a result of integers; one of neither."""
    shapes = ("[3] f64", "[3] f64", "[] i32")

    def then(g: Graph, x: Any, y: Any, count: Any) -> Any:
        return g.sin(x) * x, g.add(count, 1), g.constant(np.ones(2))

    def otherwise(g: Graph, x: Any, y: Any, count: Any) -> Any:
        return y * y, count, g.narrow(y, axis=0, start=1, length=2)

    return g.cond(flag, x, y, count, then=body(then, *shapes), otherwise=body(otherwise, *shapes))


@pytest.mark.parametrize("flag", [True, False])
def test_cond(flag: bool) -> None:
    graph = graph_of(branches, flag="[] bool", x="[3] f64", y="[3] f64", count="[] i32")
    data = {**data_of(graph), "flag": np.array(flag)}
    check(graph, data, ["x", "y"])
    check(graph, data, ["y"])
    check_second(graph, data, ["x", "y"])


# -- scan -----------------------------------------------------------------------------------------


def recurrence(length: int, reverse: bool) -> Graph:
    """A float and an integer carried, floats and integers scanned, a matrix and a flag fixed; the
    third carry stays as it is."""

    def step(g: Graph, h: Any, n: Any, same: Any, x: Any, at: Any, w: Any, flag: Any) -> Any:
        moved = g.tanh(g.add(g.matmul(w, h), g.mul(x, same)))
        h = g.where(flag, moved, g.gather(moved, g.reshape(at, shape=(1,)), axis=0))
        return h, g.add(n, 1), same, g.mul(h, x), n

    shapes = ("[2] f64", "[] i32", "[2] f64", "[2] f64", "[] i32", "[2, 2] f64", "[] bool")
    return graph_of(
        lambda g, *values: g.scan(
            *values, body=body(step, *shapes), n_carry=3, n_xs=2, reverse=reverse
        ),
        h="[2] f64", n="[] i32", same="[2] f64", x=f"[{length}, 2] f64", at=f"[{length}] i32",
        w="[2, 2] f64", flag="[] bool",
    )  # fmt: skip


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("length", [0, 1, 4])
def test_scan(length: int, reverse: bool) -> None:
    both(recurrence(length, reverse))


def test_scan_without_carry_and_with_a_length_alone() -> None:
    square = body(lambda g, x, w: g.mul(g.sin(x), w), "[2] f64", "[2] f64")
    both(graph_of(
        lambda g, x, w: g.scan(x, w, body=square, n_carry=0, n_xs=1), x="[3, 2] f64", w="[2] f64"
    ))  # fmt: skip
    grown = body(lambda g, h, w: g.mul(g.cos(h), w), "[2] f64", "[2] f64")
    both(graph_of(
        lambda g, h, w: g.scan(h, w, body=grown, n_carry=1, n_xs=0, length=3),
        h="[2] f64", w="[2] f64",
    ))  # fmt: skip


def test_loops_in_loops() -> None:
    inner = body(lambda g, h, x: (g.mul(g.sin(h), x), h), "[2] f64", "[2] f64")

    def row(g: Graph, h: Any, xs: Any) -> Any:
        last, seen = g.scan(h, xs, body=inner, n_carry=1, n_xs=1)
        positive = g.lt(g.constant(0.0, "f64"), g.sum(last))
        return g.cond(
            positive, last, h, then=body(lambda g, a, b: g.mul(a, b), "[2] f64", "[2] f64"),
            otherwise=body(lambda g, a, b: g.sub(b, a), "[2] f64", "[2] f64"),
        ), g.sum(seen)  # fmt: skip

    outer = body(row, "[2] f64", "[3, 2] f64")
    graph = graph_of(
        lambda g, h, x: g.scan(h, x, body=outer, n_carry=1, n_xs=1), h="[2] f64", x="[4, 3, 2] f64"
    )
    for seed in range(3):
        both(graph, seed)


def power_loop() -> Graph:
    """x multiplied by y until it is over 9, at most 40 times, counting."""
    shapes = ("[] f64", "[] i32", "[] f64")

    def step(g: Graph, x: Any, n: Any, y: Any) -> Any:
        return g.mul(x, y), g.add(n, 1)

    return graph_of(
        lambda g, *values: g.while_loop(
            *values, condition=body(lambda g, x, n, y: g.lt(x, 9.0), *shapes),
            body=body(step, *shapes), n_carry=2, max_iterations=40,
        ),
        x="[] f64", n="[] i32", y="[] f64",
    )  # fmt: skip


def test_while_loop_is_differentiated_forward_alone() -> None:
    graph, data = power_loop(), {"x": np.array(1.3), "n": np.array(0, "i4"), "y": np.array(1.7)}
    for wrt in (["x", "y"], ["x"], ["y"]):
        check_forward(graph, data, wrt)
    with pytest.raises(UnsupportedError, match=r"\[while_loop\] a while_loop has no reverse-mode"):
        vjp_graph(graph, ["x"])


# -- wrappers -------------------------------------------------------------------------------------


def net(g: Graph, x: Any, w: Any) -> Any:
    return g.tanh(g.matmul(g.tanh(g.matmul(x, w)), w)), g.sum(x)


@pytest.mark.parametrize("policy", ["nothing", "matmuls"])
def test_checkpoint(policy: str) -> None:
    twice = body(net, "[4, 3] f64", "[3, 3] f64")
    both(graph_of(
        lambda g, x, w: g.checkpoint(x, w, body=twice, policy=policy),
        x="[4, 3] f64", w="[3, 3] f64",
    ))  # fmt: skip


def test_custom_jvp_is_its_rule_in_both_modes() -> None:
    rule = body(
        lambda g, x, n, t: g.mul(g.exp(x), t), "[3] f64", "[] i32", "[3] f64"
    )  # true: the function is exp
    exp = body(lambda g, x, n: (g.exp(x), n), "[3] f64", "[] i32")
    graph = graph_of(
        lambda g, x, n: g.custom_jvp(g.sin(x), n, body=exp, rule=rule), x="[3] f64", n="[] i32"
    )
    both(graph)
    wrong = body(lambda g, x, n, t: g.mul(t, 5.0), "[3] f64", "[] i32", "[3] f64")
    graph = graph_of(
        lambda g, x, n: g.custom_jvp(x, n, body=exp, rule=wrong), x="[3] f64", n="[] i32"
    )
    data = data_of(graph)
    assert np.allclose(tangents_of(graph, data, {"x": np.ones(3)})[0], 5)
    assert np.allclose(pulled_back(graph, data, ["x"], {"output_0": np.ones(3)})["x"], 5)


def test_stop_gradient_and_barriers() -> None:
    graph = graph_of(
        lambda g, x: g.mul(g.stop_gradient(x), g.optimization_barrier(g.sin(x), x)[0]), x="[3] f64"
    )
    data = data_of(graph)
    found = pulled_back(graph, data, ["x"], {"output_0": np.ones(3)})["x"]
    assert np.allclose(found, data["x"] * np.cos(data["x"]))
    assert np.allclose(tangents_of(graph, data, {"x": np.ones(3)})[0], found)


# -- drawn shapes ---------------------------------------------------------------------------------

DIM = st.integers(0, 3)
MORE = pytest.param(200, marks=pytest.mark.nightly)


def drawn(test: Callable[..., None]) -> Callable[..., None]:
    """The test with data of hypothesis: a few by default, more at night."""

    @pytest.mark.parametrize("count", [10, MORE])
    def run(count: int) -> None:
        quiet = settings(max_examples=count, deadline=None, suppress_health_check=list(HealthCheck))
        quiet(given(st.data())(test))()

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


def shape(*dims: int, kind: str = "f64") -> str:
    return f"[{', '.join(map(str, dims))}] {kind}"


@drawn
def test_broadcasting(data: Any) -> None:
    """Either operand may be shorter, and have axes of size 1 or 0."""
    dims = data.draw(st.lists(DIM, max_size=3))

    def part() -> list[int]:
        kept = dims[data.draw(st.integers(0, len(dims))) :]
        return [1 if data.draw(st.booleans()) else d for d in kept]

    name = data.draw(st.sampled_from(["add", "sub", "mul", "maximum", "atan2", "hypot"]))
    both(graph_of(lambda g, x, y: getattr(g, name)(x, y), x=shape(*part()), y=shape(*part())))
    three = shape(*part()), shape(*part())
    both(graph_of(
        lambda g, x, y: g.where(g.lt(x, 0.1), g.mul(x, y), y), x=three[0], y=three[1]
    ))  # fmt: skip
    wide = [d if d != 1 else 2 for d in part()]
    both(graph_of(
        lambda g, x: g.expand(x, shape=(2, *wide)), x=shape(*[1 if data.draw(st.booleans()) else d
                                                             for d in wide])
    ))  # fmt: skip


@drawn
def test_reductions(data: Any) -> None:
    dims = data.draw(st.lists(DIM, min_size=1, max_size=3))
    axis = tuple(data.draw(st.sets(st.integers(0, len(dims) - 1))))
    keep = data.draw(st.booleans())
    name = data.draw(st.sampled_from(["sum", "prod", "mean", "max", "min"]))
    if name in ("max", "min", "mean") and any(dims[i] == 0 for i in axis or range(len(dims))):
        dims = [d or 1 for d in dims]  # of nothing there is none
    both(graph_of(lambda g, x: getattr(g, name)(x, axis=axis, keepdims=keep), x=shape(*dims)))
    along = data.draw(st.integers(-len(dims), len(dims) - 1))
    scans = ["cumsum", "cumprod", "softmax", "log_softmax", "sort", "flip"]
    name = data.draw(st.sampled_from(scans))
    if name.endswith("softmax"):
        dims = [d or 1 for d in dims]
    both(graph_of(lambda g, x: getattr(g, name)(x, axis=along), x=shape(*dims)))


@drawn
def test_products(data: Any) -> None:
    m, k, n, b = (data.draw(DIM) for _ in range(4))
    lead = [[], [b], [1], [2, b]]
    left, right = (data.draw(st.sampled_from(lead)) for _ in range(2))
    a = data.draw(st.sampled_from([[k], [m, k], [*left, m, k]]))
    c = data.draw(st.sampled_from([[k], [k, n], [*right, k, n]]))
    both(graph_of(lambda g, x, y: g.matmul(x, y), x=shape(*a), y=shape(*c)))
    both(graph_of(
        lambda g, x, y: g.dot_general(
            x, y, lhs_contract=(1,), rhs_contract=(0,), lhs_batch=(2,), rhs_batch=(1,)
        ),
        x=shape(m, k, b), y=shape(k, b, n),
    ))  # fmt: skip


@drawn
def test_slices_pads_and_concatenation(data: Any) -> None:
    n, m = data.draw(DIM), data.draw(DIM)
    low, high = data.draw(DIM), data.draw(DIM)
    both(graph_of(
        lambda g, x, y: g.concat([x, y, x], axis=1), x=shape(m, n), y=shape(m, high)
    ))  # fmt: skip
    both(graph_of(lambda g, x: g.pad(x, low=(low, 0), high=(1, high)), x=shape(n, m)))
    step = data.draw(st.sampled_from([1, 2, -1, -2]))
    first = data.draw(st.integers(0, 3))
    last = data.draw(st.integers(first, 4))
    start, stop = (first, last) if step > 0 else (last - 1, first - 1 if first else None)
    if start < 0:  # backwards, and nothing
        start, stop = 0, 0
    both(graph_of(
        lambda g, x: g.slice(x, starts=(None, start), stops=(None, stop), steps=(1, step)),
        x=shape(m, 4),
    ))  # fmt: skip
    if n > 1:
        mode = data.draw(st.sampled_from(["reflect", "edge"]))
        both(graph_of(
            lambda g, x: g.pad(x, low=(0, min(low, n - 1)), high=(0, n - 1), mode=mode),
            x=shape(m, n),
        ))  # fmt: skip


@drawn
def test_reads_and_writes(data: Any) -> None:
    """Rows that are read or written twice, or never; no rows at all."""
    n, m, count = data.draw(st.integers(1, 3)), data.draw(DIM), data.draw(DIM)
    rows = data.draw(st.lists(st.integers(-n, n - 1), min_size=count, max_size=count))
    at = np.array(rows, np.int64)
    axis = data.draw(st.integers(0, 1))
    dims = [m, m]
    dims[axis] = n
    both(graph_of(lambda g, x: g.gather(x, g.constant(at), axis=axis), x=shape(*dims)))
    part = [m, m]
    part[axis] = count
    for name in ("scatter", "scatter_add"):
        both(graph_of(
            lambda g, x, y, name=name: getattr(g, name)(x, g.constant(at), y, axis=axis),
            x=shape(*dims), y=shape(*part),
        ))  # fmt: skip
    index = np.array(rows, np.int64).reshape((1, count) if axis else (count, 1))
    both(graph_of(lambda g, x: g.take_along(x, g.constant(index), axis=axis), x=shape(*dims)))


@drawn
def test_convolutions_and_pools(data: Any) -> None:
    batch, groups = data.draw(st.integers(0, 2)), data.draw(st.integers(1, 2))
    kernel, stride, dilation = (data.draw(st.integers(1, 2)) for _ in range(3))
    pad, size = data.draw(st.integers(0, 1)), data.draw(st.integers(3, 5))
    options = {
        "stride": (stride,), "dilation": (dilation,), "groups": groups, "padding": (pad,),
    }  # fmt: skip
    both(graph_of(
        lambda g, x, w, b: g.conv(x, w, b, **options),
        x=shape(batch, 2 * groups, size), w=shape(3 * groups, 2, kernel), b=shape(3 * groups),
    ))  # fmt: skip
    both(graph_of(
        lambda g, x, w: g.conv_transpose(x, w, **options),
        x=shape(batch, 2 * groups, size), w=shape(2 * groups, 3, kernel + 1),
    ))  # fmt: skip
    for name in ("max_pool", "avg_pool"):
        both(graph_of(
            lambda g, x, name=name: getattr(g, name)(
                x, kernel=(kernel + 1,), stride=(stride,), padding=(pad,)
            ),
            x=shape(batch, 2, size),
        ))  # fmt: skip


def test_the_oracles_see_a_wrong_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    from rlx.passes.grad import rules

    rules.load_rules()
    graph = graph_of(lambda g, x: g.tanh(x), x="[3] f64")
    data = data_of(graph)

    def doubled(op: Any, g: Graph, inputs: Any, outputs: Any, grads: Any) -> Any:
        return [g.mul(grads[0], 2.0)]

    monkeypatch.setitem(rules.VJP, "tanh", doubled)
    with pytest.raises(AssertionError):
        check(graph, data, ["x"])
    monkeypatch.setitem(rules.JVP, "tanh", doubled)
    with pytest.raises(AssertionError):
        check_forward(graph, data, ["x"])
    assert len(evaluate(graph, data)) == 1
