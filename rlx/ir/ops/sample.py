"""Sampling of tokens from logits.

For each row x of logits, all in f32 (f64 logits in f64; sums always in f64):

1. NaN counts as −inf. A row of −inf alone gives token 0.
2. Temperature 0 (or less, or NaN) gives the token of the largest logit, the first of equals.
3. Order tokens by logit, largest first, equals by index. Keep the first `top_k` (0 keeps all).
4. Weights: w = exp((x − max x) / temperature), and w = 1 where x is the largest.
5. Keep, in that order, tokens before which less than `top_p` of the kept weight has passed; the
   first always stays, and `top_p` ≥ 1 keeps all.
6. Keep tokens with w ≥ `min_p` (the largest weight is 1, so this is p ≥ min_p · max p).
7. Draw: u in [0, 1) from 32 bits; the token is the first kept one, in index order, at which the
   running sum of weights exceeds u · their total.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, NamedTuple

import numpy as np

from rlx.errors import AttributeValueError, DTypeError, ShapeError
from rlx.ir import dtype as dt
from rlx.ir.op import Array, Cost, Op, op
from rlx.ir.ops._common import compute, quiet, require_float
from rlx.ir.philox import draw_words, uniform
from rlx.ir.shape import Shape

_RNG = Shape([2], dt.u64)
_SETTINGS = Shape([4], dt.f32)


class Settings(NamedTuple):
    temperature: float
    top_k: int
    top_p: float
    min_p: float

    @staticmethod
    def of(values: Array) -> Settings:
        """From the four f32 values (temperature, top_k, top_p, min_p)."""
        t, k, p, m = (float(v) for v in np.asarray(values, np.float32))
        return Settings(t, int(min(k, 2**31)) if k > 0 else 0, p, m)


@op("sample", is_choice=True)
class Sample(Op):
    """Temperature → top-k → softmax → top-p → min-p → draw; returns (tokens, the next rng).

    `rng` is (seed, counter) as u64. Row r draws from Philox4x32-10 with key `seed` at counter
    (counter, r), and the returned rng has counter + 1, so no draw is used twice. `settings`
    (temperature, top_k, top_p, min_p), where given, replaces the attributes at run time. Where
    `rng` is [..., 2], and `settings` [..., 4], each row has its own and draws as if it were alone.

    Without `rng`, `g.sample(logits, top_k, top_p, temperature, seed)` returns the tokens alone; a
    state counts the draws, which depend on nothing but `seed` and their number.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def check(self) -> None:
        for name, value, top in (
            ("temperature", self.temperature, np.inf),
            ("top_k", self.top_k, np.inf),
            ("top_p", self.top_p, 1.0),
            ("min_p", self.min_p, 1.0),
        ):
            if not 0 <= value <= top or value == np.inf:
                expected = "0 or more" if top == np.inf else "0 … 1"
                raise AttributeValueError(
                    "out of range", where=f"sample.{name}", got=value, expected=expected
                )

    def infer(
        self, logits: Shape, rng: Shape, settings: Shape | None = None
    ) -> tuple[Shape, Shape]:
        require_float(logits, "logits")
        if not logits.rank or logits.dims[-1] == 0:
            raise ShapeError("logits need a vocabulary axis", got=logits, expected="[..., vocab]")
        rows = logits.dims[:-1] if rng.rank > 1 else ()
        for shape, one, what in ((rng, _RNG, "rng"), (settings, _SETTINGS, "settings")):
            expected = one.with_dims((*rows, *one.dims))
            if shape is not None and not shape.same_dims(expected):
                raise ShapeError(f"wrong shape of {what}", got=shape, expected=expected)
            if shape is not None and shape.dtype is not expected.dtype:
                raise DTypeError(f"wrong element type of {what}", got=shape, expected=expected)
        return Shape(logits.dims[:-1], dt.i32), rng

    def reference(
        self, logits: Array, rng: Array, settings: Array | None = None
    ) -> tuple[Array, Array]:
        if settings is None:
            # rounded like run-time settings, so that equal settings draw equal tokens
            settings = np.array([self.temperature, self.top_k, self.top_p, self.min_p])
        rows = compute(logits).reshape(-1, logits.shape[-1])
        if rng.ndim > 1:
            return self._each(rows, rng, settings)
        chosen = Settings.of(settings)
        points = uniform(draw_words(int(rng[0]), int(rng[1]), len(rows)))
        with quiet():
            drawn = [sample_row(row, u, chosen) for row, u in zip(rows, points, strict=True)]
            following = np.array([rng[0], rng[1] + np.uint64(1)], np.uint64)
        return np.array(drawn, np.int32).reshape(logits.shape[:-1]), following

    def _each(self, rows: Array, rng: Array, settings: Array) -> tuple[Array, Array]:
        """Each row with an rng and settings of its own."""
        states = rng.reshape(-1, 2)
        chosen = np.broadcast_to(settings, (*rng.shape[:-1], 4)).reshape(-1, 4)
        drawn = [
            self.reference(row[None], state, how)
            for row, state, how in zip(rows, states, chosen, strict=True)
        ]
        tokens = np.array([token[0] for token, _ in drawn], np.int32)
        after = np.array([state for _, state in drawn], np.uint64)
        return tokens.reshape(rng.shape[:-1]), after.reshape(rng.shape)

    @classmethod
    def builder(cls, build: Callable[..., Any]) -> Callable[..., Any]:
        def sample(self: Any, logits: Any, *args: Any, **named: Any) -> Any:
            has_rng = "rng" in named or (args and hasattr(args[0], "shape"))
            if has_rng:
                return build(self, logits, *args, **named)
            return _seeded(self, build, logits, *args, **named)

        return sample

    def cost(self, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> Cost:
        """Some ten operations per logit: comparing, the exponential, two sums; one pass over it."""
        return Cost(inputs[0].num_elements * 10, inputs[0].size_bytes)


def _seeded(
    g: Any, build: Callable[..., Any], logits: Any, top_k: int = 0, top_p: float = 1.0,
    temperature: float = 1.0, seed: int = 0, *, name: str = "", **more: Any,
) -> Any:  # fmt: skip
    """Tokens drawn by an RNG of this seed, whose counter is a state of the graph."""
    if not isinstance(seed, (int, np.integer)) or isinstance(seed, bool) or not 0 <= seed < 2**64:
        raise AttributeValueError(
            "not a seed", where="sample.seed", got=repr(seed), expected="an int, 0 … 2**64 - 1",
            hint="an RNG operand is a tensor of two u64: g.sample(logits, rng)",
        )  # fmt: skip
    base = f"{name or 'sample'}.draws"
    names = (base if i == 0 else f"{base}.{i}" for i in count())
    draws = g.state(next(n for n in names if n not in g._sources), [1], "u64")
    rng = g.concat([g.constant(np.array([seed], np.uint64)), draws], axis=0)
    how = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    tokens, after = build(g, logits, rng, name=name, **how, **more)
    g.state_update(draws, g.narrow(after, axis=0, start=1, length=1), axis=0, start=0)
    return tokens


def sample_row(logits: Array, u: float, settings: Settings) -> int:
    """The token drawn at point `u` of the unit interval."""
    x = np.where(np.isnan(logits), -np.inf, logits).astype(logits.dtype)
    top = x.max()
    if top == -np.inf:
        return 0
    if not settings.temperature > 0:
        return int(x.argmax())
    order = np.argsort(-x, kind="stable")
    if settings.top_k:
        order = order[: settings.top_k]
    distance = np.where(x == top, 0, x - top).astype(x.dtype)  # inf − inf would be NaN
    weight = np.exp(distance / x.dtype.type(settings.temperature))
    weight[x == -np.inf] = 0  # also at an infinite temperature
    if settings.top_p < 1:
        passed = np.cumsum(weight[order], dtype=np.float64)
        inside = np.append(0.0, passed[:-1]) < settings.top_p * passed[-1]
        inside[0] = True
        order = order[inside]
    kept = np.sort(order[weight[order] >= x.dtype.type(settings.min_p)])
    running = np.cumsum(weight[kept], dtype=np.float64)
    return int(kept[np.searchsorted(running, u * running[-1], side="right")])
