"""Products of arrays: matmul, tensordot, vecdot, outer, einsum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlx.errors import InputError
from rlx.ir.graph import Graph
from rlx.ir.node import Value
from rlx.numpy.array import Array
from rlx.numpy.dispatch import apply, as_array


def _matmul(g: Graph, a: Value, b: Value) -> Any:
    return g.matmul(a, b)


def matmul(x1: Any, x2: Any, /) -> Array:
    """The matrix product, batch axes broadcast."""
    a, b = as_array(x1), as_array(x2)
    if not a.ndim or not b.ndim:
        raise InputError("matmul takes at least one axis", got=f"{a.ndim} and {b.ndim} axes")
    return apply(_matmul, [a, b])


def _dot_general(g: Graph, a: Value, b: Value, left: Any, right: Any) -> Any:
    return g.dot_general(a, b, left, right)


def tensordot(x1: Any, x2: Any, /, *, axes: int | Sequence[Sequence[int]] = 2) -> Array:
    """The sum of products over pairs of axes."""
    a, b = as_array(x1), as_array(x2)
    if isinstance(axes, int):
        left, right = tuple(range(a.ndim - axes, a.ndim)), tuple(range(axes))
    else:
        left = tuple([i % a.ndim for i in axes[0]])
        right = tuple([i % b.ndim for i in axes[1]])
    return apply(_dot_general, [a, b], left, right)


def vecdot(x1: Any, x2: Any, /, *, axis: int = -1) -> Array:
    """The sum of products along an axis, the others broadcast."""
    from rlx.numpy.elementwise import conj, multiply
    from rlx.numpy.reductions import sum

    products = multiply(conj(x1), x2)
    return sum(products, axis=axis, dtype=products.dtype)


def outer(x1: Any, x2: Any, /) -> Array:
    """Every product of an element of x1 and one of x2."""
    from rlx.numpy.elementwise import multiply
    from rlx.numpy.manipulation import expand_dims

    return multiply(expand_dims(x1, 1), expand_dims(x2, 0))


def einsum(subscripts: str, *operands: Any) -> Array:
    """Einstein's summation over named axes: `einsum("ij,jk->ik", a, b)`. Operands are contracted
    from left to right."""
    arrays = [as_array(x) for x in operands]
    inputs, output = _parse(subscripts, arrays)
    current, axes = _reduce_repeated(arrays[0], inputs[0])
    for i in range(1, len(arrays)):
        x, names = _reduce_repeated(arrays[i], inputs[i])
        needed = set(output).union(*inputs[i + 1 :])
        current, axes = _contract(current, axes, x, names, needed)
    return _arranged(current, axes, output)


def _parse(subscripts: str, arrays: Sequence[Array]) -> tuple[list[str], str]:
    text = subscripts.replace(" ", "")
    left, arrow, output = text.partition("->")
    inputs = left.split(",")
    names = "".join(inputs)
    if not arrow:
        output = "".join(sorted(n for n in set(names) if names.count(n) == 1))
    fits = len(inputs) == len(arrays) and all(
        len(n) == x.ndim for n, x in zip(inputs, arrays, strict=True)
    )
    if not fits or not (names + "a").isalpha() or not set(output) <= set(names):
        raise InputError(
            "subscripts do not fit the operands", where="einsum", got=repr(subscripts),
            expected="one letter per axis of each operand, such as 'ij,jk->ik'",
        )  # fmt: skip
    return inputs, output


def _reduce_repeated(x: Array, names: str) -> tuple[Array, str]:
    if len(set(names)) != len(names):
        raise InputError(
            "a letter twice in one operand", where="einsum", got=names,
            hint="take the diagonal first: rlx.numpy.linalg.diagonal",
        )  # fmt: skip
    return x, names


def _contract(a: Array, left: str, b: Array, right: str, needed: set[str]) -> tuple[Array, str]:
    """The product of two operands, summed over the letters that nothing after them needs."""
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
    if ca or ba:
        return g.dot_general(a, b, ca, cb, ba, bb)
    rank = b.shape.rank
    return g.mul(g.reshape(a, [*a.shape.dims, *[1] * rank]), b)


def _arranged(x: Array, names: str, output: str) -> Array:
    """Summed over letters not in the output, and its axes in the output's order."""
    from rlx.numpy.manipulation import permute_dims
    from rlx.numpy.reductions import sum

    gone = [i for i, n in enumerate(names) if n not in output]
    if gone:
        x = sum(x, axis=tuple(gone), dtype=x.dtype)
        names = "".join(n for n in names if n in output)
    return permute_dims(x, [names.index(n) for n in output]) if names != output else x
