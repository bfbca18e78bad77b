"""Layout ops: views (reshape, transpose, …) and copies (concat, pad, flip).

Sizes may be symbolic. What cannot be checked symbolically is checked when the op runs; what is
provably wrong is an error at once. Ops that index by data are in index.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from rlx.errors import AttributeValueError, ShapeError
from rlx.ir.dim import Dim, Expr, Monomial, expand, same
from rlx.ir.dtype import DType, i64, promote
from rlx.ir.op import Array, Cost, Op, op
from rlx.ir.ops._common import normalize_axes, rounded, size_value
from rlx.ir.shape import Shape, normalize_axis

if TYPE_CHECKING:
    from rlx.ir.graph import Graph
    from rlx.ir.node import Value


class View(Op):
    """The same elements with other dims or strides: no computation, no copy."""

    is_view = True

    def cost(self, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> Cost:
        return Cost(0, 0)


class Copy(Op):
    """Copies every result element once; computes nothing."""

    def cost(self, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> Cost:
        return super().cost(inputs, outputs)._replace(flops=0)


def _shown(dims: Sequence[Dim]) -> str:
    return f"[{', '.join(map(str, dims))}]"


def _is_negative(value: Dim) -> bool:
    """Whether `value` is provably negative for all sizes of its symbols."""
    value = expand(value)
    if isinstance(value, int):
        return value < 0
    if any(not isinstance(atom, str) for monomial, _ in value.terms for atom in monomial):
        return False  # the sign of a quotient is not known
    constant = value.terms[-1][0] == ()
    return constant and all(factor < 0 for _, factor in value.terms)


# -- reshape ----------------------------------------------------------------------------------


@op("reshape")
class Reshape(View):
    """The elements in the same order under another shape; one size may be −1 (inferred)."""

    shape: tuple[Dim, ...]

    def check(self) -> None:
        unknown = sum(d == -1 for d in self.shape)
        if unknown > 1 or any(isinstance(d, int) and d < -1 for d in self.shape):
            raise AttributeValueError(
                "not dims to reshape to", where=self.name, got=_shown(self.shape),
                expected="sizes, at most one of them −1",
            )  # fmt: skip

    def infer(self, x: Shape) -> Shape:
        return x.with_dims(self.resolved(x.dims))

    def resolved(self, dims: Sequence[Dim]) -> tuple[Dim, ...]:
        """The new dims for an operand of `dims`, −1 replaced by its size."""
        known = [d for d in self.shape if d != -1]
        if len(known) < len(self.shape):
            rest = _remainder(dims, known)
            if rest is None:
                raise ShapeError(
                    "the size of −1 cannot be found", got=f"{_shown(dims)} to {_shown(self.shape)}",
                    expected=f"{prod(known, start=1)} to divide {prod(dims, start=1)}",
                )  # fmt: skip
            return tuple(rest if d == -1 else d for d in self.shape)
        if not same(prod(dims, start=1), prod(known, start=1)):
            raise ShapeError(
                "element counts cannot be shown equal", got=_shown(dims), expected=_shown(known),
                hint="a dimension given as −1 takes what remains",
            )  # fmt: skip
        return self.shape

    def reference(self, x: Array) -> Array:
        return x.reshape(self.resolved(x.shape))


def _remainder(dims: Sequence[Dim], known: Sequence[Dim]) -> Dim | None:
    """prod(dims) / prod(known), when it is provably an integer."""
    left = list(dims)
    right: Dim = 1
    for d in known:
        if d in left:
            left.remove(d)  # a size on both sides cancels, even if it is 0 in some run
        else:
            right = right * d
    whole = prod(left, start=1)
    found = _quotient(whole, right)
    return _quotient(expand(whole), expand(right)) if found is None else found


def _quotient(whole: Dim, part: Dim) -> Dim | None:
    """Long division of polynomials; None when something is left over."""
    if part == 0:
        return None
    lead, factor = _leading(part)
    result: Dim = 0
    while whole != 0:
        monomial, coefficient = _leading(whole)
        left = list(monomial)
        for atom in lead:
            if atom not in left:
                return None
            left.remove(atom)
        if coefficient % factor:
            return None
        term = Expr({tuple(left): coefficient // factor}) if left else coefficient // factor
        result = result + term
        whole = whole - term * part
    return result


def _leading(value: Dim) -> tuple[Monomial, int]:
    return ((), value) if isinstance(value, int) else value.terms[0]


# -- strides ----------------------------------------------------------------------------------


@op("transpose")
class Transpose(View):
    """Axes reordered: axis i of the result is axis axes[i] of x."""

    axes: tuple[int, ...]

    def check(self) -> None:
        rank = len(self.axes)
        axes = tuple(p + rank if p < 0 else p for p in self.axes)
        if sorted(axes) != list(range(rank)):
            raise AttributeValueError(
                "not a permutation", where=self.name, got=self.axes, expected="each axis once"
            )
        object.__setattr__(self, "axes", axes)  # normalised to non-negative axes

    def infer(self, x: Shape) -> Shape:
        if x.rank != len(self.axes):
            raise ShapeError("wrong rank", got=x, expected=f"rank {len(self.axes)}")
        return x.with_dims([x.dims[p] for p in self.axes])

    def reference(self, x: Array) -> Array:
        return x.transpose(self.axes)


@op("narrow")
class Narrow(View):
    """`length` elements along an axis from `start` on; both may be symbolic."""

    axis: int
    start: Dim
    length: Dim

    def check(self) -> None:
        if _is_negative(self.start) or _is_negative(self.length):
            raise AttributeValueError(
                "negative start or length", where=self.name, got=f"{self.start}, {self.length}"
            )

    def infer(self, x: Shape) -> Shape:
        axis = normalize_axis(self.axis, x.rank)
        self._require_inside(x.dims[axis])
        return x.with_dims([self.length if i == axis else d for i, d in enumerate(x.dims)])

    def _require_inside(self, size: Dim) -> None:
        if _is_negative(expand(size) - expand(self.start) - expand(self.length)):
            raise ShapeError(
                "past the end of the axis", where=self.name,
                got=f"{self.start} + {self.length}", expected=f"at most {size}",
            )  # fmt: skip

    def reference(self, x: Array) -> Array:
        start: Any = self.start
        axis = normalize_axis(self.axis, x.ndim)
        self._require_inside(x.shape[axis])
        return x[(slice(None),) * axis + (slice(start, start + self.length),)]


@op("slice")
class Slice(View):
    """Every steps[i]-th element from starts[i] to before stops[i], per axis.

    As in Python a negative bound counts from the end and None is the end; but bounds outside the
    axis are an error, so that a symbolic size and the number bound to it mean the same.
    """

    starts: tuple[int | None, ...]
    stops: tuple[int | None, ...]
    steps: tuple[int, ...] | None = None

    def check(self) -> None:
        steps = (1,) * len(self.starts) if self.steps is None else self.steps
        if not len(self.starts) == len(self.stops) == len(steps) or 0 in steps:
            raise AttributeValueError(
                "not a slice per axis", where=self.name, got=str(self),
                expected="as many starts, stops and steps; no step 0",
            )  # fmt: skip
        object.__setattr__(self, "steps", steps)

    def bounds(self, dims: Sequence[Dim]) -> tuple[tuple[Dim, Dim, int], ...]:
        """(first index, number of elements, step) per axis."""
        return tuple(map(self._bound, dims, self.starts, self.stops, self.steps or ()))

    def _bound(
        self, size: Dim, start: int | None, stop: int | None, step: int
    ) -> tuple[Dim, Dim, int]:
        # the first index, and the one after the last in the direction of the step
        first, end = (0, size) if step > 0 else (size - 1, -1)
        low = first if start is None else start + size if start < 0 else start
        high = end if stop is None else stop + size if stop < 0 else stop
        way, ahead = (1, step) if step > 0 else (-1, -step)
        span = (high - low) * way
        outside = (
            (low, high, size - low, size - high) if way > 0 else (low + 1, high + 1, first - low)
        )
        if any(map(_is_negative, (span, *outside))):
            raise ShapeError(
                "not a range of the axis", where=self.name,
                got=f"{start} … {stop} step {step}", expected=f"inside 0 … {size}",
            )  # fmt: skip
        return low, (span + ahead - 1) // ahead, step

    def infer(self, x: Shape) -> Shape:
        if x.rank != len(self.starts):
            raise ShapeError("a slice per axis", got=len(self.starts), expected=f"{x.rank} for {x}")
        return x.with_dims([length for _, length, _ in self.bounds(x.dims)])

    def reference(self, x: Array) -> Array:
        cuts = []
        for first, length, step in self.bounds(x.shape):
            stop: Any = first + length * step
            cuts.append(slice(first, None if stop < 0 else stop, step) if length else slice(0))
        return x[tuple(cuts)]


@op("expand")
class Expand(View):
    """Broadcast to `shape`: new leading axes, and axes of size 1 repeated."""

    shape: tuple[Dim, ...]

    def check(self) -> None:
        if any(map(_is_negative, self.shape)):
            raise AttributeValueError("negative size", where=self.name, got=_shown(self.shape))

    def infer(self, x: Shape) -> Shape:
        new = len(self.shape) - x.rank
        if new < 0 or not all(
            d == 1 or same(d, e) for d, e in zip(x.dims, self.shape[new:], strict=True)
        ):
            raise ShapeError(
                "cannot be broadcast", got=x, expected=_shown(self.shape),
                hint="an axis of size 1 repeats; others must be shown equal",
            )  # fmt: skip
        return x.with_dims(self.shape)

    def reference(self, x: Array) -> Array:
        return np.broadcast_to(x, self.shape)  # type: ignore[arg-type]


# -- copies -----------------------------------------------------------------------------------


@op("concat")
class Concat(Copy):
    """Tensors one after the other along an axis, in their promoted element type."""

    axis: int = 0

    def infer(self, first: Shape, *rest: Shape) -> Shape:
        axis = normalize_axis(self.axis, first.rank)
        length = first.dims[axis]
        for x in rest:
            if x.rank != first.rank or not all(
                i == axis or same(a, b)
                for i, (a, b) in enumerate(zip(first.dims, x.dims, strict=True))
            ):
                raise ShapeError(
                    f"dims other than axis {axis} cannot be shown equal", got=x, expected=first
                )
            length = length + x.dims[axis]
        dims = [length if i == axis else d for i, d in enumerate(first.dims)]
        return Shape(dims, promote(*[x.dtype for x in (first, *rest)]))

    def reference(self, *xs: Array) -> Array:
        element = promote(*[DType.of(x.dtype) for x in xs])
        return np.concatenate([rounded(x, element) for x in xs], self.axis)


@op("pad")
class Pad(Copy):
    """low[i] elements before and high[i] after, per axis.

    They hold `value` (mode "constant"), the nearest element ("edge") or the elements mirrored at
    the border without repeating it ("reflect").
    """

    low: tuple[int, ...]
    high: tuple[int, ...]
    value: float = 0.0
    mode: str = "constant"

    def check(self) -> None:
        if len(self.low) != len(self.high) or any(n < 0 for n in (*self.low, *self.high)):
            raise AttributeValueError(
                "not a padding per axis", where=self.name, got=f"{self.low}, {self.high}",
                expected="as many low as high, none negative", hint="narrow takes elements away",
            )  # fmt: skip
        if self.mode not in ("constant", "edge", "reflect"):
            raise AttributeValueError(
                "unknown mode", where=self.name, got=self.mode, expected="constant, edge, reflect"
            )

    def infer(self, x: Shape) -> Shape:
        if x.rank != len(self.low):
            raise ShapeError("a padding per axis", got=len(self.low), expected=f"{x.rank} for {x}")
        self._require_value(x)
        self._require_source(x.dims)
        dims = [n + d + m for n, d, m in zip(self.low, x.dims, self.high, strict=True)]
        return x.with_dims(dims)

    def _require_value(self, x: Shape) -> None:
        if self.mode == "constant" and x.dtype.kind in ("int", "uint", "bool"):
            info: Any = np.iinfo(x.dtype.numpy) if x.dtype.is_integer else None
            least, most = (info.min, info.max) if info else (0, 1)
            if not (least <= self.value <= most and self.value.is_integer()):
                raise AttributeValueError(
                    "no value of the element type", got=self.value, expected=x
                )

    def _require_source(self, dims: Sequence[Dim]) -> None:
        """There are elements to repeat or to mirror."""
        for low, size, high in zip(self.low, dims, self.high, strict=True):
            most = max(low, high)
            needed = {"constant": 0, "edge": min(most, 1), "reflect": most + 1 if most else 0}
            if isinstance(size, int) and size < needed[self.mode]:
                raise ShapeError(
                    f"axis too short for {self.mode} padding", where=self.name,
                    got=size, expected=f"at least {needed[self.mode]}",
                )  # fmt: skip

    def reference(self, x: Array) -> Array:
        self._require_source(x.shape)
        widths = list(zip(self.low, self.high, strict=True))
        if self.mode != "constant":
            return np.pad(x, widths, self.mode)  # type: ignore[call-overload]
        dims = [n + d + m for n, d, m in zip(self.low, x.shape, self.high, strict=True)]
        result = np.full(dims, rounded(self.value, DType.of(x.dtype)), x.dtype)
        result[tuple(slice(n, n + d) for n, d in zip(self.low, x.shape, strict=True))] = x
        return result

    def decompose(self, g: Graph, x: Value) -> Any:
        """A concat with constant blocks, or a gather at clamped or mirrored indices."""
        for axis, (low, high) in enumerate(zip(self.low, self.high, strict=True)):
            if low or high:
                take = self._joined if self.mode == "constant" else self._gathered
                x = take(g, x, axis, low, high)
        return x

    def _joined(self, g: Graph, x: Value, axis: int, low: int, high: int) -> Any:
        filler = g.constant(self.value, x.shape.dtype)

        def block(size: int) -> list[Value]:
            dims = [size if i == axis else d for i, d in enumerate(x.shape.dims)]
            return [g.expand(filler, shape=tuple(dims))] if size else []

        return g.concat(*block(low), x, *block(high), axis=axis)

    def _gathered(self, g: Graph, x: Value, axis: int, low: int, high: int) -> Any:
        """Gather at indices clamped to the border (edge) or mirrored there (reflect)."""
        n = x.shape.dims[axis]
        at = g.sub(g.iota(shape=(n + low + high,), dtype=i64), g.constant(low, i64))
        last = g.sub(size_value(g, n, at), g.constant(1, i64))
        if self.mode == "edge":
            at = g.minimum(g.maximum(at, g.constant(0, i64)), last)
        else:
            at = g.sub(last, g.abs(g.sub(last, g.abs(at))))
        return g.gather(x, at, axis=axis)


@op("flip")
class Flip(Copy):
    """The order of elements reversed along axes."""

    axis: tuple[int, ...]

    def infer(self, x: Shape) -> Shape:
        normalize_axes(self.axis, x.rank)
        return x

    def reference(self, x: Array) -> Array:
        return np.flip(x, self.axis)

    def decompose(self, g: Graph, x: Value) -> Any:
        for axis in normalize_axes(self.axis, x.shape.rank):
            n: Dim = x.shape.dims[axis]
            count = g.iota(shape=(n,), dtype=i64)
            last = g.sub(size_value(g, n, count), g.constant(1, i64))
            x = g.gather(x, g.sub(last, count), axis=axis)
        return x
