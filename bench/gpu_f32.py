"""f32 on a GPU: products of all kinds that training has, and an encoder in the shape of MiniLM.

Torch computes products of f32 in f32; ours are three products of f16 (docs/cuda.md says how exact
that is)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from bench.peers import torch_gpu

ENCODER = {"layers": 6, "width": 384, "heads": 12, "inner": 1536}
BATCH, LENGTH = 32, 128
CALLS = 4  # of a product in a graph
PRODUCTS = {  # shapes of x and w, and what is computed, as einsum says it
    "4096x1536x384": ((4096, 384), (1536, 384), "mk,nk->mn"),
    "4096x384x1536": ((4096, 1536), (384, 1536), "mk,nk->mn"),
    "4096x4096x4096": ((4096, 4096), (4096, 4096), "mk,nk->mn"),
    "gradient 1536x384x4096": ((4096, 1536), (4096, 384), "km,kn->mn"),
    "scores 384 of 128x128x32": ((32, 12, 128, 32), (32, 12, 128, 32), "abmk,abnk->abmn"),
}


def built(g: Any, formula: str, x: Any, w: Any) -> Any:
    left, right = formula.split("->")[0].split(",")

    def turned(v: Any, is_so: bool) -> Any:
        rank = v.shape.rank
        return g.transpose(v, (*range(rank - 2), rank - 1, rank - 2)) if is_so else v

    return g.matmul(turned(x, left[-1] != "k"), turned(w, right[-1] == "k"))


def products(device: Any, torch: Any, turns: Callable[..., list[float]], rounds: int) -> None:
    for name, (left, right, formula) in PRODUCTS.items():
        x, w = (device.rng.standard_normal(d).astype(np.float32) for d in (left, right))

        def build(g: Any, shapes: Any = (left, right), f: str = formula) -> list[Any]:
            pairs = [[g.input(f"{n}{i}", s) for n, s in zip("xw", shapes, strict=True)]
                     for i in range(CALLS)]  # fmt: skip
            return [built(g, f, *pair) for pair in pairs]

        given = {f"{n}{i}": a for i in range(CALLS) for n, a in (("x", x), ("w", w))}
        made = device.graph(build, given, {})
        runs = [device.timed(*made, CALLS)]
        if torch is not None:
            a, b = (torch.tensor(v, device="cuda") for v in (x, w))
            runs.append(
                torch_gpu.graph_of(torch, lambda a=a, b=b, f=formula: torch.einsum(f, a, b), CALLS)
            )
        found = turns(runs, rounds)
        [got] = made[0].run(given)[:1]
        error = np.abs(got - np.einsum(formula, *(v.astype(np.float64) for v in (x, w)),
                                       optimize=True)).max() / np.abs(got).max()  # fmt: skip
        letters = formula.split("->")[0].replace(",", "")
        sizes = dict(zip(letters, left + right, strict=True))
        flops = 2.0 * np.prod([float(n) for n in sizes.values()])
        shown = [f"{flops / t / 1e12:.0f}" for t in found]
        print(f"f32 product {name}: {' against '.join(shown)} TFLOP/s, error {error:.1e}")


def encoder_graph(g: Any) -> list[Any]:
    width, inner, heads = ENCODER["width"], ENCODER["inner"], ENCODER["heads"]
    x = g.input("x", [BATCH, LENGTH, width])

    def linear(v: Any, name: str, n: int, k: int) -> Any:
        return g.add(g.matmul(v, g.transpose(g.param(name, [n, k]), (1, 0))),
                     g.param(f"{name}_bias", [n]))  # fmt: skip

    def norm(v: Any, name: str) -> Any:
        return g.layer_norm(v, g.param(f"{name}_gamma", [width]), g.param(f"{name}_beta", [width]))

    for i in range(ENCODER["layers"]):
        q, k, v = (linear(x, f"{n}{i}", width, width) for n in "qkv")
        o = g.attention(q, k, v, num_heads=heads, num_kv_heads=heads, head_dim=width // heads)
        x = norm(g.add(x, linear(o, f"o{i}", width, width)), f"first{i}")
        y = linear(g.gelu(linear(x, f"up{i}", inner, width)), f"down{i}", width, inner)
        x = norm(g.add(x, y), f"second{i}")
    return [x]


def torch_encoder(torch: Any, params: Any, x: Any) -> Callable[[], Any]:
    p = {n: torch.tensor(v, device="cuda") for n, v in params.items()}
    heads, f = ENCODER["heads"], torch.nn.functional

    def run(x: Any) -> Any:
        for i in range(ENCODER["layers"]):
            q, k, v = (
                f.linear(x, p[f"{n}{i}"], p[f"{n}{i}_bias"])
                .view(BATCH, LENGTH, heads, -1).transpose(1, 2)
                for n in "qkv"
            )  # fmt: skip
            o = f.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)
            o = f.linear(o, p[f"o{i}"], p[f"o{i}_bias"])
            x = f.layer_norm(x + o, x.shape[-1:], p[f"first{i}_gamma"], p[f"first{i}_beta"])
            y = f.gelu(f.linear(x, p[f"up{i}"], p[f"up{i}_bias"]))
            y = f.linear(y, p[f"down{i}"], p[f"down{i}_bias"])
            x = f.layer_norm(x + y, x.shape[-1:], p[f"second{i}_gamma"], p[f"second{i}_beta"])
        return x

    compiled, given = torch.compile(run), torch.tensor(x, device="cuda")

    def call() -> Any:
        with torch.no_grad():
            return compiled(given)

    return call


def encoder(device: Any, torch: Any, turns: Callable[..., list[float]], rounds: int) -> list[float]:
    """Seconds of a batch: ours, and the peer's."""
    from rlx import Graph

    g = Graph("shapes")
    encoder_graph(g)
    params = {}
    for node in g.sources("param"):
        dims = node.output.shape.static_dims
        values = device.rng.standard_normal(dims) / np.sqrt(dims[-1] if len(dims) > 1 else 100)
        params[node.name] = (values + (1 if "gamma" in node.name else 0)).astype(np.float32)
    x = device.rng.standard_normal((BATCH, LENGTH, ENCODER["width"])).astype(np.float32)
    made = device.graph(encoder_graph, {"x": x}, params)
    runs = [device.timed(*made, 1)]
    if torch is not None:
        call = torch_encoder(torch, params, x)
        call()
        runs.append(torch_gpu.graph_of(torch, call, 1))
        [got] = made[0].run({"x": x})
        far = np.abs(got - call().cpu().numpy()).max()
        print(f"f32 encoder: the largest difference from torch is {far:.1e}")
    return turns(runs, rounds)
