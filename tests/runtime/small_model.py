"""A small model with a state, dynamic dims and a choice at its end, for tests of the runtime."""

from __future__ import annotations

import numpy as np

import rlx
from rlx import GraphModule

WIDTH, OUT, KEPT = 32, 8, 64


def build(layers: int = 2) -> GraphModule:
    def layer(g: GraphModule, x: object, i: int) -> object:
        h = g.rms_norm(x, g.param(f"layers.{i}.gamma", [WIDTH]))
        up = g.linear(h, g.param(f"layers.{i}.up", [WIDTH, 2 * WIDTH]), activation="silu")
        return x + g.linear(up, g.param(f"layers.{i}.down", [2 * WIDTH, WIDTH]))

    def body(g: GraphModule) -> dict[str, object]:
        x = g.input("x", ["batch", "seq", WIDTH])
        for i in range(layers):
            x = g.named(f"layers.{i}", lambda b, x=x, i=i: layer(b, x, i))
        y = g.linear(x, g.param("head", [WIDTH, OUT]))
        return {"y": y}

    return GraphModule.define("small", body)


def weights(layers: int = 2, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)

    def random(*dims: int) -> np.ndarray:
        return (rng.normal(size=dims) / np.sqrt(dims[0])).astype(np.float32)

    params = {"head": random(WIDTH, OUT)}
    for i in range(layers):
        params[f"layers.{i}.gamma"] = 1 + 0.1 * random(WIDTH)
        params[f"layers.{i}.up"] = random(WIDTH, 2 * WIDTH)
        params[f"layers.{i}.down"] = random(2 * WIDTH, WIDTH)
    return params


def expected(x: np.ndarray, given: dict[str, np.ndarray], layers: int = 2) -> np.ndarray:
    """The model in f64."""
    x = x.astype(np.float64)
    for i in range(layers):
        h = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * given[f"layers.{i}.gamma"]
        up = h @ given[f"layers.{i}.up"]
        x = x + (up / (1 + np.exp(-up))) @ given[f"layers.{i}.down"]
    return x @ given["head"]


def component(batch: int = 1, seq: int = 4) -> rlx.ModelComponent:
    return rlx.ModelComponent(rlx.ModelVariant.prefill(batch, seq), rlx.KernelDispatchConfig())


def inputs(batch: int, seq: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(batch, seq, WIDTH)).astype(np.float32)


# f32 sums of at most 64 products of order 1, some ten roundings deep
CLOSE = {"rtol": 2e-5, "atol": 2e-5}
