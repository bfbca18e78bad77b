"""Values that are hard to get right, and the distance of floats in units of the last place."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from program_support import HOST, TARGETS, Native, reference

from rlx.errors import RlxError
from rlx.ir.dtype import DType
from rlx.ir.graph import Graph
from rlx.llvm.target import Target

BOTH = [(t, n) for t, n in zip(TARGETS, (2, 1), strict=False)]
"""Each target that runs here once, with different numbers of workers."""
_MANTISSA = {"f64": 52, "f32": 23, "f16": 10, "bf16": 7, "f8e4m3": 3, "f8e5m2": 2}
_LEAST = {"f64": -1022, "f32": -126, "f16": -14, "bf16": -126, "f8e4m3": -6, "f8e5m2": -14}


def awkward(dtype: DType, size: int, seed: int = 0) -> np.ndarray:
    """Small numbers, and among them the bounds of the type, infinities, NaN, zeros, denormals."""
    rng = np.random.default_rng(seed)
    if dtype.kind == "bool":
        return rng.integers(0, 2, size).astype(bool)
    if dtype.kind == "complex":
        return (rng.standard_normal(size) + 1j * rng.standard_normal(size)).astype(dtype.numpy)
    if dtype.is_integer:
        info: Any = np.iinfo(dtype.numpy)
        values = rng.integers(-5 if dtype.kind == "int" else 0, 11, size).astype(dtype.numpy)
        edges = np.array([info.min, info.max, 0, 1, info.max - 1, info.min + 1], dtype.numpy)
        values[:6], values[20:26] = edges, rng.permutation(edges)
        values[30:36] = rng.integers(info.min, info.max, 6, dtype.numpy, endpoint=True)
        return values
    real = rng.standard_normal(size) * 3
    special = [np.inf, -np.inf, np.nan, 0.0, -0.0, 1.0, -1.5, 2.5]
    real[:8], real[20:28] = special, rng.permutation(special)
    real[8:14] = [1e-40, -1e-40, 60000.0, -100.0, 88.0, -88.0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return real.astype(dtype.numpy)


def plain(dtype: DType | str, *shape: int, seed: int = 0) -> np.ndarray:
    """Small numbers of either sign."""
    dtype, rng = DType.of(dtype), np.random.default_rng(seed)
    if dtype.kind == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    if dtype.is_integer:
        return rng.integers(0 if dtype.kind == "uint" else -9, 10, shape).astype(dtype.numpy)
    if dtype.kind == "complex":
        parts = rng.standard_normal((2, *shape))
        return np.asarray(parts[0] + 1j * parts[1], dtype.numpy)
    return np.asarray(rng.standard_normal(shape) + 0.3).astype(dtype.numpy)


def ulps(got: np.ndarray, want: np.ndarray, floor: float = 0.0) -> float:
    """The largest distance, counted in the spacing of floats at the wanted value, or at `floor` if
    that is more."""
    if want.dtype.kind == "c":
        # a part that cancels is as exact as the whole number
        sizes = np.repeat(np.abs(want).ravel(), 2)
        part = DType.of(want.dtype).part.numpy
        got, want = got.ravel().view(part), want.ravel().view(part)
    else:
        sizes = np.abs(want.astype(np.float64))
    name = DType.of(want.dtype).name
    a, b = got.astype(np.float64), want.astype(np.float64)
    same = (np.isnan(a) & np.isnan(b)) | (a == b)
    with np.errstate(all="ignore"):
        exponent = np.maximum(np.floor(np.log2(np.maximum(sizes, floor))), _LEAST[name])
        distance = np.abs(a - b) / 2.0 ** (exponent - _MANTISSA[name])
    distance = np.where(same, 0.0, np.where(np.isfinite(a) & np.isfinite(b), distance, np.inf))
    return float(distance.max(initial=0.0))


Build = Callable[..., Any]


def graph_for(
    build: Build, arrays: Sequence[np.ndarray], dims: Sequence[Sequence[object]] | None = None
) -> Graph | None:
    """A graph of `build` on inputs like the arrays; None where the op does not take them."""
    g = Graph()
    shapes = [a.shape for a in arrays] if dims is None else dims
    xs = [g.input(f"x{i}", s, a.dtype) for i, (s, a) in enumerate(zip(shapes, arrays, strict=True))]
    try:
        return g.set_outputs(build(g, *xs))
    except RlxError:
        return None


def named(arrays: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    return {f"x{i}": a for i, a in enumerate(arrays)}


def assert_close(
    build: Build,
    arrays: Sequence[np.ndarray],
    within: float = 0.0,
    setups: Sequence[tuple[Target, int]] = BOTH,
    dims: Sequence[Sequence[object]] | None = None,
    sizes: Mapping[str, int] | None = None,
    bounds: Mapping[str, int] | None = None,
    floor: float = 0.0,
) -> bool:
    """Native results within so many ulps of the reference, integers equal; whether the op takes
    such operands at all."""
    graph = graph_for(build, arrays, dims)
    if graph is None:
        return False
    expected = reference(graph, named(arrays), sizes)
    for target, workers in setups:
        native = Native(graph, target, workers, bounds or sizes or {})
        for got, want in zip(native.run(named(arrays), sizes), expected, strict=True):
            assert got.shape == want.shape and got.dtype == want.dtype
            if DType.of(want.dtype).kind in ("float", "complex"):
                found = ulps(got, want, floor)
                assert found <= within, f"{found} ulps, {target.vector_bits}"
            else:
                np.testing.assert_array_equal(got, want)
    return True


ONE = [(HOST, 2)]


def fused(g: Graph, build: Build, *xs: Any) -> Any:
    """`build` as one fused group on `xs`."""
    body = Graph("body")
    inner = [body.input(f"x{i}", x.shape) for i, x in enumerate(xs)]
    return g.elementwise_region(list(xs), body=body.set_outputs(build(body, *inner)))
