"""Products of arrays: matmul, tensordot, vecdot, outer, einsum."""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import Any

from rlx.errors import ArrayValueError
from rlx.ir.dtype import i64
from rlx.ir.graph import Graph
from rlx.ir.node import Value
from rlx.numpy.array import Array, Tracer
from rlx.numpy.dispatch import apply, as_array
from rlx.numpy.elementwise import conj, multiply
from rlx.numpy.manipulation import axes_of, axis_of, expand_dims, moveaxis, permute_dims, squeeze
from rlx.numpy.reductions import sum
from rlx.numpy.typing import ArrayLike


def _matmul(g: Graph, a: Value, b: Value) -> Any:
    return g.matmul(a, b)


def matmul(x1: ArrayLike, x2: ArrayLike, /) -> Array:
    """The matrix product, batch axes broadcast."""
    a, b = as_array(x1), as_array(x2)
    if not a.ndim or not b.ndim:
        raise ArrayValueError(
            "matmul takes at least one axis", where="matmul", got=f"{a.ndim} and {b.ndim} axes",
            hint="multiply by a number with *",
        )  # fmt: skip
    inner = a.shape[-1], b.shape[-2] if b.ndim > 1 else b.shape[0]
    _require_equal(*inner, "matmul", a, b)
    return apply(_matmul, [a, b])


def _require_equal(n: int, m: int, where: str, a: Array, b: Array) -> None:
    """Sizes that are summed over are equal; symbolic ones are compared when the op is added."""
    if type(n) is int and type(m) is int and n != m:
        raise ArrayValueError(
            "sizes differ", where=where, got=f"{a.shape} and {b.shape}: {n} and {m}",
            expected="equal sizes of the axes that are summed over",
        )  # fmt: skip


def _dot_general(g: Graph, a: Value, b: Value, left: Any, right: Any) -> Any:
    return g.dot_general(a, b, left, right)


def tensordot(x1: ArrayLike, x2: ArrayLike, /, *, axes: int | Sequence[Sequence[int]] = 2) -> Array:
    """The sum of products over pairs of axes."""
    a, b = as_array(x1), as_array(x2)
    if isinstance(axes, int):
        if not 0 <= axes <= min(a.ndim, b.ndim):
            raise ArrayValueError(
                "not as many axes", where="tensordot", got=axes, expected=f"{a.ndim} and {b.ndim}"
            )
        left, right = tuple(range(a.ndim - axes, a.ndim)), tuple(range(axes))
    else:
        first, second = axes
        left, right = axes_of(first, a.ndim, "tensordot"), axes_of(second, b.ndim, "tensordot")
    if len(left) != len(right):
        raise ArrayValueError("axes in pairs", where="tensordot", got=f"{left} and {right}")
    for i, j in zip(left, right, strict=True):
        _require_equal(a.shape[i], b.shape[j], "tensordot", a, b)
    if not left:
        return apply(_einsum_step, [a, b], (), (), (), ())
    return apply(_dot_general, [a, b], left, right)


def vecdot(x1: ArrayLike, x2: ArrayLike, /, *, axis: int = -1) -> Array:
    """The sum of products along an axis, the others broadcast."""
    a, b = as_array(x1), as_array(x2)
    for x in (a, b):
        axis_of(axis, x.ndim, "vecdot")
    _require_equal(a.shape[axis], b.shape[axis], "vecdot", a, b)
    products = multiply(conj(moveaxis(a, axis, -1)), moveaxis(b, axis, -1))
    return sum(products, axis=-1, dtype=products.dtype)


def outer(x1: ArrayLike, x2: ArrayLike, /) -> Array:
    """Every product of an element of x1 and one of x2."""
    a, b = as_array(x1), as_array(x2)
    if a.ndim != 1 or b.ndim != 1:
        raise ArrayValueError("not one axis each", where="outer", got=f"{a.shape} and {b.shape}")
    return multiply(expand_dims(a, 1), expand_dims(b, 0))


# -- einsum -----------------------------------------------------------------------------------


def einsum(subscripts: str, *operands: ArrayLike) -> Array:
    """Einstein's summation over named axes: `einsum("ij,jk->ik", a, b)`. `...` stands for axes
    that broadcast; a letter twice in one operand is its diagonal; without `->` the letters that
    occur once are the output. Operands are contracted from left to right."""
    arrays = [as_array(x) for x in operands]
    inputs, output = _parse(subscripts, arrays)
    arrays, inputs = _squeezed(arrays, inputs, output)
    current, axes = _diagonal(arrays[0], inputs[0])
    for i in range(1, len(arrays)):
        x, names = _diagonal(arrays[i], inputs[i])
        needed = set(output).union(*inputs[i + 1 :])
        current, axes = _contract(current, axes, x, names, needed)
    return _arranged(current, axes, output)


def _parse(subscripts: str, arrays: Sequence[Array]) -> tuple[list[str], str]:
    """The letters of each operand and of the output; those of `...` are digits."""
    text = subscripts.replace(" ", "")
    left, arrow, output = text.partition("->")
    given = left.split(",")
    if len(given) != len(arrays):
        raise _unfit(subscripts, arrays)
    most = 0
    inputs = []
    for names, x in zip(given, arrays, strict=True):
        count = x.ndim - len(names.replace("...", ""))
        if count < 0 or names.count(".") not in (0, 3) or (count and "..." not in names):
            raise _unfit(subscripts, arrays)
        inputs.append(names.replace("...", string.digits[:count][::-1]))
        most = max(most, count)
    dots = string.digits[:most][::-1]  # the last axis is 0 in every operand
    joined = "".join(inputs)
    letters = "".join(n for n in joined if n not in string.digits)
    if not arrow:
        output = dots + "".join(sorted(n for n in set(letters) if letters.count(n) == 1))
    else:
        output = output.replace("...", dots)
    fits = letters.isalpha() or not letters
    if not fits or not set(output) <= set(joined) or len(set(output)) != len(output):
        raise _unfit(subscripts, arrays)
    return inputs, output


def _unfit(subscripts: str, arrays: Sequence[Array]) -> ArrayValueError:
    return ArrayValueError(
        "subscripts do not fit the operands", where="einsum",
        got=f"{subscripts!r} for {', '.join(str(x.shape) for x in arrays)}",
        expected="one letter per axis of each operand, such as 'ij,jk->ik'",
    )  # fmt: skip


def _squeezed(
    arrays: Sequence[Array], inputs: Sequence[str], output: str
) -> tuple[list[Array], list[str]]:
    """Operands without axes of size 1 that broadcast."""
    sizes: dict[str, Any] = {}
    for x, names in zip(arrays, inputs, strict=True):
        for n, name in zip(x.shape, names, strict=True):
            if type(n) is not int or n != 1:
                known = sizes.setdefault(name, n)
                if type(n) is int and type(known) is int and n != known:
                    raise ArrayValueError(
                        "one letter, two sizes", where="einsum", got=f"{name}: {known} and {n}"
                    )
    made, left = [], []
    for x, names in zip(arrays, inputs, strict=True):
        gone = [i for i, n in enumerate(x.shape)
                if type(n) is int and n == 1 and names[i] in sizes]  # fmt: skip
        made.append(squeeze(x, gone) if gone else x)
        left.append("".join(n for i, n in enumerate(names) if i not in gone))
    return made, left


def _take_diagonal(g: Graph, x: Value) -> Any:
    """The diagonal of the last two axes."""
    *outer, n, m = x.shape.dims
    flat = g.reshape(x, [*outer, n * m])
    columns = g.constant(m, i64) if isinstance(m, int) else g.dim_value(m, i64)
    return g.gather(flat, g.iota([n], 0, i64) * (columns + 1), len(outer))


def _diagonal(x: Array, names: str) -> tuple[Array, str]:
    """An operand with each letter once."""
    for name in names:
        while names.count(name) > 1:
            first, second = names.index(name), names.rindex(name)
            if x.shape[first] != x.shape[second]:  # a guard, where they are symbolic
                raise ArrayValueError(
                    "one letter, two sizes", where="einsum", got=f"{name} in {x.shape}"
                )
            moved = moveaxis(x, (first, second), (-2, -1))
            if isinstance(moved, Tracer):
                x = apply(_take_diagonal, [moved])
            else:
                x = Array(moved.data.diagonal(axis1=-2, axis2=-1))
            names = "".join(n for i, n in enumerate(names) if i not in (first, second)) + name
    return x, names


def _contract(a: Array, left: str, b: Array, right: str, needed: set[str]) -> tuple[Array, str]:
    """The product of two operands, summed over the letters that nothing after them needs."""
    a, left = _summed(a, left, needed | set(right))
    b, right = _summed(b, right, needed | set(left))
    batch = "".join(n for n in left if n in right and n in needed)
    summed = "".join(n for n in left if n in right and n not in needed)
    position = {"left": left.index, "right": right.index}
    result = apply(
        _einsum_step, [a, b],
        *[tuple([position[side](n) for n in group])
          for group in (summed, batch) for side in ("left", "right")],
    )  # fmt: skip
    free = [n for names in (left, right) for n in names if n not in batch + summed]
    return result, batch + "".join(free)


def _einsum_step(g: Graph, a: Value, b: Value, ca: Any, cb: Any, ba: Any, bb: Any) -> Any:
    if ca:
        return g.dot_general(a, b, ca, cb, ba, bb)
    rank = [d for i, d in enumerate(b.shape.dims) if i not in bb]
    batch = [a.shape.dims[i] for i in ba]
    a = g.transpose(a, [*ba, *[i for i in range(a.shape.rank) if i not in ba]])
    b = g.transpose(b, [*bb, *[i for i in range(b.shape.rank) if i not in bb]])
    b = g.reshape(b, [*b.shape.dims[: len(bb)], *[1] * (a.shape.rank - len(batch)), *rank])
    return g.mul(g.reshape(a, [*a.shape.dims, *[1] * len(rank)]), b)


def _summed(x: Array, names: str, needed: set[str]) -> tuple[Array, str]:
    """Summed over the letters that nothing needs."""
    gone = [i for i, n in enumerate(names) if n not in needed]
    if not gone:
        return x, names
    return sum(x, axis=tuple(gone), dtype=x.dtype), "".join(n for n in names if n in needed)


def _arranged(x: Array, names: str, output: str) -> Array:
    """Summed over letters not in the output, and its axes in the output's order."""
    x, names = _summed(x, names, set(output))
    return permute_dims(x, [names.index(n) for n in output]) if names != output else x
