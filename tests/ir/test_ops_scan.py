"""selective_scan and gated_delta_net against their recurrences, step by step in float64."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from applied import apply, inferred, normal

from rlx.errors import AttributeValueError, DTypeError, ShapeError
from rlx.ir.op import lookup
from rlx.ir.shape import Shape

B, S, D, N = 2, 6, 3, 4


def scan_operands(dtype: object = np.float32) -> list[np.ndarray]:
    u, b, c = normal(0, B, S, D), normal(1, B, S, N), normal(2, B, S, N)
    delta = np.log1p(np.exp(normal(3, B, S, D)))  # positive, as after a softplus
    a = -np.exp(normal(4, D, N))
    return [x.astype(dtype) for x in (u, delta, a, b, c)]


def scan_loops(
    u: np.ndarray, delta: np.ndarray, a: np.ndarray, b: np.ndarray, c: np.ndarray,
    d: np.ndarray | None, state: np.ndarray | None,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    batch, seq, inner = u.shape
    h = np.zeros((batch, inner, a.shape[1])) if state is None else state.astype(np.float64)
    y = np.zeros((batch, seq, inner))
    for i in range(batch):
        for s in range(seq):
            for j in range(inner):
                step, x = float(delta[i, s, j]), float(u[i, s, j])
                for n in range(a.shape[1]):
                    decay = np.exp(step * float(a[j, n]))
                    h[i, j, n] = decay * h[i, j, n] + step * float(b[i, s, n]) * x
                    y[i, s, j] += float(c[i, s, n]) * h[i, j, n]
                if d is not None:
                    y[i, s, j] += float(d[j]) * x
    return y, h


@pytest.mark.parametrize("has_d", [False, True])
@pytest.mark.parametrize("has_state", [False, True])
def test_selective_scan_step_by_step(has_d: bool, has_state: bool) -> None:
    operands = scan_operands()
    d = normal(5, D) if has_d else None
    state = normal(6, B, D, N) if has_state else None
    given = [*operands, *[x for x in (d, state) if x is not None]]
    y, h = apply("selective_scan", given, has_d=has_d, has_state=has_state)
    expected_y, expected_h = scan_loops(*operands, d, state)
    # values stay below 10 and some 10 f32 roundings meet in each: 10 · 10 · 2⁻²⁴
    assert np.abs(y - expected_y).max() < 6e-6
    assert np.abs(h - expected_h).max() < 6e-6


def test_selective_scan_in_two_parts_is_the_whole() -> None:
    u, delta, a, b, c = scan_operands()
    y, h = apply("selective_scan", [u, delta, a, b, c])
    y1, middle = apply("selective_scan", [u[:, :4], delta[:, :4], a, b[:, :4], c[:, :4]])
    y2, end = apply(
        "selective_scan", [u[:, 4:], delta[:, 4:], a, b[:, 4:], c[:, 4:], middle], has_state=True
    )
    assert np.array_equal(np.concatenate([y1, y2], axis=1), y)  # the same operations in order
    assert np.array_equal(end, h)


def test_selective_scan_types_and_symbols() -> None:
    operands = scan_operands(ml_dtypes.bfloat16)
    dims = [["batch", "seq", D], ["batch", "seq", D], [D, N], ["batch", "seq", N]]
    y, h = apply("selective_scan", operands, dims=[*dims, ["batch", "seq", N]])
    assert y.dtype == ml_dtypes.bfloat16
    assert h.dtype == np.float32
    expected, state = scan_loops(*operands, None, None)
    assert np.abs(h - state).max() < 6e-6  # f32 inside: bf16 sums would be off by 0.01
    # rounded once: half a unit of bf16, 2⁻⁸ of the value, and the f32 error at a rounding edge
    assert np.all(np.abs(y.astype(np.float64) - expected) <= np.abs(expected) * 2**-8 + 6e-6)
    wide = [x.astype(np.float64) for x in scan_operands()]
    y64, h64 = apply("selective_scan", wide)
    expected, state = scan_loops(*wide, None, None)
    assert h64.dtype == np.float64
    assert np.abs(y64 - expected).max() < 1e-14


def test_selective_scan_over_nothing_keeps_the_state() -> None:
    u, delta, a, b, c = scan_operands()
    state = normal(6, B, D, N)
    empty = [x[:, :0] for x in (u, delta)] + [a] + [x[:, :0] for x in (b, c)]
    y, h = apply("selective_scan", [*empty, state], has_state=True)
    assert y.shape == (B, 0, D)
    assert np.array_equal(h, state)


def test_selective_scan_errors() -> None:
    u, a, b = [B, S, D], [D, N], [B, S, N]
    with pytest.raises(ShapeError, match="differ from the flags") as e:
        inferred("selective_scan", u, u, a, b, b, [D])
    assert "has_d" in e.value.hint
    with pytest.raises(ShapeError, match="axis 0 of d"):
        inferred("selective_scan", u, u, a, b, b, [N], has_d=True)
    with pytest.raises(ShapeError, match="axis 2 of state"):
        inferred("selective_scan", u, u, a, b, b, [B, D, D], has_state=True)
    with pytest.raises(ShapeError, match="axis 1 of delta"):
        inferred("selective_scan", u, [B, 5, D], a, b, b)
    with pytest.raises(ShapeError, match="axis 0 of a"):
        inferred("selective_scan", u, u, [4, N], b, b)
    with pytest.raises(ShapeError, match="u has the wrong rank"):
        inferred("selective_scan", [B, D], u, a, b, b)
    with pytest.raises(DTypeError, match="b must be of a float type"):
        inferred("selective_scan", u, u, a, Shape(b, "i32"), b)


H = 2


def delta_operands(dtype: object = np.float32) -> list[np.ndarray]:
    q, k, v = (normal(i, B, S, H, N) for i in range(3))
    k = k / np.sqrt((k * k).sum(-1, keepdims=True))
    g = -np.abs(normal(3, B, S, H))
    beta = 1 / (1 + np.exp(-normal(4, B, S, H)))
    return [x.astype(dtype) for x in (q, k, v, g, beta)]


def delta_loops(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, g: np.ndarray, beta: np.ndarray,
    state: np.ndarray | None,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    q, k, v, g, beta = (x.astype(np.float64) for x in (q, k, v, g, beta))
    batch, seq, heads, n = q.shape
    states = np.zeros((batch, heads, n, n)) if state is None else state.astype(np.float64)
    o = np.zeros(q.shape)
    for i in range(batch):
        for h in range(heads):
            s = states[i, h]
            for t in range(seq):
                s = np.exp(g[i, t, h]) * s
                d = (v[i, t, h] - k[i, t, h] @ s) * beta[i, t, h]
                s = s + np.outer(k[i, t, h], d)
                o[i, t, h] = (q[i, t, h] / np.sqrt(n)) @ s
            states[i, h] = s
    return o, states


@pytest.mark.parametrize("carried", [False, True])
def test_gated_delta_net_step_by_step(carried: bool) -> None:
    operands = delta_operands()
    state = normal(7, B, H, N, N) if carried else None
    o, s = apply("gated_delta_net", [*operands, *([state] if carried else [])], state_size=N)
    expected_o, expected_s = delta_loops(*operands, state)
    # values stay below 10, a step rounds some 10 times and the decay forgets older errors
    assert np.abs(o - expected_o).max() < 6e-6
    assert np.abs(s - expected_s).max() < 6e-6


def test_gated_delta_net_by_hand() -> None:
    # one step from nothing: S = k dᵀ with d = beta·v, o = (q·k)/√N · d
    q, k, v = (
        np.float32(x).reshape(1, 1, 1, 4) for x in ([2, 0, 4, 0], [1, 0, 0, 0], [1, 2, 3, 4])
    )
    g, beta = np.zeros((1, 1, 1), np.float32), np.full((1, 1, 1), 0.5, np.float32)
    o, s = apply("gated_delta_net", [q, k, v, g, beta])
    assert o.ravel().tolist() == [0.5, 1.0, 1.5, 2.0]
    assert s[0, 0].tolist() == [[0.5, 1.0, 1.5, 2.0], [0] * 4, [0] * 4, [0] * 4]


def test_gated_delta_net_in_two_parts_is_the_whole() -> None:
    operands = delta_operands()
    o, s = apply("gated_delta_net", operands)
    o1, middle = apply("gated_delta_net", [x[:, :2] for x in operands])
    o2, end = apply("gated_delta_net", [*[x[:, 2:] for x in operands], middle])
    assert np.array_equal(np.concatenate([o1, o2], axis=1), o)
    assert np.array_equal(end, s)


def test_gated_delta_net_types_symbols_and_emptiness() -> None:
    operands = delta_operands(np.float16)
    dims = [["batch", "seq", H, N]] * 3 + [["batch", "seq", H]] * 2
    o, s = apply("gated_delta_net", operands, dims=dims)
    expected, state = delta_loops(*operands, None)
    assert (o.dtype, s.dtype) == (np.float16, np.float32)
    assert np.abs(s - state).max() < 6e-6
    assert np.all(np.abs(o.astype(np.float64) - expected) <= np.abs(expected) * 2**-11 + 6e-6)
    start = normal(7, B, H, N, N, dtype=np.float16)
    o, s = apply("gated_delta_net", [*[x[:, :0] for x in operands], start])
    assert o.shape == (B, 0, H, N)
    assert np.array_equal(s, start)


def test_gated_delta_net_errors() -> None:
    q, g = [B, S, H, N], [B, S, H]
    with pytest.raises(ShapeError, match="state_size"):
        inferred("gated_delta_net", q, q, q, g, g, state_size=8)
    with pytest.raises(ShapeError, match="axis 3 of v"):
        inferred("gated_delta_net", q, q, [B, S, H, 5], g, g)
    with pytest.raises(ShapeError, match="axis 1 of beta"):
        inferred("gated_delta_net", q, q, q, g, [B, 5, H])
    with pytest.raises(ShapeError, match="state has the wrong rank"):
        inferred("gated_delta_net", q, q, q, g, g, [B, H, N])
    with pytest.raises(ShapeError, match="head size is a positive int"):
        inferred("gated_delta_net", [B, S, H, "n"], q, q, g, g)
    with pytest.raises(DTypeError, match="g must be of a float type"):
        inferred("gated_delta_net", q, q, q, Shape(g, "i32"), g)
    with pytest.raises(AttributeValueError, match="negative size"):
        inferred("gated_delta_net", q, q, q, g, g, state_size=-1)


def test_costs_count_every_state_element_per_step() -> None:
    net = lookup("gated_delta_net")()
    q, g = Shape(["batch", "seq", H, N]), Shape(["batch", "seq", H])
    shapes = [q, q, q, g, g]
    cost = net.cost(shapes, net.infer(*shapes))
    assert cost.flops == q.num_elements * N * 7
    scan = lookup("selective_scan")()
    u, a, b = Shape([B, S, D]), Shape([D, N]), Shape([B, S, N])
    assert scan.cost([u, u, a, b, b], scan.infer(u, u, a, b, b)).flops == B * S * D * N * 7
