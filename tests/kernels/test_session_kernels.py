"""Whole graphs through `rlx.Session("cpu")`: kernels, packing, planning and workers together."""

from __future__ import annotations

import numpy as np
import pytest

import rlx
from rlx.ir.graph import Graph


def compare(graph, inputs, tolerance, **options):
    """The CPU against the reference device, as shares of the largest result."""
    rng = np.random.default_rng(5)
    params = {
        n.name: rng.standard_normal(n.output.shape.static_dims).astype(n.output.shape.dtype.numpy)
        for n in graph.sources("param")
    }
    results = []
    for device in ("reference", "cpu"):
        compiled = rlx.Session(device).compile(graph, options if device == "cpu" else None)
        compiled.set_params(params)
        results.append([np.array(r) for r in compiled.run(**inputs)])
    for want, got in zip(*results, strict=True):
        assert got.shape == want.shape and got.dtype == want.dtype
        assert np.abs(got - want).max() <= tolerance * np.abs(want).max()


def draw(*dims, seed=0):
    return np.random.default_rng(seed).standard_normal(dims).astype(np.float32)


@pytest.mark.parametrize("threads", [1, 2])
def test_images(threads):
    g = Graph("images")
    x = g.input("x", ("batch", 3, 32, 32))
    y = g.relu(g.conv(x, g.param("w1", (16, 3, 3, 3)), g.param("b1", (16,)), padding=(1,)))
    y = g.max_pool(y, kernel=(2,))
    y = g.silu(g.conv(y, g.param("w2", (16, 1, 3, 3)), padding=(1,), groups=16))
    up = g.conv_transpose(y, g.param("w3", (16, 8, 2, 2)), stride=(2,))
    small = g.avg_pool(up, kernel=(3,), stride=(2,), padding=(1,), count_include_pad=False)
    g.set_outputs(up, g.resize(small, sizes=(20, 24), mode="linear"))
    # four layers of sums, each off by some √144·ε
    compare(g, {"x": draw(2, 3, 32, 32)}, 5e-6, threads=threads)


@pytest.mark.parametrize("seq", [1, 21])
def test_sequences(seq):
    g = Graph("sequences")
    x = g.input("x", ("batch", seq, 32))
    mixed = g.depthwise_conv1d_causal(
        x, g.param("taps", (32, 4)), g.input("past", ("batch", 3, 32))
    )
    b = g.matmul(mixed, g.param("to_b", (32, 16)))
    delta = g.softplus(mixed)
    a = g.neg(g.exp(g.param("a", (32, 16))))
    y, h = g.selective_scan(mixed, delta, a, b, b, g.param("d", (32,)), has_d=True)
    q = g.l2_norm(g.reshape(y, shape=("batch", seq, 2, 16)))
    gate = g.log(g.sigmoid(g.matmul(y, g.param("gate", (32, 2)))))
    o, s = g.gated_delta_net(q, q, q, gate, g.exp(gate), state_size=16)
    g.set_outputs(y, h, o, s)
    compare(g, {"x": draw(2, seq, 32), "past": draw(2, 3, 32, seed=1)}, 2e-5)


def test_spectra_and_systems():
    g = Graph("spectra")
    x = g.input("x", ("batch", 30, 9))
    spectrum = g.rfft(g.transpose(x, axes=(0, 2, 1)))  # a view: it is copied first
    power = g.add(g.square(g.real(spectrum)), g.square(g.imag(spectrum)))
    m = g.matmul(power, g.param("w", (16, 9)))
    eye = g.constant(1e3 * np.eye(9, dtype=np.float32))
    g.set_outputs(power, g.irfft(spectrum, n=30), g.solve(g.add(m, eye), power))
    # squares double a relative error, the systems are well conditioned
    compare(g, {"x": draw(3, 30, 9)}, 1e-5)
