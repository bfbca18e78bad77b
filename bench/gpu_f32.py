"""f32 on a GPU: products of all kinds that training has, an encoder in the shape of MiniLM, and
convolutions (those in bf16 too).

Torch computes products of f32 in f32; ours are three products of f16 (docs/cuda.md says how exact
that is)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
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


CONVOLUTIONS = {  # pictures, channels, size, filters, kernel, stride, groups
    "resnet 7x7 /2": (32, 3, 224, 64, 7, 2, 1),
    "resnet 3x3, 64": (32, 64, 56, 64, 3, 1, 1),
    "resnet 3x3, 256": (32, 256, 14, 256, 3, 1, 1),
    "resnet 1x1, 256 to 64": (32, 256, 56, 64, 1, 1, 1),
    "depthwise 3x3, 96": (32, 96, 56, 96, 3, 1, 96),
}


def convolutions(
    device: Any, torch: Any, turns: Callable[..., list[float]], rounds: int, dtype: str
) -> None:
    """Microseconds of a convolution, and torch's, which computes f32 in f32."""
    for name, (count, channels, size, filters, kernel, stride, groups) in CONVOLUTIONS.items():
        x = device.rng.standard_normal((count, channels, size, size))
        w = device.rng.standard_normal((filters, channels // groups, kernel, kernel)) / kernel
        how = {"stride": (stride,), "padding": (kernel // 2,), "groups": groups}
        element = ml_dtypes.bfloat16 if dtype == "bf16" else np.float32

        def build(g: Any, how: Any = how, xs: Any = x.shape, ws: Any = w.shape) -> list[Any]:
            return [g.conv(g.input("x", list(xs), dtype), g.param("w", list(ws), dtype), **how)]

        made = device.graph(build, {"x": x.astype(element)}, {"w": w.astype(element)})
        runs = [device.timed(*made, 1)]
        if torch is not None:
            kind = torch.bfloat16 if dtype == "bf16" else torch.float32
            a, b = (torch.tensor(v, device="cuda", dtype=kind) for v in (x, w))

            def call(
                a: Any = a, b: Any = b, s: int = stride, k: int = kernel, m: int = groups
            ) -> Any:
                return torch.nn.functional.conv2d(a, b, stride=s, padding=k // 2, groups=m)

            runs.append(torch_gpu.graph_of(torch, call, 1))
        found = turns(runs, rounds)
        print(
            f"convolution {name}, {dtype}: {' against '.join(f'{t * 1e6:.0f}' for t in found)} us"
        )


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
