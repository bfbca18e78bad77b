"""Weights packed into panels for GEMM, and the ops that use them; the backend puts them in.

The layout `panelW` cuts the columns of a weight [K, N] into panels of W, each [K, W], the last one
padded with zeros: [ceil(N / W), K, W]. `pairW` packs two weights (gate and up): each panel is W/2
columns of the first, then the same columns of the second. `strassenW` and `twiceW` have sums of
blocks after the panels, for one and for two levels of Strassen's algorithm (`gemm/strassen.py`).
`tilesW` has pairs of k for dot products of two in tile registers: panels are [K / 2, W, 2], with K
padded by zeros to a multiple of 32.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple, TypeVar

import numpy as np

from rlx.errors import AttributeValueError, DTypeError, ShapeError
from rlx.ir.dim import Dim
from rlx.ir.dtype import DType, promote
from rlx.ir.op import Array, Cost, Op, op
from rlx.ir.ops._common import quiet, require_indices, require_rank, require_same, rounded
from rlx.ir.ops.activation import activate, activation_flops, require_activation
from rlx.ir.ops.matmul import grouped_cost, matmul_cost, require_routes, widened
from rlx.ir.shape import Shape

_T = TypeVar("_T")
_Size = TypeVar("_Size", int, Dim)
_BYTES_PER_THREAD = 1 << 22  # worth starting a thread for
_LAYOUT = re.compile(r"(panel|pair|strassen|twice|tiles)([1-9]\d*)$")
_LEVELS = ("panel", "strassen", "twice")
TILE_K = 32  # of the products of a tile


class Layout(NamedTuple):
    width: int  # of a panel
    is_pair: bool  # gate and up in each panel
    levels: int  # of Strassen's algorithm that it has sums of blocks for
    tiles: bool = False  # pairs of k lie together

    def depth(self, k: _Size) -> _Size:
        """K of a panel, for a weight of k rows."""
        return (k + (TILE_K - 1)) // TILE_K * TILE_K if self.tiles else k

    @property
    def columns(self) -> int:
        """Columns of a weight in a panel."""
        return self.width // 2 if self.is_pair else self.width


def panel_layout(width: int, pair: bool = False) -> str:
    return f"{'pair' if pair else 'panel'}{width}"


def strassen_layout(width: int, levels: int) -> str:
    return f"{_LEVELS[levels]}{width}"


def tiles_layout(width: int) -> str:
    return f"tiles{width}"


def read_layout(layout: str, where: str) -> Layout:
    found = _LAYOUT.match(layout)
    if found is None or (found[1] == "pair" and int(found[2]) % 2):
        raise AttributeValueError(
            "unknown layout",
            where=f"{where}.layout",
            got=layout,
            expected="panelW, strassenW, twiceW, tilesW, or pairW with W even",
        )
    kind = found[1]
    levels = _LEVELS.index(kind) if kind in _LEVELS else 0
    return Layout(int(found[2]), kind == "pair", levels, kind == "tiles")


@op("pack_matmul", runs_in_prepare=True)
class PackMatMul(Op):
    """A weight [K, N] (or experts' [E, K, N]) in panels; two of them in a pair layout."""

    layout: str

    def check(self) -> None:
        read_layout(self.layout, self.name)

    def infer(self, w: Shape, up: Shape | None = None) -> Shape:
        layout = read_layout(self.layout, self.name)
        if w.rank not in (2, 3):
            raise ShapeError("not a weight", got=w, expected="[K, N] or [E, K, N]")
        if layout.is_pair != (up is not None):
            raise ShapeError("a pair layout takes two weights, others one", got=self.layout)
        if up is not None and not (w.same_dims(up) and w.dtype is up.dtype):
            raise ShapeError("two weights that differ", got=up, expected=w)
        *outer, k, n = w.dims
        columns = layout.columns
        panels = (n + columns - 1) // columns
        if layout.levels:
            parts = 2**layout.levels
            if (
                not isinstance(k, int)
                or not isinstance(n, int)
                or k % parts
                or n % (parts * columns)
            ):
                expected = f"K a multiple of {parts} and N of {parts * columns}"
                raise ShapeError("not a weight of whole blocks", got=w, expected=expected)
            panels = whole_panels(n // columns, layout.levels)
        return w.with_dims((*outer, panels, layout.depth(k), layout.width))

    def reference(self, w: Array, up: Array | None = None) -> Array:
        layout = read_layout(self.layout, self.name)
        columns = layout.columns
        *outer, k, n = w.shape
        panels = -(-n // columns)
        whole = whole_panels(panels, layout.levels)
        packed = _zeros((*outer, whole, layout.depth(k), layout.width), w.dtype)
        _fill(packed[..., :panels, :k, :columns], w)
        if layout.tiles:
            packed[...] = _interleaved(packed, (-1, 2, layout.width))
        if up is not None:
            _fill(packed[..., columns:], up)
        if layout.levels:
            add_sums(packed, panels, layout.levels)
        return packed


def _interleaved(packed: Array, shape: tuple[int, int, int]) -> Array:
    """Rows of k [..., K, W] to pairs, or back."""
    pairs = packed.reshape(*packed.shape[:-2], *shape).swapaxes(-1, -2)
    return np.ascontiguousarray(pairs).reshape(packed.shape)


def _zeros(dims: tuple[int, ...], dtype: Any) -> Array:
    """Zeros aligned to a cache line: vectors that cross a line are read at half the speed."""
    size = prod(dims) * dtype.itemsize
    raw = np.zeros(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size].view(dtype).reshape(dims)


_K_BLOCK = 512  # k of a panel, transposed at a time through a buffer that stays in the cache


def _fill(panels: Array, w: Array) -> None:
    """Copy w's columns into panels [..., P, K, columns]; w may be a transposed view."""
    bits = np.dtype(f"u{w.itemsize}")  # NumPy copies 16-bit floats slowly
    panels, w = panels.view(bits), w.view(bits)

    def fill(outer: tuple[int, ...], first: int, last: int) -> None:
        _fill_panels(panels[outer][first:last], w[outer][:, first * panels.shape[-1] :])

    parallel_ranges(fill, np.ndindex(w.shape[:-2]), panels.shape[-3], w.nbytes)


def _fill_panels(panels: Array, w: Array) -> None:
    """Fill panels [P, K, columns] with the first columns of w [K, N]."""
    count, k, columns = panels.shape
    whole = min(count, w.shape[1] // columns)
    if abs(w.strides[1]) <= abs(w.strides[0]):
        for start in range(0, k, 16):
            rows = w[start : start + 16, : whole * columns]
            cut = rows.reshape(len(rows), whole, columns)
            panels[:whole, start : start + 16] = cut.swapaxes(0, 1)
    else:
        # Rows a page apart share cache sets: copied to a buffer first, then transposed.
        buffer = np.empty((columns, _K_BLOCK + 8), w.dtype)
        for p in range(whole):
            rows_of_w = w[:, p * columns : (p + 1) * columns].T
            for start in range(0, k, _K_BLOCK):
                part = buffer[:, : min(_K_BLOCK, k - start)]
                part[...] = rows_of_w[:, start : start + _K_BLOCK]
                panels[p, start : start + _K_BLOCK] = part.T
    if whole < count:
        left = w[:, whole * columns : count * columns]
        panels[whole, :, : left.shape[1]] = left


def unpack(packed: Array, layout: str, n: int) -> tuple[Array, ...]:
    """The weights [..., K, N] that `packed` holds; K may be padded."""
    found = read_layout(layout, "unpack")
    if found.tiles:
        packed = _interleaved(packed, (-1, found.width, 2))
    columns = found.columns
    parts = [packed[..., :columns], packed[..., columns:]] if found.is_pair else [packed]
    if found.levels:
        parts = [packed[..., : plain_panels(packed.shape[-3], found.levels), :, :]]
    *outer, _, k, _ = packed.shape
    return tuple(np.moveaxis(p, -3, -2).reshape(*outer, k, -1)[..., :n] for p in parts)


def parallel_ranges(
    work: Callable[[_T, int, int], object], items: Iterable[_T], units: int, size: int
) -> None:
    """work(item, first, last) over equal ranges of each item's units, threaded if `size` is large.

    NumPy releases the interpreter lock while it computes.
    """
    parts = max(1, min(size // _BYTES_PER_THREAD, units))
    bounds = [units * i // parts for i in range(parts + 1)]
    jobs = [(item, *run) for item in items for run in pairwise(bounds)]
    if parts == 1:
        for job in jobs:
            work(*job)
        return
    from concurrent.futures import ThreadPoolExecutor  # 5 ms that `import rlx` need not take

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for _ in pool.map(lambda job: work(*job), jobs):
            pass


# -- sums of blocks for Strassen's algorithm -------------------------------------------------------
#
# One level (`gemm/strassen.py`) takes two panels as blocks b11, b12 over b21, b22 (halves of k) and
# needs the sums T1 to T4, which take the space of two panels. A second level takes the blocks of
# four panels (the first and third, the second and fourth) and does the same with each of the seven
# right operands of the first level: seven panels of sums for every four.


def whole_panels(panels: int, levels: int) -> int:
    """Panels of a weight of `panels` panels together with its sums."""
    return panels + (panels if levels else 0) + (panels // 4 * 7 if levels > 1 else 0)


def plain_panels(whole: int, levels: int) -> int:
    """Panels of the weight alone, the inverse of `whole_panels`."""
    return (whole, whole // 2, whole * 4 // 15)[levels]


def add_sums(packed: Array, panels: int, levels: int) -> None:
    """Write the sums after the first `panels` panels of packed [..., P, K, W]."""
    add = _add_two_levels if levels > 1 else _add_level
    weights = packed.reshape(-1, *packed.shape[-3:])
    parallel_ranges(
        lambda w, lo, hi: add(w, panels, lo, hi), weights, panels >> levels, packed.nbytes
    )


def _add_level(packed: Array, panels: int, first: int, last: int) -> list[Array]:
    """T1 to T4 of pairs of panels; returns the right operands of P1 to P7, [pairs, K/2, W] each."""
    half = packed.shape[1] // 2
    pairs = packed[2 * first : 2 * last].reshape(-1, 4, half, packed.shape[2])
    sums = packed[panels:][2 * first : 2 * last].reshape(pairs.shape)
    b11, b21, b12, b22 = (pairs[:, i] for i in range(4))
    t1, t2, t3, t4 = _sum_blocks((b11, b12, b21, b22), sums)
    return [b11, b21, b22, t4, t1, t2, t3]


def _add_two_levels(packed: Array, panels: int, first: int, last: int) -> None:
    quarter = packed.shape[1] // 4
    inner_sums = packed[2 * panels :].reshape(-1, 7, 4, quarter, packed.shape[2])[first:last]
    for o, operand in enumerate(_add_level(packed, panels, 2 * first, 2 * last)):
        (b11, b21), (b12, b22) = (
            (operand[i::2, :quarter], operand[i::2, quarter:]) for i in range(2)
        )
        _sum_blocks((b11, b12, b21, b22), inner_sums[:, o])


def _sum_blocks(blocks: tuple[Array, Array, Array, Array], out: Array) -> list[Array]:
    """T1 to T4 into out [blocks, 4, ...]."""
    b11, b12, b21, b22 = blocks
    t1, t2, t3, t4 = (out[:, i] for i in range(4))
    with quiet():
        np.subtract(b12, b11, out=t1)
        np.subtract(b22, t1, out=t2)
        np.subtract(b22, b12, out=t3)
        np.subtract(b21, t2, out=t4)
    return [t1, t2, t3, t4]


# -- ops on packed weights ------------------------------------------------------------------------


@op("packed_matmul", is_anchor=True)
class PackedMatMul(Op):
    """activation(scale · x·w + bias) + residual, or activation(x·gate) · (x·up) of a pair.

    `dtype` is the result's, promoted from the operands unless given.
    """

    n: int
    k: int
    layout: str
    activation: str = "none"
    has_bias: bool = False
    has_residual: bool = False
    scale: float = 1.0
    dtype: DType | None = None

    def check(self) -> None:
        read_layout(self.layout, self.name)
        require_activation(self.activation, self.name)

    @property
    def is_pair(self) -> bool:
        return read_layout(self.layout, self.name).is_pair

    def infer(
        self, x: Shape, packed: Shape, bias: Shape | None = None, residual: Shape | None = None
    ) -> Shape:
        bias, residual = self.extras(bias, residual)
        require_rank(packed, 3, "packed")
        require_same(x.dims[-1], self.k, "columns of x")
        depth = read_layout(self.layout, self.name).depth(self.k)
        require_same(packed.dims[1], depth, "rows of the packed weight")
        dims = (*x.dims[:-1], self.n)
        if bias is not None:
            require_same(bias.num_elements, self.n, "elements of bias")
        if residual is not None and not residual.same_dims(x.with_dims(dims)):
            raise ShapeError("residual does not fit the result", got=residual, expected=dims)
        given = [s.dtype for s in (x, packed, bias, residual) if s is not None]
        if "complex" in {d.kind for d in given}:
            raise DTypeError("no packed matmul of complex numbers", got=packed)
        return Shape(dims, self.dtype or promote(*given))

    def extras(self, bias: object, residual: object) -> tuple[Any, Any]:
        """The operands after the weight as (bias, residual)."""
        there = [t for t in (bias, residual) if t is not None]
        if len(there) != self.has_bias + self.has_residual:
            raise ShapeError(
                "operands and flags disagree", where=self.name, got=f"{len(there)} extra operands",
                expected=f"has_bias={self.has_bias}, has_residual={self.has_residual}",
            )  # fmt: skip
        return there[0] if self.has_bias else None, there[-1] if self.has_residual else None

    def reference(
        self, x: Array, packed: Array, bias: Array | None = None, residual: Array | None = None
    ) -> Array:
        bias, residual = self.extras(bias, residual)
        given = [DType.of(a.dtype) for a in (x, packed, bias, residual) if a is not None]
        dtype = self.dtype or promote(*given)
        first, *second = unpack(packed, self.layout, self.n)
        x, first, *second = widened(dtype, x, first[: self.k], *second)
        with quiet():
            out = x @ first
            if self.scale != 1.0:
                out = out * out.dtype.type(self.scale)
            if bias is not None:
                out = out + widened(dtype, bias)[0]
            out = activate(self.activation, out)
            if second:
                out = out * (x @ second[0])
            if residual is not None:
                out = out + widened(dtype, residual)[0]
        return rounded(out, dtype)

    def cost(self, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> Cost:
        gemm = matmul_cost(inputs, outputs, self.k * (2 if self.is_pair else 1))
        after = outputs[0].num_elements * (self.has_bias + self.has_residual)
        after = after + activation_flops(self.activation, outputs[0])
        return Cost(gemm.flops + after, gemm.bytes)


@op("packed_grouped_matmul", is_anchor=True)
class PackedGroupedMatMul(Op):
    """Row t of x [T, K] times the packed weight of its expert: packed [E, P, K, W], expert [T]."""

    n: int
    k: int
    layout: str

    def check(self) -> None:
        read_layout(self.layout, self.name)

    def infer(self, x: Shape, packed: Shape, expert: Shape) -> Shape:
        require_rank(x, 2, "x")
        require_rank(packed, 4, "packed")
        require_routes(expert, x.dims[0])
        require_same(x.dims[1], self.k, "columns of x")
        return Shape((x.dims[0], self.n), promote(x.dtype, packed.dtype))

    def reference(self, x: Array, packed: Array, expert: Array) -> Array:
        dtype = promote(DType.of(x.dtype), DType.of(packed.dtype))
        require_indices(expert, packed.shape[0], "expert")
        (x,) = widened(dtype, x)
        out = np.zeros((x.shape[0], self.n), x.dtype)
        with quiet():
            for e in np.unique(expert):
                rows = expert == e
                (w,) = unpack(packed[e], self.layout, self.n)
                out[rows] = x[rows] @ w.astype(x.dtype, copy=False)
        return rounded(out, dtype)

    def cost(self, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> Cost:
        return grouped_cost(inputs, outputs)
