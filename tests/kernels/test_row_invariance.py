"""Norms, softmax, gates, rotary embeddings and recurrences: the same bits for a row (a token)
however many run with it, on any number of workers."""

from __future__ import annotations

import numpy as np
import pytest
from program_support import SETUPS, TARGETS, Native
from test_attention_invariance import draw, same_bits
from test_recurrent import delta_net, scan

from rlx.ir.graph import Graph

ROWS = 70


def rms_norm(g, x, width):
    return g.rms_norm(x, g.constant(draw(2, width)))


def layer_norm(g, x, width):
    return g.layer_norm(x, g.constant(draw(2, width)), g.constant(draw(3, width)))


def residual_norm(g, x, width):
    return g.fused_residual_rms_norm(x, g.tanh(x), g.constant(draw(2, width)))


def residual_layer_norm(g, x, width):
    gamma, beta = (g.constant(draw(seed, width)) for seed in (2, 3))
    return g.fused_residual_layer_norm(x, x * 0.5, gamma, beta)


def gate(g, x, width):
    return g.fused_gated_act(g.concat(x, g.gelu(x), axis=2), activation="silu")


def softmax(g, x, width):
    return g.softmax(g.tanh(x * 0.1) * 30.0)


def head_norm(g, x, width):
    """The norm of every head, then a rotary embedding."""
    rows = x.shape.dims[1]
    heads = x.reshape(1, rows, width // 16, 16)
    return g.rms_norm(heads, g.constant(draw(2, 16))).reshape(1, rows, width)


def lengths(g, x, width):
    return (x * x).sum(axis=2, keepdims=True).rsqrt() * x


OPS = (rms_norm, layer_norm, residual_norm, residual_layer_norm, gate, softmax, head_norm, lengths)


def graph(op, rows, width):
    g = Graph(op.__name__)
    found = op(g, g.input("x", [1, rows, width]), width)
    g.set_outputs(*(found if isinstance(found, tuple | list) else [found]))
    return g


@pytest.mark.parametrize("width", [48, 80, 576, 2048, 20000])
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.__name__)
def test_rows_beside_others(op, width):
    if op is head_norm and width == 20000:
        width = 8192
    x = draw(1, 1, ROWS, width) * 3
    for target in TARGETS:
        want = None
        for workers in (1, 2, 3):
            native = Native(graph(op, "seq", width), target, workers, {"seq": ROWS})
            whole = native.run({"x": x}, {"seq": ROWS})
            want = want or whole
            for first, last in ((0, ROWS), (3, 4), (10, 17), (0, 64)):
                for found, expected in zip(
                    native.run({"x": x[:, first:last]}, {"seq": last - first}), want, strict=True
                ):
                    same_bits(found, expected[:, first:last])
            for count in (1, 2, 7):
                fixed = Native(graph(op, count, width), target, workers, {})
                for found, expected in zip(fixed.run({"x": x[:, :count]}), want, strict=True):
                    same_bits(found, expected[:, :count])


def in_chunks(native, arrays, size, tokens, state, constant=()):
    """Results of chunks of tokens, the state handed on."""
    given, seq, outs = dict(arrays), arrays[tokens[0]].shape[1], []
    for first in range(0, seq, size):
        last = min(first + size, seq)
        part = {n: a[:, first:last] if n in tokens else a for n, a in given.items()}
        out, given[state] = native(last - first).run(part)
        outs.append(out)
    return np.concatenate(outs, axis=1), given[state]


@pytest.mark.parametrize("dtype", ["f32", "f16"])
@pytest.mark.parametrize("size", [16, 64, 24, 5])
def test_delta_net_in_chunks(size, dtype):
    _, arrays = delta_net(2, 37, 3, size, dtype=dtype)
    for target, workers in SETUPS[::2]:

        def native(seq, target=target, workers=workers):
            return Native(delta_net(2, seq, 3, size, dtype=dtype)[0], target, workers, {})

        want = native(37).run(arrays)
        for chunk in (1, 7, 16):
            found = in_chunks(native, arrays, chunk, ("q", "k", "v", "g", "beta"), "state")
            for got, expected in zip(found, want, strict=True):
                same_bits(got, expected)


@pytest.mark.parametrize("size", [16, 128, 7])
def test_selective_scan_in_chunks(size):
    _, arrays = scan(2, 37, 24, size)
    for target, workers in SETUPS[::2]:

        def native(seq, target=target, workers=workers):
            return Native(scan(2, seq, 24, size)[0], target, workers, {})

        want = native(37).run(arrays)
        for chunk in (1, 7, 16):
            found = in_chunks(native, arrays, chunk, ("u", "delta", "b", "c"), "state")
            for got, expected in zip(found, want, strict=True):
                same_bits(got, expected)


@pytest.mark.parametrize("length", [1, 2, 3, 5, 18, 67])
def test_zeros_that_pad_a_column_change_nothing(length):
    """Mean pooling: the sum over tokens, and the same with padding behind them."""
    g = Graph("pool")
    g.set_outputs(g.input("x", [1, "seq", 1100]).sum(axis=1))
    x = np.zeros((1, 300, 1100), np.float32)
    x[:, :length] = draw(1, 1, length, 1100) * 10
    for target, workers in SETUPS[1::3]:
        native = Native(g, target, workers, {"seq": 300})
        (want,) = native.run({"x": x[:, :length]}, {"seq": length})
        for seq in (length + 1, length + 6, 300):
            same_bits(native.run({"x": x[:, :seq]}, {"seq": seq})[0], want)


def centred(g, x):
    found = g.sub(x, g.mean(x, axis=(-1,), keepdims=True))
    return g.sum(g.square(found), axis=(-1,)), found


def two_axes(g, x):
    """A factor of one axis keeps both from becoming one."""
    return g.sum(g.reshape(x, shape=(-1, 24, 8200)) * g.constant(draw(5, 24, 1)), axis=(1, 2))


LONG = {
    "sum": lambda g, x: g.sum(x, axis=(1,)),
    "product": lambda g, x: g.apply("prod", g.tanh(x) * 1e-4 + 1.0, axis=(1,)),
    "softmax": lambda g, x: g.softmax(g.tanh(x)),
    "centred": centred,
    "two axes": two_axes,
}


@pytest.mark.parametrize("name", LONG)
def test_long_rows_are_summed_in_one_order(name):
    """Few rows are split between workers, many are not. What is left of large numbers that cancel
    shows every change of order, also that of sums in f64."""
    x = draw(1, 9, 24 * 8200) * 300
    x[:, 0], x[:, 70_000], x[:, -1] = 2.0**60, 2.0**59, -(2.0**60 + 2.0**59)
    for target in TARGETS:
        want = None
        for workers, rows in ((1, 9), (1, 1), (2, 1), (2, 3), (3, 2), (5, 1), (5, 9)):
            g = Graph(name)
            found = LONG[name](g, g.input("x", [rows, "seq" if name == "sum" else x.shape[1]]))
            g.set_outputs(*(found if isinstance(found, tuple) else [found]))
            native = Native(g, target, workers, {"seq": 400_000})
            splits = any(getattr(s.spec, "split", None) for s in native.launches)
            assert splits == (workers > 1 and rows < 2 * workers)
            outs = native.run({"x": x[:rows]}, {"seq": x.shape[1]} if name == "sum" else {})
            want = want or outs
            for got, expected in zip(outs, want, strict=True):
                same_bits(got, expected[:rows])
