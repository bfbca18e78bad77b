"""Checks of recurrent layers, loops, experts and packed types at sizes that the parity table does
not have: `run_on_gpu.py` runs them, and the stand-in passes them too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from checks_on_gpu import backend, compiled, graph_of, random, require_error

import rlx
from rlx.ir.dtype import DType
from rlx.ir.graph import Graph
from rlx.ir.interp import evaluate
from rlx.ir.ops.control import make_body
from rlx.ir.quant.scheme import GGUF_SCHEMES, encode
from rlx.ir.shape import Shape

LAYERS: dict[str, Callable[[], None]] = {}


def layer(function: Callable[[], None]) -> Callable[[], None]:
    LAYERS[function.__name__.replace("_", " ")] = function
    return function


def on_device(made: Any) -> None:
    """Nothing of the program is done by the host."""
    report = made.template.result.dispatch_report
    assert not [x for x in report.rows if x.outcome == "host"], str(report)
    assert not any(x.on_host for x in made.executable.program.launches)


def require_close(got: Any, want: Any, most: float) -> None:
    """The error of all, by norms."""
    a, b = (np.asarray(v, np.float64) for v in (got, want))
    assert a.shape == b.shape, (a.shape, b.shape)
    off = np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-30)
    assert off <= most, off


# -- recurrent layers ------------------------------------------------------------------------------


def delta_net(heads: int, size: int, tokens: tuple[int, ...]) -> None:
    """A state is carried from run to run, in place; 2⁻¹⁸ is a few dozen roundings of it."""

    def build(g: Graph) -> Any:
        four = [1, "n", heads, size]
        q, k, v = (g.input(name, four) for name in "qkv")
        gate, beta = (g.input(name, [1, "n", heads]) for name in ("g", "b"))
        state = g.state("s", [1, heads, size, size])
        o, last = g.gated_delta_net(q, k, v, gate, beta, state, state_size=size)
        g.state_update(state, last)
        return o

    def plain(g: Graph) -> Any:
        four = [1, "n", heads, size]
        given = [g.input(name, four) for name in "qkv"]
        given += [g.input(name, [1, "n", heads]) for name in ("g", "b")]
        return g.gated_delta_net(*given, g.input("s", [1, heads, size, size]), state_size=size)

    made = compiled(graph_of(build), binding={"n": rlx.UpTo(max(tokens))})
    oracle, state = graph_of(plain), np.zeros((1, heads, size, size), np.float32)
    for number, n in enumerate(tokens):
        data = {name: random(1, n, heads, size, seed=i) for i, name in enumerate("qkv")}
        data["k"] /= np.linalg.norm(data["k"], axis=-1, keepdims=True)
        data["g"] = -np.abs(random(1, n, heads, seed=number))
        data["b"] = 1 / (1 + np.exp(-random(1, n, heads, seed=number + 9)))
        want, state = evaluate(oracle, {**data, "s": state}, {"n": n})
        [got] = made.run(data)
        require_close(got, want, 2**-18)
        require_close(made.read_state("s"), state, 2**-18)
    on_device(made)
    assert len(made.executable.program.launches) == 1  # the state is written where it lies


LAYERS["gated delta net of 128"] = lambda: delta_net(2, 128, (1, 9, 1, 1))
LAYERS["gated delta net of ragged heads"] = lambda: delta_net(3, 37, (5, 1, 1))


def selective_scan(width: int, size: int, tokens: tuple[int, ...]) -> None:
    names = {"u": (width,), "d": (width,), "b": (size,), "c": (size,)}

    def build(g: Graph) -> Any:
        u, d, b, c = (g.input(n, [2, "n", *dims]) for n, dims in names.items())
        a, skip = g.param("a", [width, size]), g.param("skip", [width])
        state = g.state("s", [2, width, size])
        y, last = g.selective_scan(u, d, a, b, c, skip, state, has_d=True, has_state=True)
        g.state_update(state, last)
        return y

    def plain(g: Graph) -> Any:
        u, d, b, c = (g.input(n, [2, "n", *dims]) for n, dims in names.items())
        given = (u, d, g.input("a", [width, size]), b, c, g.input("skip", [width]))
        return g.selective_scan(*given, g.input("s", [2, width, size]), has_d=True, has_state=True)

    made = compiled(graph_of(build), binding={"n": rlx.UpTo(max(tokens))})
    params = {"a": -np.abs(random(width, size)), "skip": random(width, seed=1)}
    made.set_params(params)
    oracle, state = graph_of(plain), np.zeros((2, width, size), np.float32)
    for number, n in enumerate(tokens):
        data = {
            name: random(2, n, *dims, seed=7 * number + i)
            for i, (name, dims) in enumerate(names.items())
        }
        data["d"] = np.abs(data["d"])
        want, state = evaluate(oracle, {**data, **params, "s": state}, {"n": n})
        [got] = made.run(data)
        require_close(got, want, 2**-19)
        require_close(made.read_state("s"), state, 2**-19)
    on_device(made)
    assert len(made.executable.program.launches) == 1


LAYERS["selective scan of 128"] = lambda: selective_scan(20, 128, (1, 9, 1))
LAYERS["selective scan of ragged states"] = lambda: selective_scan(37, 50, (6, 1, 1))


@layer
def convolutions_keep_the_tokens_before() -> None:
    """One token at a time, which are moved along in place, then some, then one again; and where
    what is kept is read elsewhere too."""

    def build(g: Graph, tokens: Any, read: bool = False) -> Any:
        state, x = g.state("s", [2, 3, 20]), g.input("x", [2, tokens, 20])
        y = g.depthwise_conv1d_causal(x, g.param("w", [20, 4]), state)
        joined = g.concat(state, x, axis=1)
        g.state_update(state, g.narrow(joined, axis=1, start=tokens, length=3))
        return (y, joined) if read else y

    w = random(20, 4, seed=1)
    graphs = [
        compiled(graph_of(lambda g: build(g, 1))),
        compiled(graph_of(lambda g: build(g, "n")), binding={"n": rlx.UpTo(9)}),
        compiled(graph_of(lambda g: build(g, 1, True))),
    ]
    states = [np.zeros((2, 3, 20), np.float32)] * 3
    for made in graphs:
        made.set_params({"w": w})
    assert [x.label for x in graphs[0].executable.program.launches] == ["conv_step(4)"]
    for number, n in ((0, 1), (0, 1), (1, 5), (1, 1), (2, 1), (0, 1), (1, 9), (2, 1)):
        made, x = graphs[number], random(2, n, 20, seed=10 * number + n)
        got, joined = made.run(x=x), np.concatenate([states[number], x], 1)
        want = sum(joined[:, j : j + n] * w[:, j] for j in range(4))
        np.testing.assert_allclose(got[0], want, rtol=1e-5, atol=1e-5)
        states[number] = joined[:, n:]
        np.testing.assert_array_equal(made.read_state("s"), states[number])
        on_device(made)


def cells(name: str) -> None:
    """A state that is handed over has 22 bits: an error of 2⁻²² in each step, which decays."""
    gpu = type(backend().kernels).__name__ == "KernelLoader"  # type: ignore[attr-defined]
    steps, rows, hidden = (150, 5, 512) if gpu else (4, 2, 24)
    gates = 4 if name == "lstm" else 3

    def build(g: Graph) -> Any:
        x, r = g.input("x", ["n", rows, gates * hidden]), g.input("r", [hidden, gates * hidden])
        states = [g.input(s, [rows, hidden]) for s in ("hc" if name == "lstm" else "h")]
        more = [g.input("bias", [hidden])] if name == "gru" else []
        return getattr(g, name)(x, r, *states, *more)

    graph = graph_of(build)
    made = compiled(graph, binding={"n": rlx.UpTo(steps)})
    names = {"r": (hidden, gates * hidden), "h": (rows, hidden), "c": (rows, hidden)}
    names["bias"] = (hidden,)
    data = {n: random(*d, seed=i) / 4 for i, (n, d) in enumerate(names.items())}
    data["r"] /= hidden**0.5 / 4
    for n in (steps, 1, 2, steps - 1, 0, steps):
        x = random(n, rows, gates * hidden, seed=n)
        given = {"x": x, **{k: v for k, v in data.items() if k in made.input_names}}
        for got, want in zip(made.run(given), evaluate(graph, given, {"n": n}), strict=True):
            require_close(got, want, 2**-18)
    on_device(made)
    assert len(made.executable.program.launches) == 1


LAYERS["lstm whose blocks wait for each other"] = lambda: cells("lstm")
LAYERS["gru whose blocks wait for each other"] = lambda: cells("gru")


# -- whole rows ------------------------------------------------------------------------------------


@layer
def long_rows_are_sorted_and_summed() -> None:
    def build(g: Graph) -> Any:
        x = g.input("x", [3, "n"])
        sums = [g.cumsum(x, axis=1, **o) for o in ({}, {"reverse": True}, {"exclusive": True})]
        return (
            g.sort(x, axis=1), g.argsort(x, axis=1, descending=True), *sums,
            *g.top_k(x, k=500, axis=1), g.searchsorted(g.sort(g.input("t", ["m"])), x),
        )  # fmt: skip

    graph = graph_of(build)
    made = compiled(graph, binding={"n": rlx.UpTo(9000), "m": rlx.UpTo(3000)})
    for n, m in ((9000, 3000), (1500, 1), (4097, 1000)):
        data = {"x": np.round(random(3, n, seed=n), 2), "t": random(m, seed=m)}
        wanted = evaluate(graph, data)
        for i, (got, want) in enumerate(zip(made.run(data), wanted, strict=True)):
            if i in (2, 3, 4):
                np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-4)
            else:
                np.testing.assert_array_equal(got, want)
    on_device(made)


@layer
def equations_are_solved() -> None:
    """Random matrices: a condition of some hundreds, in f64."""
    for dtype in ("f32", "c128"):

        def build(g: Graph, dtype: str = dtype) -> Any:
            return g.solve(g.input("a", [3, 40, 40], dtype), g.input("b", [3, 40, 5], dtype))

        made = compiled(graph_of(build))
        a, b = (random(3, 40, n, seed=n).astype(DType.of(dtype).numpy) for n in (40, 5))
        a[1, :, 7] = 0  # singular
        a[2] = np.roll(np.eye(40), 3, 0) + 1e-3 * a[2]  # every row is exchanged
        [got], [want] = made.run(a=a, b=b), evaluate(graph_of(build), {"a": a, "b": b})
        assert np.isnan(want[1]).all() and np.isnan(got[1]).all()
        for i in (0, 2):
            off = np.linalg.norm(got[i] - want[i]) / np.linalg.norm(want[i])
            assert off < (1e-5 if dtype == "f32" else 1e-11), off
        on_device(made)


# -- loops -----------------------------------------------------------------------------------------


def nested(g: Graph) -> Any:
    """A scan whose body has a scan, a branch by a slice, a product and a table; and a loop that
    ends by its carried value."""

    def inner(g: Graph, total: Any, x: Any, w: Any) -> Any:
        total = g.add(g.mul(total, 0.5), g.matmul(g.reshape(x, [1, 6]), w))
        return total, g.sum(total)

    def outer(g: Graph, state: Any, rows: Any, flag: Any, w: Any) -> Any:
        step = make_body(inner, [1, 6], [6], [6, 6], name="inner")
        last, sums = g.scan(state, rows, w, body=step, n_carry=1, n_xs=1)
        double = make_body(lambda g, x: g.mul(x, g.constant(np.arange(6, dtype="f"))), [1, 6])
        same = make_body(lambda g, x: x, [1, 6])
        return g.cond(flag, last, then=double, otherwise=same), sums

    state, xs = g.input("s", [1, 6]), g.input("x", ["n", 5, 6])
    flags, w = g.input("f", ["n"], "bool"), g.input("w", [6, 6])
    body = make_body(outer, [1, 6], [5, 6], Shape([], "bool"), [6, 6], name="outer")
    last, sums = g.scan(state, xs, flags, w, body=body, n_carry=1, n_xs=2)
    test = make_body(lambda g, x, limit: g.lt(g.sum(g.abs(x)), limit), [1, 6], [])
    again = make_body(lambda g, x, limit: g.mul(x, 1.5), [1, 6], [])
    limit = g.input("limit", [])
    grown = g.while_loop(last, limit, condition=test, body=again, n_carry=1)
    return last, sums, grown


@layer
def loops_in_loops_and_branches() -> None:
    graph = graph_of(nested)
    made = compiled(graph, binding={"n": rlx.UpTo(40)})
    w = random(6, 6, seed=3) / 3
    for n in (3, 40, 0, 17):
        data = {"s": random(1, 6, seed=n), "x": random(n, 5, 6, seed=n + 1), "w": w}
        data["f"] = np.random.default_rng(n).integers(0, 2, n).astype(bool)
        data["limit"] = np.float32(1e4)
        wanted = evaluate(graph, data, {"n": n})
        for got, want in zip(made.run(data, sizes={"n": n}), wanted, strict=True):
            np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-5)
    on_device(made)


@layer
def a_scan_queues_all_iterations() -> None:
    """More than the host queues at once, whole and in part; backwards too."""

    def step(g: Graph, h: Any, x: Any) -> Any:
        h = g.tanh(g.add(g.mul(h, 0.9), x))
        return h, g.mul(h, 2.0)

    for reverse in (False, True):

        def build(g: Graph, reverse: bool = reverse) -> Any:
            body = make_body(step, [7], [7])
            x = g.input("x", ["n", 7])
            return g.scan(g.input("h", [7]), x, body=body, n_carry=1, n_xs=1, reverse=reverse)

        graph = graph_of(build)
        made = compiled(graph, binding={"n": rlx.UpTo(200)})
        for n in (1, 16, 100, 33):
            data = {"x": random(n, 7, seed=n), "h": random(7, seed=1)}
            for _ in range(2):
                for got, want in zip(made.run(data), evaluate(graph, data), strict=True):
                    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
        on_device(made)


@layer
def operands_of_loops_that_are_not_aligned() -> None:
    """They begin at the second of some numbers."""

    def step(g: Graph, h: Any, x: Any, w: Any) -> Any:
        h = g.add(h, g.matmul(x, g.transpose(w, (1, 0))))
        return h, g.mul(h, 0.5)

    def build(g: Graph) -> Any:
        body = make_body(step, [3, 24], [3, 40], [24, 40])
        flat = [g.input(name, [1 + size]) for name, size in (("x", 720), ("w", 960))]
        x, w = (
            g.reshape(g.narrow(v, axis=0, start=1, length=n), dims)
            for v, n, dims in zip(flat, (720, 960), ([6, 3, 40], [24, 40]), strict=True)
        )
        return g.scan(g.input("h", [3, 24]), x, w, body=body, n_carry=1, n_xs=1)

    graph = graph_of(build)
    made = compiled(graph)
    data = {"h": random(3, 24), "x": random(721, seed=1), "w": random(961, seed=2)}
    for got, want in zip(made.run(data), evaluate(graph, data), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-4)
    on_device(made)


@layer
def an_index_out_of_range_in_a_loop_is_an_error() -> None:
    table = np.arange(12, dtype=np.float32).reshape(4, 3)

    def build(g: Graph) -> Any:
        body = make_body(
            lambda g, total, i, t: [g.add(total, g.gather(t, i, axis=0))],
            [1, 3], Shape([1], "i32"), [4, 3],
        )  # fmt: skip
        start, ids = g.input("s", [1, 3]), g.input("i", [5, 1], "i32")
        return g.scan(start, ids, g.input("t", [4, 3]), body=body, n_carry=1, n_xs=1)

    made, start = compiled(graph_of(build)), np.zeros((1, 3), np.float32)
    good = np.array([[0], [3], [1], [1], [2]], np.int32)
    for _ in range(2):
        bad = np.where(good == 2, 4, good).astype(np.int32)
        require_error(
            rlx.InputError, "out of range", lambda bad=bad: made.run(s=start, i=bad, t=table)
        )
        [got] = made.run(s=start, i=good, t=table)
        np.testing.assert_allclose(got[0], table[good[:, 0]].sum(0))


@layer
def a_loop_that_does_not_end_is_an_error() -> None:
    def build(g: Graph) -> Any:
        x, limit = g.input("x", []), g.input("limit", [])
        test = make_body(lambda g, x, limit: g.lt(x, limit), [], [])
        body = make_body(lambda g, x, limit: g.add(x, 1.0), [], [])
        options = {"n_carry": 1, "max_iterations": 20, "must_end": True}
        return g.while_loop(x, limit, condition=test, body=body, **options)

    made = compiled(graph_of(build))
    for _ in range(2):
        for limit in (20.0, 3.0, 0.0):
            [got] = made.run(x=np.float32(0), limit=np.float32(limit))
            assert got == limit
        call = {"x": np.float32(0), "limit": np.float32(21)}
        require_error(rlx.InputError, "does not end", lambda call=call: made.run(call))


# -- experts ---------------------------------------------------------------------------------------


def experts(kind: str, rows: tuple[int, ...], count: int, n: int, k: int) -> None:
    """bf16 weights and up to 128 rows are exact but for sums of f32; two planes keep 2⁻¹⁷ of x, f16
    2⁻¹¹ of packed weights."""
    packed = kind in GGUF_SCHEMES and kind not in ("BF16", "F16")
    weights = random(count, n, k)
    if packed:
        whole = encode(GGUF_SCHEMES[kind], weights)
        weight = whole[0] if isinstance(whole, tuple) else whole
    else:
        weight = weights.astype(DType.of(kind.lower()).numpy)

    def build(g: Graph) -> Any:
        x, ids = g.input("x", ["n", k]), g.input("e", ["n"], "i32")
        if packed:
            w = g.param("w", list(weight.shape), "u8")
            return g.dequant_grouped_matmul(x, w, ids, scheme=GGUF_SCHEMES[kind])
        w = g.param("w", [count, n, k], kind.lower())
        return g.grouped_matmul(x, g.transpose(w, (0, 2, 1)), ids)

    graph = graph_of(build)
    for most in rows:
        made = compiled(graph, binding={"n": rlx.UpTo(most)})
        made.set_params({"w": weight})
        on_device(made)
        for t in (most, max(most // 3, 1)):
            ids = np.random.default_rng(t).integers(0, count, t).astype(np.int32)
            ids[ids == 1] = 0  # an expert without rows, one with many
            data = {"x": random(t, k, seed=t), "e": ids}
            [want] = evaluate(graph, {**data, "w": weight}, {"n": t})
            exact = 2**-20 if not packed else 2**-19
            for _ in range(2):
                allowed = exact if most <= 128 else 2**-10 if packed else 2**-16
                require_close(made.run(data)[0], want, allowed)
            ids[t // 2] = count
            require_error(
                rlx.InputError, "out of range", lambda made=made, data=data: made.run(data)
            )


for _kind in ("BF16", "F16", "Q8_0", "Q4_K", "Q6_K", "MXFP4", "IQ4_XS"):
    LAYERS[f"experts {_kind}"] = lambda kind=_kind: experts(kind, (5, 200), 6, 34, 256)
for _kind in ("MXFP4", "Q8_0", "Q5_1"):
    LAYERS[f"experts {_kind} of 288"] = lambda kind=_kind: experts(kind, (5, 300), 3, 130, 288)


@layer
def types_without_kernels_are_unpacked() -> None:
    """In a process that has decoded nothing before; other packed weights are decoded in each
    run."""
    packed = np.zeros((8, GGUF_SCHEMES["Q5_1"].row_bytes(256)), np.uint8)
    halves = packed.view(np.float16).reshape(8, -1, 12)
    halves[:, :, 0], halves[:, :, 1] = 0.5, -0.25  # scales and minima of 32
    packed.reshape(8, -1, 24)[:, :, 8:] = 0x21
    x = random(3, 256)

    def build(g: Graph, role: str) -> Any:
        w = getattr(g, role)("w", list(packed.shape), "u8")
        return g.dequant_matmul(g.input("x", [3, 256]), w, scheme=GGUF_SCHEMES["Q5_1"])

    low, high = 0.5 * 1 - 0.25, 0.5 * 2 - 0.25
    want = (x.reshape(3, 8, 2, 16) * [[low], [high]]).sum((1, 2, 3))[:, None].repeat(8, 1)
    for role in ("param", "input"):
        made = compiled(graph_of(lambda g, role=role: build(g, role)))
        if role == "param":
            made.set_params({"w": packed})
        [got] = made.run(**({"x": x} if role == "param" else {"x": x, "w": packed}))
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-4)
        on_device(made)
