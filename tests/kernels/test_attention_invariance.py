"""A row's result has the same bits however many rows run with it, on any number of workers."""

from __future__ import annotations

import numpy as np
import pytest
from program_support import HOST, TARGETS, Native

from rlx.backends.cpu.kernels.attention.decode_heads import DecodeHeads
from rlx.backends.cpu.kernels.attention.tiles import has_bf16_dot
from rlx.ir.dtype import DType
from rlx.ir.graph import Graph
from rlx.ir.quant.scheme import GGUF_SCHEMES, encode

LENGTH = 600  # several KV blocks and splits, and no multiple of them
PAGE = 64
CHUNKS = (1, 2, 3, 7, 13, 64, 512)
SETUPS = [(target, workers) for target in TARGETS for workers in (1, 2, 3)]


def draw(seed, *dims, dtype="f32"):
    return np.random.default_rng(seed).standard_normal(dims).astype(DType.of(dtype).numpy)


def same_bits(got, want):
    assert got.dtype == want.dtype and got.shape == want.shape
    as_bytes = [np.ascontiguousarray(x).view(np.uint8) for x in (got, want)]
    np.testing.assert_array_equal(*as_bytes)


class Sequence:
    """Queries, keys and values of one sequence, and attention to its first keys."""

    def __init__(self, heads, kv_heads, dim, kv="f16", length=LENGTH, sinks=False, **options):
        self.heads, self.kv_heads, self.dim, self.kv = heads, kv_heads, dim, kv
        self.length, self.options = length, {"mask_kind": "causal", **options}
        self.q = draw(1, 1, length, heads, dim) * 2
        self.k, self.v = (draw(seed, 1, kv_heads, length, dim) for seed in (2, 3))
        self.sinks = {"sinks": draw(4, heads)} if sinks else {}
        if kv == "q8_0":
            scheme = GGUF_SCHEMES["Q8_0"]
            self.k, self.v = (encode(scheme, x).data for x in (self.k, self.v))
            self.options["kv_scheme"] = scheme
        else:
            self.k, self.v = (x.astype(DType.of(kv).numpy) for x in (self.k, self.v))

    def graph(self, queries="seq", keys="past_seq + seq", layout="bhsd"):
        g = Graph("attention")
        dtype = DType.of(self.k.dtype)
        q = g.input("q", [1, queries, self.heads, self.dim])
        axes = [self.kv_heads, keys] if layout == "bhsd" else [keys, self.kv_heads]
        k, v = (g.input(n, [1, *axes, self.k.shape[-1]], dtype) for n in "kv")
        sinks = [g.input("sinks", [self.heads])] if self.sinks else []
        out = g.attention(
            q, k, v, *sinks, num_heads=self.heads, num_kv_heads=self.kv_heads, head_dim=self.dim,
            kv_layout=layout, has_sinks=bool(sinks), **self.options,
        )  # fmt: skip
        g.set_outputs(out)
        return g

    def native(self, target, workers):
        bounds = {"seq": self.length, "past_seq": self.length}
        return Native(self.graph(), target, workers, bounds)

    def inputs(self, first, last):
        """Queries first … last, and the keys before the last."""
        return {"q": self.q[:, first:last], "k": self.k[:, :, :last], "v": self.v[:, :, :last],
                **self.sinks}  # fmt: skip

    def run(self, native, first, last):
        (out,) = native.run(self.inputs(first, last), {"seq": last - first, "past_seq": first})
        return out


def check(sequence, chunks=CHUNKS, setups=SETUPS):
    """Chunks of every size against the whole, with dynamic and with fixed numbers of queries."""
    whole = {}
    for target, workers in setups:
        native, length = sequence.native(target, workers), sequence.length
        want = sequence.run(native, 0, length)
        # every number of workers gives the same
        same_bits(want, whole.setdefault(target, want))
        for size in chunks:
            starts = range(0, length, size) if size > 1 else range(0, length, 37)
            for first in starts:
                last = min(first + size, length)
                same_bits(sequence.run(native, first, last), want[:, first:last])
        for size in (2, 5, 9):
            first = length - size
            fixed = Native(sequence.graph(size, length), target, workers, {})
            same_bits(fixed.run(sequence.inputs(first, length))[0], want[:, first:])


CASES = {
    "f32": Sequence(4, 2, 64, "f32"),
    "f16": Sequence(6, 2, 64),
    "bf16": Sequence(3, 1, 128, "bf16"),
    "q8_0": Sequence(9, 3, 64, "q8_0"),
    "one query head each": Sequence(2, 2, 96),
    "many query heads": Sequence(16, 1, 64),
    "uneven head": Sequence(4, 2, 80),
    "narrow head": Sequence(4, 2, 6, "f16"),
    "odd head": Sequence(2, 1, 33, "f32"),
    "window": Sequence(4, 2, 64, mask_kind="sliding_window(100)"),
    "short window": Sequence(4, 2, 64, "q8_0", mask_kind="sliding_window(3)"),
    "softcap": Sequence(4, 2, 32, "f32", softcap=5.0),
    "sinks": Sequence(4, 2, 32, sinks=True, mask_kind="sliding_window(150)"),
}


@pytest.mark.parametrize("name", CASES)
def test_attention_in_chunks(name):
    check(CASES[name])


def check_neighbours(sequence, setups):
    """Keys whose heads are neighbours in memory give what heads one after the other give: for few
    queries, whose heads are then read together, on any number of workers."""
    for target, workers in setups:
        bounds = {"seq": sequence.length, "past_seq": sequence.length}
        native = sequence.native(target, 1)
        near = Native(sequence.graph(layout="bshd"), target, workers, bounds)
        assert any(isinstance(s.spec, DecodeHeads) for s in near.launches)

        def inputs(first, last):
            given = sequence.inputs(first, last)
            turned = {n: np.ascontiguousarray(given[n].swapaxes(1, 2)) for n in "kv"}
            return {**given, **turned}

        for first in (0, 17, 126, 127, 128, 255, 256, 300, 511, 512, 598, sequence.length - 1):
            sizes = {"seq": 1, "past_seq": first}
            (got,) = near.run(inputs(first, first + 1), sizes)
            same_bits(got, sequence.run(native, first, first + 1))
        first = sequence.length - 2
        fixed = Native(sequence.graph(2, sequence.length, layout="bshd"), target, workers, {})
        (got,) = fixed.run(inputs(first, sequence.length))
        same_bits(got, sequence.run(native, first, sequence.length))


NEIGHBOURS = [name for name, s in CASES.items() if s.kv_heads > 1] + ["eight heads", "long"]


@pytest.mark.parametrize("name", NEIGHBOURS)
def test_heads_that_are_neighbours(name):
    more = {"eight heads": Sequence(8, 8, 32), "long": Sequence(4, 2, 32, length=1700)}
    setups = [(target, workers) for target in TARGETS for workers in (1, 2, 3, 5, 16)]
    check_neighbours({**CASES, **more}[name], setups)


@pytest.mark.skipif(not has_bf16_dot(HOST, 64), reason="no bf16 dot product")
@pytest.mark.parametrize("kv", ["f16", "bf16", "q8_0"])
def test_heads_that_are_neighbours_in_bf16(kv):
    sequence = Sequence(6, 2, 64, kv, coarse=True, mask_kind="sliding_window(290)")
    check_neighbours(sequence, [(HOST, workers) for workers in (1, 2, 5)])


def paged(sequence, target, workers, coarse=False):
    """Tokens of the sequence and of a second one, in pages that lie in any order."""
    s, pages = sequence, -(-sequence.length // PAGE)
    g = Graph("paged")
    q = g.input("q", [1, "seq", s.heads * s.dim])
    cache = [1, s.kv_heads, 2 * pages * PAGE, s.dim]
    k, v = (g.input(n, cache, DType.of(s.k.dtype)) for n in "kv")
    table = g.input("table", [2, pages], "i32")
    rows, positions = (g.input(n, ["seq"], "i32") for n in ("rows", "positions"))
    out = g.paged_attention(
        q, k, v, table, rows, positions, num_heads=s.heads, num_kv_heads=s.kv_heads,
        head_dim=s.dim, page=PAGE, window=100 if "window" in str(s.options) else 0, coarse=coarse,
    )  # fmt: skip
    g.set_outputs(out)
    native = Native(g, target, workers, {"seq": 2 * s.length})
    order = np.random.default_rng(9).permutation(2 * pages).reshape(2, pages).astype(np.int32)
    given = {"table": order}
    for name, x in (("k", s.k), ("v", s.v)):
        given[name] = np.zeros(cache, x.dtype)
        for page, at in enumerate(order[1]):
            part = x[:, :, page * PAGE : (page + 1) * PAGE]
            given[name][:, :, at * PAGE : at * PAGE + part.shape[2]] = part

    def run(tokens):
        """Tokens at these positions, each behind one of the other sequence."""
        both = np.stack([np.zeros_like(tokens), tokens], 1).reshape(-1).astype(np.int32)
        numbers = {"positions": both, "rows": np.tile(np.array([0, 1], np.int32), len(tokens))}
        if len(tokens) > 20:  # runs of neighbours too
            numbers = {"positions": tokens, "rows": np.ones(len(tokens), np.int32)}
        q = s.q[0, numbers["positions"]].reshape(1, -1, s.heads * s.dim)
        (out,) = native.run({**given, **numbers, "q": q}, {"seq": q.shape[1]})
        return out.reshape(-1, s.heads, s.dim)[numbers["rows"] == 1]

    return run


@pytest.mark.parametrize("name", ["f32", "f16", "bf16", "uneven head", "window"])
def test_pages_give_what_one_cache_gives(name):
    sequence = CASES[name]
    for target, workers in SETUPS[::2]:
        want = sequence.run(sequence.native(target, workers), 0, sequence.length)[0]
        run = paged(sequence, target, workers)
        for tokens in (np.arange(sequence.length), np.arange(590, 600), np.array([3, 127, 128])):
            same_bits(run(tokens.astype(np.int32)), want[tokens])


@pytest.mark.skipif(not has_bf16_dot(HOST, 64), reason="no bf16 dot product")
@pytest.mark.parametrize("kv", ["f16", "bf16", "q8_0"])
@pytest.mark.parametrize("mask", ["causal", "sliding_window(90)"])
def test_attention_in_bf16(kv, mask):
    check(Sequence(6, 2, 64, kv, coarse=True, mask_kind=mask), setups=[(HOST, 1), (HOST, 2)])
