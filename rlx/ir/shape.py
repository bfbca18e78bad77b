"""Shapes: dims and a dtype, with NumPy's broadcasting over symbols."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any, overload

from rlx.errors import ShapeError
from rlx.ir import dtype as dt
from rlx.ir.dim import Dim, Expr, as_dim, evaluate, expand, same, substitute, upper_bound
from rlx.ir.dtype import DType

MAX_BYTES = 2**63
"""Addresses and offsets are 64-bit and signed. Axes of size 0 do not count: strides do not."""
ShapeLike = Any  # a Shape, or a sequence of ints, symbols and symbol names


class Shape:
    """`Shape(dims, dtype)`, printed `[batch, seq, 384] f32`. Equal shapes are one object.

    Interning makes equality and hashing cheap: shapes are keys of the inference cache.
    """

    __slots__ = ("dims", "dtype", "is_static", "rank", "symbols")
    _interned: dict[tuple[tuple[Dim, ...], DType], Shape] = {}

    dims: tuple[Dim, ...]
    dtype: DType
    rank: int
    is_static: bool
    symbols: frozenset[str]

    def __new__(cls, dims: Iterable[object], dtype: object = dt.f32) -> Shape:
        element = dtype if type(dtype) is DType else DType.of(dtype)
        key = (tuple(d if type(d) is int or type(d) is Expr else as_dim(d) for d in dims), element)
        found = cls._interned.get(key)
        return found if found is not None else cls._intern(key)

    @classmethod
    def _intern(cls, key: tuple[tuple[Dim, ...], DType]) -> Shape:
        self = object.__new__(cls)
        self.dims, self.dtype = key
        for d in self.dims:
            if isinstance(d, int) and not 0 <= d < 2**63:
                if d >= 2**63:
                    raise ShapeError("dimension beyond 63 bits", got=f"{d.bit_length()} bits")
                raise ShapeError("negative dimension", got=str(list(self.dims)))
        extent = prod([d for d in self.dims if isinstance(d, int) and d], start=self.dtype.bytes)
        if extent >= MAX_BYTES:
            raise ShapeError(
                "more bytes than can be addressed", got=f"{list(self.dims)} {self.dtype.name}",
                expected="less than 2^63 bytes",
            )  # fmt: skip
        self.rank = len(self.dims)
        found = [d.symbols for d in self.dims if isinstance(d, Expr)]
        self.is_static, self.symbols = not found, frozenset[str]().union(*found)
        return cls._interned.setdefault(key, self)

    @staticmethod
    def of(value: ShapeLike, dtype: object = None) -> Shape:
        """A Shape from a Shape or a list of ints and symbol names (f32 unless a dtype is given)."""
        if isinstance(value, Shape):
            return value if dtype is None else value.with_dtype(dtype)
        if isinstance(value, (int, str, Expr)):
            raise ShapeError("a shape is a list of dimensions", got=repr(value), hint="write [n]")
        return Shape(value, dt.f32 if dtype is None else dtype)

    @property
    def num_elements(self) -> Dim:
        return prod(self.dims, start=1)

    @property
    def size_bytes(self) -> Dim:
        return self.num_elements * self.dtype.bytes

    @property
    def static_dims(self) -> tuple[int, ...]:
        """The sizes as ints; an error while a symbol is unbound."""
        return tuple(evaluate(d, {}) for d in self.dims)

    def with_dims(self, dims: Iterable[object]) -> Shape:
        return Shape(dims, self.dtype)

    def with_dtype(self, dtype: object) -> Shape:
        return Shape(self.dims, dtype)

    def bind(self, sizes: Mapping[str, Dim]) -> Shape:
        """Symbols replaced by `sizes` (a DimBinding or a plain mapping); dynamic ones stay."""
        if self.is_static:
            return self
        return Shape([substitute(d, sizes) for d in self.dims], self.dtype)

    def upper_bytes(self, bounds: Mapping[str, int]) -> int:
        """An upper bound of the bytes, for sizes up to the bounds."""
        return prod((upper_bound(d, bounds) for d in self.dims), start=1) * self.dtype.bytes

    def same_dims(self, other: Shape) -> bool:
        return len(self.dims) == len(other.dims) and all(map(same, self.dims, other.dims))

    def __reduce__(self) -> tuple[Any, ...]:
        return (Shape, (tuple(d if isinstance(d, int) else str(d) for d in self.dims), self.dtype))

    def __len__(self) -> int:
        return self.rank

    def __iter__(self) -> Iterator[Dim]:
        return iter(self.dims)

    @overload
    def __getitem__(self, axis: int) -> Dim: ...
    @overload
    def __getitem__(self, axis: slice) -> tuple[Dim, ...]: ...
    def __getitem__(self, axis: int | slice) -> Dim | tuple[Dim, ...]:
        """The size of an axis, or of several, as of an array's shape: `x.shape[-1]`."""
        return self.dims[axis]

    def __str__(self) -> str:
        return f"[{', '.join(map(str, self.dims))}] {self.dtype.name}"

    __repr__ = __str__


def broadcast_dim(a: Dim, b: Dim) -> Dim:
    """The broadcast size of two axes; an error when they are not provably equal."""
    if a == b:
        return a
    if isinstance(a, int) and a == 1:
        return b
    if isinstance(b, int) and b == 1:
        return a
    if expand(a) == expand(b):
        return a
    raise ShapeError(
        "dimensions cannot be shown equal",
        got=f"{a} against {b}",
        expected="equal sizes, or 1",
        hint="the same symbol means the same size; reshape or bind to make them agree",
    )


def broadcast_dims(*shapes: Sequence[Dim]) -> tuple[Dim, ...]:
    """NumPy's broadcasting; symbolic dims must be provably equal."""
    first = tuple(shapes[0])
    for other in shapes[1:]:
        if first == tuple(other):
            continue
        rank = max(len(first), len(other))
        left = (1,) * (rank - len(first)) + first
        right = (1,) * (rank - len(other)) + tuple(other)
        try:
            first = tuple(map(broadcast_dim, left, right))
        except ShapeError as e:
            shown = f"[{', '.join(map(str, left))}] and [{', '.join(map(str, right))}]: {e.got}"
            raise ShapeError(e.what, got=shown, expected=e.expected, hint=e.hint) from None
    return first


def normalize_axis(axis: int, rank: int, what: str = "axis") -> int:
    """A possibly negative axis as a non-negative one, checked."""
    if not isinstance(axis, int) or isinstance(axis, bool) or not -rank <= axis < rank:
        raise ShapeError(f"{what} out of range", got=axis, expected=f"{-rank} … {rank - 1}")
    return axis % rank if rank else 0
