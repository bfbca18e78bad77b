"""The native selective scan and gated delta rule against the ops' references.

Tolerances are shares of the largest result. Both recurrences decay here (a ≤ 0, g ≤ 0, keys of
length 1, β ≤ 1), so an error made at one token does not grow: each token adds a few roundings of
its own sums, over at most 128 terms (√128·ε ≈ 7e-7), and the last few tokens dominate. 5e-6 leaves
room for that; results in 16 bits are rounded once from it and differ by one unit of the last place.
"""

from __future__ import annotations

import numpy as np
import pytest
from program_support import HOST, SETUPS, TARGETS, Native, check, compare, kernels_for, reference

from rlx.ir.dtype import DType
from rlx.ir.graph import Graph

TOLERANCE = {"f32": 5e-6, "f64": 1e-13, "f16": 2**-10, "bf16": 2**-7}
WORST = 5e-6


def delta_net(batch, seq, heads, n, state=True, dtype="f32", seed=0, sizes=None):
    g = Graph()
    shapes = dict.fromkeys("qkv", (batch, seq, heads, n))
    shapes |= dict.fromkeys(("g", "beta"), (batch, seq, heads))
    if state:
        shapes["state"] = (batch, heads, n, n)
    types = dict.fromkeys(shapes, dtype) if isinstance(dtype, str) else dtype
    g.set_outputs(*g.gated_delta_net(*[g.input(x, s, types[x]) for x, s in shapes.items()]))
    rng = np.random.default_rng(seed)
    bound = {x: [(sizes or {}).get(d, d) for d in s] for x, s in shapes.items()}
    arrays = {x: rng.standard_normal(s) for x, s in bound.items()}
    arrays["k"] /= np.linalg.norm(arrays["k"], axis=-1, keepdims=True)
    arrays["g"] = -rng.random(bound["g"])
    arrays["beta"] = rng.random(bound["g"])
    return g, {x: a.astype(DType.of(types[x]).numpy) for x, a in arrays.items()}


def scan(batch, seq, inner, n, d=True, state=True, dtype="f32", seed=0, sizes=None):
    g = Graph()
    shapes = {"u": (batch, seq, inner), "delta": (batch, seq, inner), "a": (inner, n)}
    shapes |= {"b": (batch, seq, n), "c": (batch, seq, n)}
    shapes |= ({"d": (inner,)} if d else {}) | ({"state": (batch, inner, n)} if state else {})
    types = dict.fromkeys(shapes, dtype) if isinstance(dtype, str) else dtype
    operands = [g.input(x, s, types[x]) for x, s in shapes.items()]
    g.set_outputs(*g.selective_scan(*operands, has_d=d, has_state=state))
    rng = np.random.default_rng(seed)
    bound = {x: [(sizes or {}).get(k, k) for k in s] for x, s in shapes.items()}
    arrays = {x: rng.standard_normal(s) for x, s in bound.items()}
    arrays["a"], arrays["delta"] = -np.abs(arrays["a"]), np.abs(arrays["delta"])
    return g, {x: a.astype(DType.of(types[x]).numpy) for x, a in arrays.items()}


DELTA = [(1, 1, 2, 8), (2, 1, 3, 16), (1, 5, 2, 16), (2, 40, 2, 32), (1, 33, 1, 128), (1, 7, 2, 5),
         (1, 20, 2, 24), (1, 1, 1, 1), (2, 3, 2, 1), (1, 1, 3, 80), (0, 3, 2, 8), (1, 0, 2, 8),
         (1, 16, 4, 64)]  # fmt: skip


@pytest.mark.parametrize("state", [True, False])
@pytest.mark.parametrize("sizes", DELTA)
def test_delta_net(sizes, state):
    compare(*delta_net(*sizes, state=state), WORST)


@pytest.mark.parametrize("seq", [1, 19])
@pytest.mark.parametrize("dtype", ["f16", "bf16", "f64"])
def test_delta_net_of_other_types(dtype, seq):
    compare(*delta_net(1, seq, 2, 16, dtype=dtype), TOLERANCE[dtype], setups=SETUPS[1::3])


@pytest.mark.parametrize("seq", [1, 19])
def test_delta_net_of_mixed_types(seq):
    names = ("q", "k", "v", "g", "beta", "state")
    for dtypes in (("f16", "f16", "f32", "f32", "bf16", "f32"), ("f32",) * 5 + ("f64",)):
        g, arrays = delta_net(1, seq, 2, 16, dtype=dict(zip(names, dtypes, strict=True)))
        compare(g, arrays, WORST, setups=SETUPS[1::3])


def test_chunks_are_steps():
    """50 tokens at once give what 50 runs of one token give, the state handed on."""
    g, arrays = delta_net(1, 50, 2, 64)
    one, _ = delta_net(1, 1, 2, 64)
    for target in TARGETS:
        o, last = Native(g, target, 2, {}).run(arrays)
        step, state = Native(one, target, 2, {}), arrays["state"]
        for t in range(50):
            now = {k: v[:, t : t + 1] for k, v in arrays.items() if k != "state"}
            got, state = step.run(now | {"state": state})
            check(got, o[:, t : t + 1], WORST)
        check(state, last, WORST)


def test_a_shut_gate_forgets_everything():
    for seq in (1, 40):
        g, arrays = delta_net(1, seq, 2, 16)
        arrays["g"][0, seq // 2] = -np.inf
        arrays["g"][0, seq - 1, 0] = -200.0  # underflows to 0
        compare(g, arrays, WORST, setups=SETUPS[1::3])


def test_nan_reaches_no_earlier_token():
    g, arrays = delta_net(1, 40, 1, 16)
    arrays["v"][0, 21, 0, 3] = np.nan
    arrays["v"][0, 30, 0, 4] = np.inf
    [o, last] = reference(g, arrays)
    assert np.isfinite(o[0, :21]).all() and np.isnan(o[0, 21:, 0, 3]).all()
    for target in TARGETS:
        got = Native(g, target, 1, {}).run(arrays)
        for a, b in zip(got, (o, last), strict=True):
            np.testing.assert_array_equal(np.isfinite(a), np.isfinite(b))
            kept = np.isfinite(b)
            assert np.abs(a[kept] - b[kept]).max() <= WORST * np.abs(b[kept]).max()


def test_few_heads_are_divided_by_columns():
    g, arrays = delta_net(1, 20, 1, 128)
    expected = reference(g, arrays)
    for target in TARGETS:
        for workers in (2, 5):
            for got, want in zip(Native(g, target, workers, {}).run(arrays), expected, strict=True):
                check(got, want, WORST)


@pytest.mark.parametrize(("batch", "seq"), [(1, 1), (2, 37)])
def test_dynamic_dims(batch, seq):
    sizes = {"batch": batch, "seq": seq}
    bounds = {"batch": 3, "seq": 64}
    made = delta_net("batch", "seq", 2, 16, sizes=sizes)
    compare(*made, WORST, sizes, SETUPS[1::3], bounds)
    compare(*scan("batch", "seq", 20, 16, sizes=sizes), WORST, sizes, SETUPS[1::3], bounds)


SCANS = [(1, 1, 20, 16), (2, 9, 33, 16), (1, 30, 7, 8), (2, 5, 17, 5), (1, 4, 3, 40), (1, 6, 2, 1),
         (1, 3, 5, 0), (0, 3, 5, 4), (1, 0, 5, 4), (1, 3, 2, 4096)]  # fmt: skip


@pytest.mark.parametrize(("d", "state"), [(True, True), (False, False), (True, False)])
@pytest.mark.parametrize("sizes", SCANS)
def test_selective_scan(sizes, d, state):
    compare(*scan(*sizes, d=d, state=state), WORST)


@pytest.mark.parametrize("dtype", ["f16", "bf16", "f64"])
def test_selective_scan_of_other_types(dtype):
    compare(*scan(2, 9, 20, 16, dtype=dtype), TOLERANCE[dtype], setups=SETUPS[1::3])


def test_selective_scan_of_mixed_types():
    dtypes = {"u": "f16", "delta": "f32", "a": "f32", "b": "bf16", "c": "f16", "d": "f32"}
    compare(*scan(2, 9, 20, 16, dtype=dtypes | {"state": "f32"}), 2**-10, setups=SETUPS[1::3])


def test_selective_scan_of_odd_numbers():
    g, arrays = scan(1, 12, 5, 16)
    arrays["u"][0, 4, 1], arrays["delta"][0, 6, 3] = np.nan, np.inf
    arrays["a"][2] = 200.0  # grows beyond all bounds
    compare(g, arrays, WORST, setups=SETUPS[1::3])


def test_a_program_in_the_pool():
    from rlx.backends.cpu.thread_pool import ThreadPool

    g, arrays = delta_net(2, 40, 3, 64)
    expected = reference(g, arrays)
    pool, native = ThreadPool(2, oversubscribe=True), Native(g, HOST, 2, {})
    for _ in range(3):
        for got, want in zip(native.run(arrays, pool=pool.run), expected, strict=True):
            check(got, want, WORST)


@pytest.mark.parametrize("name", ["aarch64", "x86-64"])
def test_other_targets(name):
    for g, _ in (delta_net(1, 1, 2, 16), delta_net(1, 9, 2, 16), scan(1, 3, 4, 16)):
        assert kernels_for(g, name)


def decode_graph(readers=False):
    """A recurrence whose last state is kept; with `readers`, the old one is needed after it."""
    g = Graph()
    shapes = dict.fromkeys("qkv", (1, 1, 2, 16)) | dict.fromkeys(("g", "beta"), (1, 1, 2))
    state = g.state("memory", (1, 2, 16, 16), "f32")
    o, last = g.gated_delta_net(*[g.input(n, s) for n, s in shapes.items()], state)
    old = [g.add(state, o.graph.constant(0.0))] if readers else []
    new = g.state_update(state, last, axis=0, start=0)
    g.set_outputs(o, *old, g.mul(new, 1.0))
    return g


@pytest.mark.parametrize("readers", [False, True])
def test_a_state_is_written_where_it_lies(readers):
    """No step copies it, unless something still reads what it was."""
    _, arrays = delta_net(1, 1, 2, 16)
    g = decode_graph(readers)
    given = {k: v for k, v in arrays.items() if k != "state"} | {"memory": arrays["state"].copy()}
    native = Native(g, HOST, 2, {})
    written = [s for s in native.launches if s.node.op.name == "state_update"]
    assert len(written) == (1 if readers else 0)
    plain, _ = delta_net(1, 1, 2, 16)
    o, last = reference(plain, arrays)
    got = native.run(given)
    check(got[0], o, WORST)
    check(got[-1], last, WORST)
    check(given["memory"], last, WORST)
    if readers:
        check(got[1], arrays["state"], 0)
