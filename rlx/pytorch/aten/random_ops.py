"""Random numbers by our Philox, from a seed that PyTorch's generator gives each run.

`torch.manual_seed` decides what is drawn, and equal seeds give equal numbers on every device; they
are not the numbers that PyTorch draws.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from rlx.ir.dtype import f32, f64, i64
from rlx.ir.node import Value
from rlx.pytorch.aten.table import aten
from rlx.random.words import words

if TYPE_CHECKING:
    from rlx.pytorch.lower_aten import Lowering


def _uniform(low: Lowering, dims: Any, word: int = 0) -> Value:
    """f32 in 0 … 1 − 2⁻²⁴, from the upper 24 bits of a word."""
    g = low.g
    key, draw = low.seed()
    made = words(g, key, tuple(dims), stream=draw)[word]
    bits = g.shift_right(made, g.constant(8, made.shape.dtype))
    return g.mul(g.cast(bits, f32), 2.0**-24)


@aten("rand.default", "rand_like.default", "uniform.default")
def rand(low: Lowering, *arguments: Any, **_: Any) -> Value:
    made = _uniform(low, low.out.dims)
    if "uniform" in str(low.node.target) and len(arguments) > 2:
        made = low.g.add(low.g.mul(made, float(arguments[2] - arguments[1])), float(arguments[1]))
    return low.cast(made, low.out.dtype)


@aten("randn.default", "randn_like.default")
def randn(low: Lowering, *_: Any, **__: Any) -> Value:
    """√(−2 ln u) · cos 2πv (Box and Muller), in f64 for f64."""
    g = low.g
    key, draw = low.seed()
    first, second, *_rest = words(g, key, low.out.dims, stream=draw)
    element = f64 if low.out.dtype is f64 else f32
    u, v = (g.mul(g.add(g.cast(w, element), 0.5), 2.0**-32) for w in (first, second))
    radius = g.sqrt(g.mul(g.log(g.minimum(u, 1 - 2.0**-25)), -2.0))
    return low.cast(g.mul(radius, g.cos(g.mul(v, 2 * math.pi))), low.out.dtype)


@aten("bernoulli.p", "bernoulli.default")
def bernoulli(low: Lowering, x: Value, p: Any = None, **_: Any) -> Value:
    chance = low.scalar(p, f32) if p is not None else low.cast(x, f32)
    return low.cast(low.g.lt(_uniform(low, low.out.dims), chance), low.out.dtype)


@aten("native_dropout.default")
def native_dropout(low: Lowering, x: Value, p: float, train: Any = True) -> tuple[Value, Value]:
    """x / (1 − p) where it is kept, and the mask."""
    g = low.g
    if train is False or p == 0:
        return x, low.full(True, low.outs(1))
    mask = g.ge(_uniform(low, x.shape.dims), float(p))
    scale = 0.0 if p >= 1 else 1 / (1 - p)
    kept = g.where(mask, g.mul(x, low.scalar(scale, x.shape.dtype)), low.scalar(0, x.shape.dtype))
    return kept, mask


@aten("native_dropout_backward.default")
def native_dropout_backward(low: Lowering, gradient: Value, mask: Value, scale: float) -> Value:
    element = gradient.shape.dtype
    scaled = low.g.mul(gradient, low.scalar(scale, element))
    return low.g.where(mask, scaled, low.scalar(0, element))


@aten("randint.low", "randint.default", "randint_like.default", "randint_like.low_dtype")
def randint(low: Lowering, *arguments: Any, **_: Any) -> Value:
    """low + ⌊u · (high − low)⌋"""
    numbers = [a for a in arguments if isinstance(a, int)]
    bottom, top = (numbers[0], numbers[1]) if len(numbers) > 1 else (0, numbers[0])
    g = low.g
    part = g.floor(g.mul(g.cast(_uniform(low, low.out.dims), f64), float(top - bottom)))
    return low.cast(g.add(g.cast(part, i64), bottom), low.out.dtype)
