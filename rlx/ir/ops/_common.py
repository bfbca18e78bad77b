"""Shared by op records: checks for inference, rounding of references, helpers of decompositions.

References compute in f32 at least and round once: `compute` widens f16, bf16 and fp8 to f32,
`rounded` gives the result its element type. Run the arithmetic inside `with quiet():`:
infinities, NaNs and wrapped integers are ordinary results.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rlx.errors import DTypeError, InputError, ShapeError
from rlx.ir.dim import Dim, same
from rlx.ir.dtype import DType, f32, promote
from rlx.ir.op import Array
from rlx.ir.shape import Shape, normalize_axis

if TYPE_CHECKING:
    from rlx.ir.graph import Graph
    from rlx.ir.node import Value


_NARROW = frozenset(DType.of(n).numpy for n in ("f16", "bf16", "f8e4m3", "f8e5m2"))


def compute(array: Array) -> Array:
    """`array` in the precision it is computed in: 16- and 8-bit floats as f32, others as is."""
    array = np.asarray(array)
    return array.astype(np.float32) if array.dtype in _NARROW else array


def upcast(*arrays: Array) -> tuple[Array, ...]:
    """`compute` of each."""
    return tuple(map(compute, arrays))


def rounded(array: Array, dtype: DType) -> Array:
    """`array` in `dtype`, as NumPy casts; integers wrap."""
    with quiet():
        return np.asarray(array).astype(dtype.numpy, copy=False)


def quiet() -> Any:
    """A context in which NumPy computes without warning."""
    return np.errstate(all="ignore")


def result_type(*operands: Any) -> DType:
    """The promoted dtype of the operands that are not None."""
    return promote(*[t.dtype for t in operands if t is not None])


def require_float(shape: Shape, what: str) -> None:
    if not shape.dtype.is_float:
        raise DTypeError(f"{what} must be of a float type", got=shape, expected="f32, f16, bf16, …")


def require_integer(shape: Shape, what: str) -> None:
    if not shape.dtype.is_integer:
        raise DTypeError(
            f"{what} must be of an integer type", got=shape, expected="i32, i64, u8, …",
            hint="cast it first",
        )  # fmt: skip


REAL = ("float", "int", "uint")
NUMERIC = (*REAL, "complex")
ANY = (*NUMERIC, "bool")


def require_dtype(shape: Shape, kinds: Sequence[str], what: str) -> None:
    """Require a dtype of one of `kinds`: float, int, uint, bool, complex."""
    kind = shape.dtype.kind
    if kind not in kinds:
        hint = {"bool": "cast it first", "complex": "take real or imag first"}.get(kind, "")
        raise DTypeError(
            f"{what}: unsupported element type", got=shape, expected=", ".join(kinds), hint=hint
        )


def require_rank(shape: Shape, rank: int, what: str) -> None:
    if shape.rank != rank:
        raise ShapeError(f"{what} has the wrong rank", got=shape, expected=f"rank {rank}")


def require_vector(shape: Shape, size: Dim, what: str) -> None:
    """A float vector [size]: a gain or a bias with one entry per channel."""
    require_float(shape, what)
    if shape.rank != 1 or not same(shape.dims[0], size):
        raise ShapeError(f"{what} does not fit x", got=shape, expected=f"[{size}]")


def require_same(a: Dim, b: Dim, what: str) -> None:
    """Require that `a` is provably equal to the expected size `b`."""
    if not same(a, b):
        raise ShapeError(
            f"{what}: dimensions cannot be shown equal", got=a, expected=b,
            hint="the same symbol means the same size; reshape or bind to make them agree",
        )  # fmt: skip


def normalize_axes(axes: Sequence[int] | None, rank: int, what: str = "axes") -> tuple[int, ...]:
    """Axes as sorted non-negative ones, each once; None means all."""
    if axes is None:
        return tuple(range(rank))
    found = sorted(normalize_axis(a, rank, what) for a in axes)
    if len(set(found)) != len(found):
        raise ShapeError(f"{what} name one axis twice", got=tuple(axes))
    return tuple(found)


def require_indices(indices: Array, size: int, what: str) -> None:
    """Require that every index is in 0 … size - 1; references check this at run time."""
    found = np.asarray(indices)
    if found.size and (found.min() < 0 or found.max() >= size):
        raise InputError(
            f"{what} out of range", got=f"{found.min()} … {found.max()}",
            expected=f"0 … {size - 1}",
        )  # fmt: skip


def wide(g: Graph, x: Value) -> Value:
    """`x` in the precision that fused ops compute in: 16- and 8-bit floats as f32."""
    narrow = x.shape.dtype.is_float and x.shape.dtype.bytes < 4
    return cast(g, x, f32) if narrow else x


def cast(g: Graph, x: Value, dtype: DType) -> Value:
    """`x` in `dtype`; no op where it has that type."""
    return x if x.shape.dtype is dtype else g.cast(x, dtype)


def real_type(element: DType) -> DType:
    """The element type of a function of real or complex numbers: f32 for integers and bools."""
    return element if element.is_float or element.is_complex else f32


def as_real(g: Graph, x: Value) -> Value:
    """`x` as real numbers: integers become f32, narrow floats are computed in f32."""
    return wide(g, cast(g, x, real_type(x.shape.dtype)))


def activate(g: Graph, x: Value, activation: str | None) -> Value:
    return x if activation in (None, "none") else g.apply(activation, x)


def size_value(g: Graph, size: Dim, like: Value) -> Any:
    """A dim as a scalar in the dtype of `like`: a constant, or `dim_value` when symbolic."""
    if isinstance(size, int):
        return g.constant(size, like.shape.dtype)
    return g.dim_value(dim=size, dtype=like.shape.dtype)


def traffic(inputs: Sequence[Shape], outputs: Sequence[Shape]) -> Dim:
    """Bytes when every tensor is touched once."""
    total: Dim = 0
    for shape in (*inputs, *outputs):
        total = total + shape.size_bytes
    return total
