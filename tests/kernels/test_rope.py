"""Native rotary embedding against complex multiplication in f64.

A rotated element is the difference of two products: three roundings of at most 2^-24 of |a| + |b|
each; with tables of cosines and sines in f32 no other error arises. After a norm there are the sum
of D squares, a root, a division and two products before: √D + 6 more roundings.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from program_support import HOST, SETUPS, Native, kernels_for, reference

import rlx
from rlx.backends.cpu.kernels.attention import rotary  # noqa: F401
from rlx.ir.dim import sym
from rlx.ir.dtype import DType
from rlx.ir.graph import Graph

UNIT = {"f64": 2.0**-53, "f32": 2.0**-24, "f16": 2.0**-11, "bf16": 2.0**-8}


def draw(seed, *dims, dtype="f32"):
    return np.random.default_rng(seed).standard_normal(dims).astype(DType.of(dtype).numpy)


def tables(rows, half, dtype="f32"):
    angle = np.arange(rows)[:, None] * 10000.0 ** (-np.arange(half) / half)
    return np.cos(angle).astype(DType.of(dtype).numpy), np.sin(angle).astype(DType.of(dtype).numpy)


def rotated(x, cos, sin, positions, n_rot, interleaved):
    """x [B, S, H, D] in f64: pairs as complex numbers, rotated by multiplication."""
    x = x.astype(np.float64)
    angle = (cos.astype(np.float64) + 1j * sin.astype(np.float64))[positions][..., None, :]
    if interleaved:
        pairs = x[..., 0:n_rot:2] + 1j * x[..., 1:n_rot:2]
    else:
        pairs = x[..., : n_rot // 2] + 1j * x[..., n_rot // 2 : n_rot]
    pairs = pairs * angle
    parts = [pairs.real, pairs.imag]
    joined = (
        np.stack(parts, -1).reshape(*x.shape[:-1], n_rot)
        if interleaved
        else np.concatenate(parts, -1)
    )
    return np.concatenate([joined, x[..., n_rot:]], -1)


def close(got, want, x, roundings):
    """Within so many roundings of the largest element of each head."""
    dtype = DType.of(got.dtype).name
    size = 2 * np.abs(x.astype(np.float64)).max(axis=-1, keepdims=True, initial=0.0)
    bound = roundings * UNIT["f64" if dtype == "f64" else "f32"] * size
    bound = bound + (UNIT[dtype] * np.abs(want) if dtype in ("f16", "bf16") else 0.0)
    assert got.shape == want.shape
    assert (np.abs(got.astype(np.float64) - want) <= bound).all()


CASES = {
    "halves": {"dims": (2, 5, 3, 64)},
    "pairs": {"dims": (2, 5, 3, 64), "interleaved": True},
    "part": {"dims": (1, 4, 3, 80), "n_rot": 32},
    "part in pairs": {"dims": (1, 4, 3, 80), "n_rot": 20, "interleaved": True},
    "odd part": {"dims": (1, 4, 3, 15), "n_rot": 6},
    "smallest": {"dims": (1, 3, 1, 2), "interleaved": True},
    "offset": {"dims": (1, 4, 2, 32), "offset": 9},
    "one token": {"dims": (1, 1, 16, 128), "offset": 30},
    "heads first": {"dims": (2, 5, 3, 32), "layout": "bhsd"},
    "half": {"dims": (1, 5, 3, 32), "dtype": "f16"},
    "bfloat in pairs": {"dims": (1, 5, 3, 64), "dtype": "bf16", "interleaved": True},
    "double": {"dims": (1, 5, 3, 32), "dtype": "f64", "table": "f64"},
    "half tables": {"dims": (1, 5, 3, 32), "table": "f16"},
    "rank 3": {"dims": (2, 5, 3, 32), "rank3": True},
    "positions": {"dims": (2, 5, 3, 32), "positions": "i32"},
    "positions of each": {"dims": (2, 5, 3, 32), "positions": "i64", "each": True},
    "unsigned positions": {"dims": (1, 5, 3, 32), "positions": "u8"},
    "nothing": {"dims": (1, 0, 3, 32)},
}


def build(
    dims, n_rot=0, interleaved=False, offset=0, layout="bshd", dtype="f32", table="f32",
    rank3=False, positions=None, each=False, norm=False,
):  # fmt: skip
    """(graph, arrays, x as [B, S, H, D], positions)"""
    batch, length, _, dim = dims
    x = draw(1, *dims, dtype=dtype)
    given = x.reshape(batch, length, -1) if rank3 else x
    given = given.transpose(0, 2, 1, 3) if layout == "bhsd" else given
    cos, sin = tables(40, (n_rot or dim) // 2, table)
    arrays = {"x": np.ascontiguousarray(given)}
    if norm:
        arrays["gamma"] = draw(2, dim)
    arrays |= {"cos": cos, "sin": sin}
    at = np.arange(offset, offset + length)
    if positions is not None:
        at = np.random.default_rng(3).integers(0, 40, (batch, length) if each else length)
        arrays["positions"] = at.astype(DType.of(positions).numpy)
    g = Graph("rope")
    values = [g.input(n, list(a.shape), dtype=DType.of(a.dtype)) for n, a in arrays.items()]
    make = g.fused_qk_norm_rope if norm else g.rope
    out = make(
        *values, head_dim=dim, n_rot=n_rot, interleaved=interleaved, offset=offset, layout=layout
    )
    return g.set_outputs(out), arrays, x, at


@pytest.mark.parametrize("name", CASES)
def test_rope(name):
    options = CASES[name]
    g, arrays, x, at = build(**options)
    n_rot = options.get("n_rot") or x.shape[-1]
    want = rotated(x, arrays["cos"], arrays["sin"], at, n_rot, options.get("interleaved", False))
    (formula,) = reference(g, arrays)
    for target, workers in SETUPS:
        (got,) = Native(g, target, workers, {}).run(arrays)
        np.testing.assert_array_equal(got, formula)  # the op's roundings, bit for bit
        laid = got.transpose(0, 2, 1, 3) if options.get("layout") == "bhsd" else got
        close(laid.reshape(x.shape), want, x, 3)


@pytest.mark.parametrize("name", CASES)
def test_norm_and_rope(name):
    options = CASES[name]
    g, arrays, x, at = build(**options, norm=True)
    dim, wide = x.shape[-1], x.astype(np.float64)
    normed = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6) * arrays["gamma"]
    n_rot = options.get("n_rot") or dim
    flag = options.get("interleaved", False)
    want = rotated(normed, arrays["cos"], arrays["sin"], at, n_rot, flag)
    for target, workers in SETUPS:
        (got,) = Native(g, target, workers, {}).run(arrays)
        laid = got.transpose(0, 2, 1, 3) if options.get("layout") == "bhsd" else got
        close(laid.reshape(x.shape), want, normed, math.sqrt(dim) + 9)


@pytest.mark.parametrize("bad", [-1, 40, 2**31 - 1])
def test_positions_without_a_row_are_reported(bad):
    g, arrays, *_ = build((1, 5, 3, 32), positions="i32")
    arrays["positions"][2] = bad
    native = Native(g, HOST, 2, {})
    (got,) = native.run(arrays)
    assert native.linked.status[0] == g.outputs[0].node.id + 1
    kept = np.delete(got, 2, axis=1)
    np.testing.assert_array_equal(kept, rotated_exactly(arrays, [0, 1, 3, 4]))


def rotated_exactly(arrays, tokens):
    """Halves of some tokens rotated in f32, with the op's roundings."""
    at = arrays["positions"][tokens]
    cos, sin = (arrays[n][at][:, None] for n in ("cos", "sin"))
    x = arrays["x"][:, tokens]
    a, b = x[..., :16], x[..., 16:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def test_strided_operands_are_read_in_place():
    """x is a part of a joined product; the tables lie transposed."""
    g = Graph("views")
    joined = g.input("joined", [2, 5, 100])
    cos, sin = (g.transpose(g.input(n, [16, 40]), axes=(1, 0)) for n in ("cos", "sin"))
    x = g.narrow(joined, axis=2, start=4, length=96)
    g.set_outputs(g.rope(x, cos, sin, head_dim=32))
    c, s = tables(40, 16)
    arrays = {"joined": draw(1, 2, 5, 100), "cos": c.T.copy(), "sin": s.T.copy()}
    part = arrays["joined"][..., 4:].reshape(2, 5, 3, 32)
    for target, workers in SETUPS:
        native = Native(g, target, workers, {})
        assert not any(n.op.name == "contiguous" for n in native.lir.graph.nodes)
        (got,) = native.run(arrays)
        close(got.reshape(part.shape), rotated(part, c, s, np.arange(5), 32, False), part, 3)


def test_dynamic_length_and_offset():
    seq, past = sym("seq"), sym("past")
    g = Graph("dynamic")
    x = g.input("x", [1, seq, 2, 32])
    cos, sin = (g.input(n, [40, 16]) for n in ("cos", "sin"))
    g.set_outputs(g.rope(x, cos, sin, head_dim=32, offset=past))
    c, s = tables(40, 16)
    native = Native(g, HOST, 2, {"seq": 10, "past": 30})
    for rows, before in ((1, 0), (1, 30), (10, 30), (3, 5), (0, 2)):
        arrays = {"x": draw(rows, 1, rows, 2, 32), "cos": c, "sin": s}
        (got,) = native.run(arrays, {"seq": rows, "past": before})
        at = np.arange(before, before + rows)
        close(got, rotated(arrays["x"], c, s, at, 32, False), arrays["x"], 3)


@pytest.mark.parametrize("target", ["x86-64", "aarch64", "neoverse-n1", "sapphirerapids"])
def test_code_for_other_machines(target):
    for norm in (False, True):
        g, *_ = build((1, 5, 3, 64), norm=norm, interleaved=norm)
        assert kernels_for(g, target) == 1


def test_a_position_beyond_the_tables_is_named() -> None:
    g = rlx.Graph("turns")
    x, at = g.input("x", [1, 3, 32]), g.input("at", [3], "i32")
    cos, sin = g.param("cos", [8, 8]), g.param("sin", [8, 8])
    for _ in range(2):
        x = g.rope(x, cos, sin, at, head_dim=16)
    g.set_outputs(x)
    f = rlx.Session("cpu").compile(g)
    table = np.ones((8, 8), np.float32)
    f.set_params({"cos": table, "sin": 0 * table})
    ones = np.ones((1, 3, 32), np.float32)
    np.testing.assert_array_equal(f.run(x=ones, at=np.array([0, 1, 7], np.int32))[0], ones)
    with pytest.raises(rlx.InputError, match=r"(?s)rope.*out of range.*test_rope"):
        f.run(x=ones, at=np.array([0, 1, 8], np.int32))
