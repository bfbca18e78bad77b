"""Checks of kernels at sizes that real networks have, which only a GPU computes in time. Added to
those of `checks_on_gpu`; the stand-in has small ones in its own tests."""

from __future__ import annotations

from typing import Any

import numpy as np
from checks_on_gpu import CHECKS, check, compiled, graph_of, random

from rlx.ir.dtype import DType
from rlx.ir.graph import Graph
from rlx.ir.interp import evaluate

NAMES: list[str] = []  # of the checks here


def large(function: Any) -> Any:
    NAMES.append(function.__name__.replace("_", " "))
    return check(function)


# pictures, channels, size, filters, kernel, options: layers of ResNet-50, and one of MobileNet
CONVOLUTIONS: list[tuple[int, int, int, int, int, dict[str, Any]]] = [
    (4, 3, 224, 64, 7, {"stride": (2,), "padding": (3,)}),
    (4, 64, 56, 64, 3, {"padding": (1,)}),
    (4, 128, 56, 128, 3, {"padding": (1,), "stride": (2,)}),
    (3, 512, 7, 2048, 1, {}),
    (3, 512, 7, 512, 3, {"padding": (1,)}),
    (2, 96, 56, 96, 3, {"padding": (1,), "groups": 96}),
]


@large
def convolutions_of_networks() -> None:
    """Results are of size 1 to 5. Tensor cores truncate when they add: some 1e-5 of the largest
    for f32; bf16 is rounded once at the end."""
    for pictures, channels, size, filters, kernel, how in CONVOLUTIONS:
        for dtype in ("f32", "bf16"):
            element = DType.of(dtype).numpy
            dims = (filters, channels // how.get("groups", 1), kernel, kernel)

            shape = [pictures, channels, size, size]

            def build(
                g: Graph, shape: Any = shape, dims: Any = dims, dtype: str = dtype, how: Any = how
            ) -> Any:
                x = g.input("x", shape, dtype)
                w, b = g.param("w", list(dims), dtype), g.param("b", [dims[0]], dtype)
                return g.conv(x, w, b, **how)

            graph = graph_of(build)
            w = (random(*dims, seed=1) / np.sqrt(np.prod(dims[1:]))).astype(element)
            params = {"w": w, "b": random(filters, seed=2).astype(element)}
            x = random(*shape, seed=3).astype(element)
            wide = {n: a.astype(np.float32) for n, a in {"x": x, **params}.items()}
            [want] = evaluate(whole(dims, how, x.shape), wide)
            made = compiled(graph).set_params(params)
            for _ in range(3):
                [got] = made.run(x=x)
                far = np.abs(got.astype(np.float32) - want)
                allowed = 1e-4 if dtype == "f32" else 2.0**-8 * np.abs(want) + 1e-4
                assert (far <= allowed).all(), (channels, size, kernel, dtype, far.max())


def whole(dims: Any, how: Any, shape: Any) -> Graph:
    """The convolution in f32."""

    def build(g: Graph) -> Any:
        x, w = g.input("x", list(shape)), g.param("w", list(dims))
        return g.conv(x, w, g.param("b", [dims[0]]), **how)

    return graph_of(build)


@large
def attention_of_f32_encoders() -> None:
    """Padding as a mask, sizes that are no multiples of tiles, and numbers of any size. Weights are
    powers of two by an instruction with an error of 2⁻²², and sums of up to 333 are truncated."""
    for heads, dim, length in ((12, 32, 128), (8, 64, 333)):

        def build(g: Graph, heads: int = heads, dim: int = dim, length: int = length) -> Any:
            q, k, v = (g.input(n, [3, length, heads * dim]) for n in "qkv")
            mask = g.input("mask", [3, 1, 1, length], "bool")
            return g.attention(q, k, v, mask, num_heads=heads, num_kv_heads=heads, head_dim=dim,
                               mask_kind="custom")  # fmt: skip

        graph = graph_of(build)
        given: dict[str, Any] = {
            n: random(3, length, heads * dim, seed=i) for i, n in enumerate("qkv")
        }
        given["v"] *= np.array([1, 1e8, 1e-8], np.float32)[:, None, None]
        lengths = np.array([length, length // 2, 70])
        given["mask"] = (np.arange(length) < lengths[:, None])[:, None, None]
        [want] = evaluate(graph, given)
        made = compiled(graph)
        for _ in range(3):
            [got] = made.run(given)
            for ours, theirs in zip(got, want, strict=True):
                assert np.abs(ours - theirs).max() <= 2**-16 * np.abs(theirs).max()


@large
def products_of_pairs_of_activations() -> None:
    for dtype, bits in (("f32", 20), ("bf16", 8), ("f16", 11)):

        def build(g: Graph, dtype: str = dtype) -> Any:
            x, w = g.input("x", [6, 200, 96], dtype), g.input("w", [6, 130, 96], dtype)
            return g.matmul(x, g.transpose(w, (0, 2, 1)))

        element = DType.of(dtype).numpy
        x, w = (random(6, n, 96, seed=n).astype(element) for n in (200, 130))
        want = x.astype(np.float64) @ w.astype(np.float64).transpose(0, 2, 1)
        made = compiled(graph_of(build))
        for _ in range(3):
            [got] = made.run(x=x, w=w)
            far = np.abs(got.astype(np.float64) - want)
            assert (far <= 2.0**-bits * np.abs(want) + 1e-4).all(), (dtype, far.max())


assert all(name in CHECKS for name in NAMES)
