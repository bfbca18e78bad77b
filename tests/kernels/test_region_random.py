"""Random fused groups, natively and by the reference: every mix of layout, reduction and broadcast
that one kernel, or several with memory in between, must get right."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
from program_support import Native, reference
from region_support import BOTH, named

from rlx.errors import RlxError
from rlx.ir.graph import Graph
from rlx.ir.node import Value

SIZES = (1, 2, 3, 4, 5, 6, 8, 17, 33)
MOST = 40_000  # elements of a value


class Maker:
    """A body of random ops; the same seed gives the same one."""

    def __init__(self, seed: int) -> None:
        self.random, self.numbers = random.Random(seed), np.random.default_rng(seed)
        base = [self.random.choice(SIZES) for _ in range(self.random.randint(1, 4))]
        self.arrays = [self._array(base, i) for i in range(self.random.randint(1, 3))]
        self.g = Graph("body")
        self.values = [self.g.input(k, a.shape, a.dtype) for k, a in named(self.arrays).items()]

    def _array(self, base: list[int], position: int) -> np.ndarray:
        dims = [1 if position and self.random.random() < 0.3 else d for d in base]
        if self.random.random() < 0.25:
            return self.numbers.integers(-5, 6, dims).astype(np.int32)
        return (self.numbers.standard_normal(dims) * 2).astype(np.float32)

    def body(self) -> Graph:
        ops = [
            self.unary,
            self.binary,
            self.binary,
            self.reduce,
            self.reduce,
            self.layout,
            self.reshape,
        ]
        for _ in range(self.random.randint(2, 12)):
            self._try(self.random.choice(ops))
        made = [v for v in self.values if not v.node.op.is_source]
        made = made or [self.g.exp(self.values[0])]
        others = self.random.sample(made, min(len(made), self.random.randint(0, 2)))
        outputs = [made[-1], *others]
        return self.g.set_outputs(outputs, names=[f"y{i}" for i in range(len(outputs))])

    def _try(self, op: Callable[[Value], Value]) -> None:
        x = self.random.choice(self.values[-4:])
        try:
            made = op(x)
        except RlxError:
            return  # an axis or a pair of shapes that the op does not take
        if np.prod(made.shape.dims) <= MOST:
            self.values.append(made)

    def unary(self, x: Value) -> Value:
        return self.g.apply(self.random.choice(["square", "neg", "abs", "tanh", "relu", "sign"]), x)

    def binary(self, x: Value) -> Value:
        kind = self.random.choice(["add", "sub", "mul", "maximum", "minimum", "lt"])
        return self.g.apply(kind, x, self.random.choice(self.values))

    def reduce(self, x: Value) -> Value:
        rank = x.shape.rank
        axis, keep = self.random.randrange(max(rank, 1)), self.random.random() < 0.6
        kind = self.random.choice(["sum", "max", "min", "mean", "any", "argmax", "softmax"])
        if kind == "softmax":
            return self.g.softmax(x, axis=axis)
        if kind == "argmax":
            return self.g.argmax(x, axis=axis, keepdims=keep)
        axes = self.random.sample(range(rank), self.random.randint(min(rank, 1), rank))
        return self.g.apply(kind, x, axes=axes, keepdims=keep)

    def layout(self, x: Value) -> Value:
        rank, dims = x.shape.rank, x.shape.dims
        axis = self.random.randrange(max(rank, 1))
        kind = self.random.choice(["transpose", "narrow", "flip", "expand", "gather"])
        if kind == "transpose":
            return self.g.transpose(x, axes=tuple(self.random.sample(range(rank), rank)))
        if kind == "flip":
            return self.g.flip(x, axis=(axis,))
        if kind == "expand":
            wide = [self.random.choice([1, 4]) if d == 1 else d for d in dims]
            return self.g.expand(x, shape=(self.random.choice([1, 2, 3]), *wide))
        size = dims[axis] if rank else 0
        if kind == "narrow":
            start = self.random.randrange(max(size, 1))
            length = self.random.randint(1, max(size - start, 1))
            return self.g.narrow(x, axis=axis, start=start, length=length)
        found = self.numbers.integers(-max(size, 1), max(size, 1), 3).astype(np.int32)
        return self.g.gather(x, self.g.constant(found), axis=axis)

    def reshape(self, x: Value) -> Value:
        left, dims = int(np.prod(x.shape.dims)), []
        while left > 1:
            factors = [d for d in range(2, left + 1) if left % d == 0]
            dims.append(self.random.choice([*factors[:6], factors[-1]]))
            left //= dims[-1]
        return self.g.reshape(x, shape=(*dims, 1))


@pytest.mark.parametrize("seed", range(60))
def test_random_regions(seed: int) -> None:
    maker = Maker(seed)
    body = maker.body()
    g = Graph()
    xs = [g.input(k, a.shape, a.dtype) for k, a in named(maker.arrays).items()]
    g.set_outputs(g.elementwise_region(xs, body=body))
    expected = reference(g, named(maker.arrays))
    for target, workers in BOTH:
        found = Native(g, target, workers, {}).run(named(maker.arrays))
        for got, want in zip(found, expected, strict=True):
            assert got.dtype == want.dtype
            if want.dtype.kind != "f":
                np.testing.assert_array_equal(got, want)
                continue
            # values grow by squaring and cancel in sums: what counts is the largest one
            scale = np.abs(want[np.isfinite(want)]).max(initial=1.0)
            np.testing.assert_allclose(got, want, rtol=0, atol=2e-5 * scale)
