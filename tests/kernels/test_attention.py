"""Native attention against the formula in f64.

With elements of size one, a score is a sum of D terms that is kept in f32: its error is some
√D · 2^-24. It changes a weight by as much, relatively; the exponential adds 2^-24, the sums over Sk
keys some √Sk · 2^-24. The result is a mean of values whose errors differ in sign, so a quarter of
2^-24 · (√D + √Sk + 4) · max|v| is the bound asked for. Results in 16 bits are rounded once more.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from program_support import HOST, SETUPS, Native, kernels_for

from rlx.backends.cpu.kernels.attention import lower_attention  # noqa: F401
from rlx.backends.cpu.kernels.attention.combine import CombineSplitKV
from rlx.backends.cpu.kernels.attention.decode import Decode
from rlx.backends.cpu.kernels.attention.decode_heads import CombineHeads, DecodeHeads
from rlx.backends.cpu.kernels.attention.prefill import Prefill
from rlx.backends.cpu.kernels.attention.tiles import has_bf16_dot
from rlx.errors import UnsupportedError
from rlx.ir.attrs import MaskKind
from rlx.ir.binding import DimBinding
from rlx.ir.dim import sym
from rlx.ir.dtype import DType
from rlx.ir.graph import Graph
from rlx.ir.quant.scheme import GGUF_SCHEMES, encode
from rlx.runtime.session import Session

UNIT = {"f64": 2.0**-53, "f32": 2.0**-24, "f16": 2.0**-11, "bf16": 2.0**-8}


def draw(seed, *dims, dtype="f32"):
    rng = np.random.default_rng(seed)
    return rng.standard_normal(dims).astype(DType.of(dtype).numpy)


def expected(q, k, v, scale, kind=MaskKind.NONE, softcap=0.0, mask=None, sinks=None):
    """The formula on [B, H, S, D] arrays, row by row, in f64."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    batch, heads, rows, _ = q.shape
    keys, group = k.shape[2], heads // k.shape[1]
    out = np.zeros_like(q)
    if mask is not None:
        mask = np.broadcast_to(mask, (batch, heads, rows, keys))
    for b, h, i in np.ndindex(batch, heads, rows):
        at, seen = keys - rows + i, np.ones(keys, bool)
        if kind.kind in ("causal", "sliding_window"):
            seen = np.arange(keys) <= at
        if kind.kind == "sliding_window":
            seen &= np.arange(keys) > at - kind.window
        if kind.kind == "local":
            seen = np.abs(np.arange(keys) - at) <= kind.window
        scores = k[b, h // group] @ q[b, h, i] * scale
        if softcap:
            scores = softcap * np.tanh(scores / softcap)
        if mask is not None and kind != MaskKind.BIAS:
            seen = seen & mask[b, h, i]
        elif mask is not None:
            scores = scores + mask[b, h, i].astype(np.float64)
            seen = scores > -np.inf
        if seen.any():
            with np.errstate(invalid="ignore"):
                weights = np.exp(scores[seen] - scores[seen].max())
            total = weights.sum()
            if sinks is not None:
                with np.errstate(over="ignore"):
                    total += np.exp(np.float64(sinks[h]) - scores[seen].max())
            out[b, h, i] = weights @ v[b, h // group][seen] / total
    return out


def close(got, want, head_dim, v):
    dtype = DType.of(got.dtype).name
    keys, unit = v.shape[2], UNIT["f64" if dtype == "f64" else "f32"]
    largest = np.abs(v.astype(np.float64)).max(initial=0.0)
    bound = unit / 4 * (math.sqrt(head_dim) + math.sqrt(keys) + 4) * largest
    bound = bound + (UNIT[dtype] * np.abs(want) if dtype in ("f16", "bf16") else 0.0)
    assert got.shape == want.shape
    assert (np.abs(got.astype(np.float64) - want) <= bound).all()


def heads_first(x, layout):
    return x if layout == "bhsd" else x.transpose(0, 2, 1, 3)


def check(
    dims, kind="none", types="f32 f32", layouts="bshd bshd", mask=None, softcap=0.0, scale=None,
    setups=SETUPS, rank3=False, sinks=None,
):  # fmt: skip
    """dims: batch, queries, keys, heads, key heads, head_dim."""
    batch, rows, keys, heads, kv_heads, dim = dims
    kind, (q_type, kv_type), (ql, kl) = MaskKind.of(kind), types.split(), layouts.split()

    def shape(length, count, layout):
        return (batch, length, count, dim) if layout == "bshd" else (batch, count, length, dim)

    arrays = {
        "q": draw(1, *shape(rows, heads, ql), dtype=q_type),
        "k": draw(2, *shape(keys, kv_heads, kl), dtype=kv_type),
        "v": draw(3, *shape(keys, kv_heads, kl), dtype=kv_type),
    }
    if mask is not None:
        arrays["mask"] = mask
    if sinks is not None:
        sinks = np.array(sinks, DType.of(q_type).numpy)
    want = expected(
        *(heads_first(arrays[n], ql if n == "q" else kl) for n in "qkv"),
        1 / math.sqrt(dim) if scale is None else scale, kind, softcap, mask, sinks,
    )  # fmt: skip
    given = {n: a.reshape(*a.shape[:2], -1) if rank3 else a for n, a in arrays.items()}
    given |= {} if sinks is None else {"sinks": sinks}
    g = Graph("attention")
    values = [g.input(n, list(a.shape), dtype=DType.of(a.dtype)) for n, a in given.items()]
    out = g.attention(
        *values, num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, mask_kind=kind, scale=scale,
        softcap=softcap, q_layout=ql, kv_layout=kl, has_sinks=sinks is not None,
    )  # fmt: skip
    g.set_outputs(out)
    for target, workers in setups:
        native = Native(g, target, workers, {})
        (got,) = native.run(given)
        close(heads_first(got.reshape(arrays["q"].shape), ql), want, dim,
              heads_first(arrays["v"], kl))  # fmt: skip
    return native


def case(*dims, **options):
    return {"dims": dims, **options}


MANY = {
    "causal": case(1, 200, 200, 4, 2, 128, kind="causal"),
    "past": case(2, 37, 90, 6, 2, 64, kind="causal", types="f32 f16"),
    "more queries than keys": case(1, 50, 20, 2, 2, 32, kind="causal"),
    "window": case(1, 150, 220, 3, 3, 32, kind="sliding_window(40)"),
    "window of one": case(1, 20, 20, 2, 1, 16, kind="sliding_window(1)"),
    "both sides": case(2, 150, 150, 3, 3, 32, kind="local(20)"),
    "both sides of long rows": case(1, 430, 430, 1, 1, 64, kind="local(33)"),
    "both sides of groups": case(1, 90, 160, 6, 2, 64, kind="local(7)", types="f32 f16"),
    "both sides, more queries than keys": case(1, 50, 20, 2, 2, 32, kind="local(4)"),
    "as long as the reach": case(1, 41, 41, 2, 1, 32, kind="local(41)"),
    "shorter than the reach": case(1, 30, 30, 2, 1, 32, kind="local(64)"),
    "itself alone": case(1, 40, 40, 2, 1, 16, kind="local(0)"),
    "all keys": case(2, 67, 131, 3, 1, 96, kind="none"),
    "one block of keys": case(2, 128, 128, 3, 3, 32),
    "a key more than two blocks": case(1, 130, 257, 2, 1, 64),
    "columns beyond the head": case(1, 40, 200, 2, 1, 112),
    "half results": case(1, 70, 130, 4, 2, 32, types="f16 f16"),
    "narrow panel": case(1, 12, 300, 2, 2, 64, kind="causal"),
    "half": case(1, 33, 70, 4, 4, 80, types="f16 f16", kind="causal"),
    "bfloat": case(1, 33, 70, 4, 2, 64, types="bf16 bf16"),
    "double": case(1, 23, 70, 4, 2, 24, types="f64 f64", kind="causal"),
    "wide keys": case(1, 9, 20, 2, 1, 24, types="f32 f64"),
    "softcap": case(1, 40, 40, 2, 1, 64, kind="causal", softcap=1.5, scale=0.4),
    "odd head": case(1, 20, 45, 2, 1, 7, kind="causal"),
    "head of one": case(1, 30, 45, 3, 3, 1, kind="causal"),
    "uneven head": case(1, 20, 45, 2, 1, 72, types="f32 f16", layouts="bhsd bhsd"),
    "mixed layouts": case(2, 20, 45, 4, 2, 32, layouts="bshd bhsd", kind="causal"),
    "rank 3": case(2, 20, 45, 4, 2, 32, rank3=True),
    "one query row each": case(3, 1, 50, 40, 2, 32, kind="causal"),
    "eight bits": case(1, 20, 45, 2, 1, 64, types="f32 f8e4m3", kind="causal"),
    "no keys": case(1, 30, 0, 2, 1, 16),
    "one key": case(1, 30, 1, 2, 1, 16),
    "sinks": case(2, 30, 45, 6, 2, 32, kind="sliding_window(9)", sinks=[-9, 0, 1, 2, 4, 200]),
    "half sinks": case(1, 33, 70, 4, 4, 80, types="f16 f16", sinks=[0, 1, 2, 3]),
}

FEW = {
    "one query": case(1, 1, 300, 4, 2, 128, kind="causal"),
    "half state": case(2, 1, 301, 6, 3, 64, types="f32 f16", layouts="bshd bhsd"),
    "bfloat state": case(2, 2, 130, 6, 2, 128, types="f32 bf16", kind="causal"),
    "half": case(1, 1, 77, 8, 2, 96, types="f16 f16"),
    "eight bits": case(1, 1, 77, 4, 2, 64, types="f32 f8e5m2"),
    "queries": case(1, 5, 150, 2, 2, 64, kind="causal"),
    "window": case(1, 3, 500, 4, 2, 32, kind="sliding_window(70)"),
    "both sides": case(1, 7, 300, 2, 2, 64, kind="local(5)"),
    "eight rows": case(1, 1, 100, 8, 1, 40, softcap=1.5, scale=0.4),
    "seven rows": case(1, 1, 90, 7, 1, 7),
    "more queries than keys": case(1, 4, 2, 2, 1, 40, kind="causal"),
    "no keys": case(1, 1, 0, 2, 1, 16),
    "one key": case(2, 1, 1, 2, 1, 16, layouts="bhsd bhsd"),
    "no keys of heads together": case(2, 1, 0, 4, 2, 16),
    "more queries than keys of heads together": case(1, 4, 2, 2, 2, 40, kind="causal"),
    "batches of heads together": case(3, 1, 1100, 8, 4, 32, types="f32 f16"),
    "rank 3": case(2, 1, 45, 4, 2, 32, rank3=True),
    "sinks": case(2, 1, 45, 6, 2, 32, kind="causal", sinks=[-9, 0, 1, 2, 4, 200]),
    "sinks, heads in turn": case(1, 1, 300, 6, 3, 64, layouts="bshd bhsd", sinks=[1] * 6),
}


@pytest.mark.parametrize("name", MANY)
def test_many_rows(name):
    native = check(**MANY[name])
    assert {type(s.spec) for s in native.launches} == {Prefill, CombineSplitKV}


@pytest.mark.parametrize("name", FEW)
def test_few_rows(name):
    case = FEW[name]
    native = check(**case)
    # where the heads of a key are neighbours, they are read together
    together = case.get("layouts", "bshd bshd").endswith("bshd") and case["dims"][4] > 1
    kinds = {DecodeHeads, CombineHeads} if together else {Decode, CombineSplitKV}
    assert {type(s.spec) for s in native.launches} == kinds


@pytest.mark.parametrize("seed", range(16))
def test_drawn_shapes(seed):
    """Any sizes, groups, types, layouts and computed masks."""
    rng = np.random.default_rng(seed)
    group, kv_heads = (int(n) for n in rng.integers(1, 5, 2))
    rows, keys = int(rng.choice([1, 2, 17, 65, 130])), int(rng.integers(1, 260))
    dim = int(rng.choice([8, 16, 20, 33, 64, 112]))
    windows = [f"sliding_window({rng.integers(1, 90)})", f"local({rng.integers(0, 90)})"]
    kind = str(rng.choice(["none", "causal", *windows]))
    kv_type = rng.choice(["f32", "f16", "bf16"])
    layouts = " ".join(rng.choice(["bshd", "bhsd"], 2))
    dims = (int(rng.integers(1, 3)), rows, keys, group * kv_heads, kv_heads, dim)
    setup = SETUPS[int(rng.integers(len(SETUPS)))]
    check(dims, kind, f"f32 {kv_type}", layouts, setups=[setup])


def flags(*dims):
    return np.random.default_rng(5).random(dims) > 0.4


@pytest.mark.parametrize("rows", [3, 21])
@pytest.mark.parametrize(
    "mask",
    [(2, 4, "q", 90), (4, "q", 90), (2, 1, 1, 90), ("q", 90), (90,), (2, 1, "q", 1), (1, 4, 1, 90)],
)
def test_mask_tensors_broadcast(rows, mask):
    dims = [rows if d == "q" else d for d in mask]
    sizes, setups = (2, rows, 90, 4, 2, 32), [SETUPS[1]]
    check(sizes, kind="custom", mask=flags(*dims), setups=setups)
    check(sizes, kind="bias", mask=draw(7, *dims, dtype="f16"), setups=setups)


@pytest.mark.parametrize("length", [8, 31, 200])
def test_padded_texts_of_local_attention(length):
    """A window on both sides, and real keys only: a query far behind the last one sees none."""
    real = np.arange(length) < np.array([[length], [length // 2], [1]])
    check((3, length, length, 2, 2, 32), kind="local(15)", mask=real[:, None, None])


def test_one_kernel_where_queries_are_the_keys():
    """One query has one key then, so none is made for long rows of keys."""
    g = Graph("self")
    values = [g.input(n, ["batch", "seq", 2, 32]) for n in "qkv"]
    g.set_outputs(g.attention(*values, num_heads=2, num_kv_heads=2, head_dim=32))
    native = Native(g, HOST, 2, {"batch": 2, "seq": 40})
    assert [type(s.spec) for s in native.launches] == [Prefill, CombineSplitKV]
    for length in (1, 2, 40):
        arrays = {n: draw(i, 2, length, 2, 32) for i, n in enumerate("qkv")}
        (got,) = native.run(arrays, {"batch": 2, "seq": length})
        q, k, v = (heads_first(arrays[n], "bshd") for n in "qkv")
        close(heads_first(got, "bshd"), expected(q, k, v, 32**-0.5), 32, v)


@pytest.mark.parametrize("rows", [2, 30])
def test_masks_on_every_target(rows):
    hidden = flags(2, 1, rows, 60)
    hidden[:, :, 1] = False  # a row without any key gives zeros
    check((2, rows, 60, 4, 2, 24), kind="custom", mask=hidden)
    bias = draw(7, 4, rows, 60)
    bias[2, 0] = -np.inf
    bias[1, 1] = np.finfo(np.float32).min  # hides nothing: every score is the same
    check((2, rows, 60, 4, 2, 24), kind="bias", mask=bias)


@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("workers", [5, 16])
def test_many_workers_share_few_items(rows, workers):
    check((1, rows, 700, 2, 1, 32), kind="causal", setups=[(HOST, workers)])


@pytest.mark.parametrize("rows", [1, 40])
def test_equal_runs_give_equal_bits(rows):
    g, arrays = simple(rows)
    native = Native(g, HOST, 3, {})
    (first,), (second,) = native.run(arrays), native.run(arrays)
    np.testing.assert_array_equal(first, second)


def simple(rows, keys=300, kind="causal"):
    arrays = {
        "q": draw(1, 1, rows, 4, 32),
        "k": draw(2, 1, keys, 2, 32),
        "v": draw(3, 1, keys, 2, 32),
    }
    g = Graph("simple")
    values = [g.input(n, list(a.shape)) for n, a in arrays.items()]
    g.set_outputs(g.attention(*values, num_heads=4, num_kv_heads=2, head_dim=32, mask_kind=kind))
    return g, arrays


@pytest.mark.parametrize("kind", ["causal", "none"])
@pytest.mark.parametrize("rows", [1, 40])
def test_nan_and_infinity_stay_in_their_rows(rows, kind):
    g, arrays = simple(rows, keys=100, kind=kind)
    arrays["q"][0, 0, 1, 3] = np.nan
    arrays["q"][0, 0, 2, 3] = np.inf
    given = (heads_first(arrays[n], "bshd") for n in "qkv")
    want = expected(*given, 32**-0.5, MaskKind.of(kind))
    for target, workers in SETUPS:
        (got,) = Native(g, target, workers, {}).run(arrays)
        assert np.isnan(got[0, 0, 1:3]).all()
        got[0, 0, 1:3] = want[0, 1:3, 0] = 0.0
        close(heads_first(got, "bshd"), want, 32, heads_first(arrays["v"], "bshd"))


@pytest.mark.parametrize("rows", [1, 30])
def test_strided_operands_are_read_in_place(rows):
    """q is a part of a joined product, k and v are filled parts of larger states, v transposed."""
    g = Graph("views")
    joined = g.input("joined", [2, rows, 4 * 16 + 10])
    k = g.state("k", [2, 2, 80, 16], dtype="f16")
    v = g.state("v", [2, 2, 16, 80], dtype="f16")
    out = g.attention(
        g.narrow(joined, axis=2, start=6, length=64), g.narrow(k, axis=2, start=0, length=50),
        g.transpose(g.narrow(v, axis=3, start=0, length=50), axes=(0, 1, 3, 2)),
        num_heads=4, num_kv_heads=2, head_dim=16, mask_kind="causal", kv_layout="bhsd",
    )  # fmt: skip
    g.set_outputs(out)
    arrays = {
        "joined": draw(1, 2, rows, 74),
        "k": draw(2, 2, 2, 80, 16, dtype="f16"),
        "v": draw(3, 2, 2, 16, 80, dtype="f16"),
    }
    q = arrays["joined"][..., 6:70].reshape(2, rows, 4, 16).transpose(0, 2, 1, 3)
    values = arrays["v"][..., :50].transpose(0, 1, 3, 2)
    want = expected(q, arrays["k"][:, :, :50], values, 0.25, MaskKind.CAUSAL)
    for target, workers in SETUPS:
        native = Native(g, target, workers, {})
        assert not any(n.op.name == "contiguous" for n in native.lir.graph.nodes)
        (got,) = native.run(arrays)
        close(heads_first(got.reshape(2, rows, 4, 16), "bshd"), want, 16, values)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_dynamic_dims(layout):
    """One program serves every number of queries and of cached positions."""
    seq, past, axis = sym("seq"), sym("past"), 1 if layout == "bshd" else 2
    dims = [1, 64, 2, 16] if layout == "bshd" else [1, 2, 64, 16]
    g = Graph("dynamic")
    q = g.input("q", [1, seq, 4, 16])
    states = [g.state(n, dims, dtype="f16") for n in "kv"]
    filled = [g.narrow(s, axis=axis, start=0, length=past + seq) for s in states]
    out = g.attention(
        q, *filled, num_heads=4, num_kv_heads=2, head_dim=16, mask_kind="causal", kv_layout=layout
    )
    g.set_outputs(out)
    cache = {n: draw(i, *dims, dtype="f16") for i, n in enumerate("kv")}
    for target, workers in SETUPS:
        native = Native(g, target, workers, {"seq": 30, "past": 34})
        for rows, before in ((1, 0), (1, 33), (2, 7), (30, 0), (30, 34), (0, 5)):
            arrays = {"q": draw(9, 1, rows, 4, 16), **cache}
            (got,) = native.run(arrays, {"seq": rows, "past": before})
            k, v = (heads_first(cache[n], layout)[:, :, : rows + before] for n in "kv")
            want = expected(heads_first(arrays["q"], "bshd"), k, v, 0.25, MaskKind.CAUSAL)
            close(heads_first(got, "bshd"), want, 16, v)


@pytest.mark.parametrize("target", ["x86-64", "aarch64", "neoverse-n1", "sapphirerapids"])
def test_code_for_other_machines(target):
    for rows in (1, 50):
        for kind in ("causal", "none", "local(9)"):
            g, _ = simple(rows, kind=kind)
            assert kernels_for(g, target) == 2


def cached_step(layout):
    """One attention layer over a growing cache: turn, append, attend."""
    seq, past, axis = sym("seq"), sym("past"), 1 if layout == "bshd" else 2
    g = Graph("step")
    sizes = {"q": 4, "k": 2, "v": 2}
    q, k, v = (g.input(n, [1, seq, h, 16]) for n, h in sizes.items())
    cos, sin = (g.input(n, [40, 8]) for n in ("cos", "sin"))
    q, k = (g.rope(x, cos, sin, head_dim=16, offset=past) for x in (q, k))
    filled = []
    for name, new in (("keys", k), ("values", v)):
        if layout == "bhsd":
            new = g.transpose(new, axes=(0, 2, 1, 3))
        dims = [1, 40, 2, 16] if layout == "bshd" else [1, 2, 40, 16]
        state = g.state(name, dims, dtype="f16")
        state = g.state_update(state, g.cast(new, dtype="f16"), axis=axis, start=past)
        filled.append(g.narrow(state, axis=axis, start=0, length=past + seq))
    out = g.attention(
        q, *filled, num_heads=4, num_kv_heads=2, head_dim=16, mask_kind="causal", kv_layout=layout
    )
    return g.set_outputs(out)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_a_session_extends_the_cache(layout):
    """Prefill, then steps of one and several tokens, each against the reference device."""
    options = {"binding": DimBinding().set_live("seq", 12).set_live("past", 28)}
    native = Session("cpu").compile(cached_step(layout), options)
    oracle = Session("reference").compile(cached_step(layout), options)
    angle = np.arange(40)[:, None] * 0.3 ** np.arange(8)
    tables = {"cos": np.cos(angle).astype(np.float32), "sin": np.sin(angle).astype(np.float32)}
    past = 0
    for rows in (12, 1, 1, 3, 1):
        arrays = {
            n: draw(past + i, 1, rows, h, 16)
            for i, (n, h) in enumerate((("q", 4), ("k", 2), ("v", 2)))
        }
        (got,) = native.run(arrays | tables, sizes={"past": past})
        (want,) = oracle.run(arrays | tables, sizes={"past": past})
        past += rows
        for name in ("keys", "values"):
            # rotations are rounded alike, so the states are equal bit for bit
            np.testing.assert_array_equal(native.read_state(name), oracle.read_state(name))
        values = heads_first(oracle.read_state("values"), layout)[:, :, :past]
        close(got, want.astype(np.float64), 16, values)


# -- coarse: products of bf16 -----------------------------------------------------------------


def to_bf16(x):
    return x.astype(DType.of("bf16").numpy).astype(np.float64)


@pytest.mark.parametrize(
    ("dims", "kind", "packed"),
    [
        ((1, 130, 301, 4, 2, 128), "causal", False),
        ((2, 45, 45, 6, 2, 64), "causal", False),
        ((1, 9, 70, 2, 1, 32), "causal", False),
        ((1, 97, 97, 2, 2, 96), "none", False),
        ((1, 150, 199, 4, 2, 64), "sliding_window(37)", False),
        ((1, 60, 121, 4, 2, 64), "causal", True),
    ],
)
def test_coarse_attention(dims, kind, packed):
    """Scaled queries, keys and values are rounded to bf16, which leaves exact products; the
    rounding of the weights, which sum up to one, changes a result by 2^-9 of the largest value."""
    batch, rows, keys, heads, kv_heads, dim = dims
    kind, scale = MaskKind.of(kind), 1 / math.sqrt(dim)
    q = draw(1, batch, heads, rows, dim)
    k, v = (draw(n, batch, kv_heads, keys, dim, dtype="f16") for n in (2, 3))
    if packed:
        k, v = (encode(GGUF_SCHEMES["Q8_0"], x.astype(np.float32)).data for x in (k, v))
    plain = [decoded(x) if packed else x for x in (k, v)]
    given = {"q": q, "k": k, "v": v}
    g = Graph("coarse")
    values = [g.input(n, list(a.shape), dtype=DType.of(a.dtype)) for n, a in given.items()]
    out = g.attention(
        *values, num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, mask_kind=kind,
        q_layout="bhsd", kv_layout="bhsd", kv_scheme="Q8_0" if packed else None, coarse=True,
    )  # fmt: skip
    g.set_outputs(out)
    exact = expected(q, *plain, scale, kind)
    if has_bf16_dot(HOST, dim):
        rounded = expected(to_bf16(q * np.float32(scale)), *map(to_bf16, plain), 1.0, kind)
    for target, workers in SETUPS:
        (got,) = Native(g, target, workers, {}).run(given)
        if has_bf16_dot(target, dim):
            assert np.abs(got - rounded).max() <= 2.0**-9 * np.abs(plain[1]).max()
            assert np.abs(got - exact).max() > 1e-5  # or it was not coarse
        else:
            close(got, exact, dim, plain[1])


def test_coarse_attention_keeps_nan_to_its_rows():
    q, k, v = (draw(n, 1, 1, 40, 32, dtype=t) for n, t in ((1, "f32"), (2, "f16"), (3, "f16")))
    q[0, 0, 7, 3] = np.nan
    g = Graph("nan")
    values = [
        g.input(n, [1, 1, 40, 32], dtype=DType.of(a.dtype))
        for n, a in zip("qkv", (q, k, v), strict=True)
    ]
    sizes = {"num_heads": 1, "num_kv_heads": 1, "head_dim": 32}
    layout = {"q_layout": "bhsd", "kv_layout": "bhsd"}
    g.set_outputs(g.attention(*values, **sizes, **layout, mask_kind="causal", coarse=True))
    (got,) = Native(g, HOST, 1, {}).run({"q": q, "k": k, "v": v})
    bad = np.isnan(got[0, 0]).any(axis=1)
    assert bad.nonzero()[0].tolist() == [7]


# -- packed keys and values -------------------------------------------------------------------


def decoded(packed):
    """scale · codes of every block, in f64."""
    blocks = packed.reshape(*packed.shape[:-1], -1, 34)
    scale = blocks[..., :2].copy().view(np.float16).astype(np.float64)
    return (scale * blocks[..., 2:].view(np.int8)).reshape(*packed.shape[:-1], -1)


@pytest.mark.parametrize(
    ("dims", "layout", "kernel"),
    [
        ((1, 1, 300, 4, 2, 128), "bhsd", Decode),
        ((2, 1, 70, 6, 2, 96), "bshd", DecodeHeads),
        ((1, 2, 33, 2, 1, 256), "bhsd", Decode),
        ((1, 130, 200, 4, 2, 64), "bhsd", Prefill),
        ((2, 20, 45, 2, 1, 32), "bshd", Prefill),
    ],
)
def test_packed_keys_and_values(dims, layout, kernel):
    """Blocks are multiplied out exactly in f32 (8 bits of a code, 11 of a scale), so that the
    bound is the one of plain numbers."""
    batch, rows, keys, heads, kv_heads, dim = dims
    scheme, q = GGUF_SCHEMES["Q8_0"], draw(1, batch, heads, rows, dim)
    k, v = (encode(scheme, draw(n, batch, kv_heads, keys, dim)).data for n in (2, 3))
    want = expected(q, decoded(k), decoded(v), 1 / math.sqrt(dim), MaskKind.CAUSAL)
    given = {"q": q, "k": heads_first(k, layout), "v": heads_first(v, layout)}
    g = Graph("packed")
    values = [g.input(n, list(a.shape), dtype=DType.of(a.dtype)) for n, a in given.items()]
    out = g.attention(
        *values, num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, mask_kind="causal",
        q_layout="bhsd", kv_layout=layout, kv_scheme="Q8_0",
    )  # fmt: skip
    g.set_outputs(out)
    for target, workers in SETUPS:
        native = Native(g, target, workers, {})
        assert kernel in {type(s.spec) for s in native.launches}
        (got,) = native.run({n: np.ascontiguousarray(a) for n, a in given.items()})
        close(got, want, dim, decoded(v))


def test_packed_keys_are_not_read_with_gaps():
    g = Graph("gaps")
    q, k = g.input("q", [1, 1, 2, 34]), g.input("k", [1, 34, 1, 9], "u8")
    turned = g.transpose(k, axes=(0, 3, 2, 1))
    rows = g.narrow(q, axis=3, start=0, length=32)
    sizes = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 32}
    g.set_outputs(g.attention(rows, turned, turned, **sizes, kv_scheme="Q8_0"))
    with pytest.raises(UnsupportedError, match="not contiguous"):
        Native(g, HOST, 1, {})
