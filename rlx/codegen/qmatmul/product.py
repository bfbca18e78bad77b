"""Products of quantised rows with strips of packed weights.

The rows of x are cut into chunks that stay in the second-level cache, the columns into strips (or
pairs of strips). A unit of work is one chunk against one strip; workers take equal runs of units.
"""

from __future__ import annotations

from functools import partial

from rlx.codegen.emit import Function, Module, Value, f32, i64, ptr
from rlx.codegen.kernel import KernelSpec
from rlx.codegen.matmul_finish import Epilogue, emit_finish
from rlx.codegen.matmul_micro import Geometry
from rlx.codegen.qmatmul.dot import Vnni, dot_kind
from rlx.codegen.qmatmul.formats import BLOCKS, Format, Runs, Strip, integer_format
from rlx.codegen.qmatmul.many import PART, ManyRows
from rlx.codegen.qmatmul.rows import tile_width
from rlx.codegen.qmatmul.supers import SUPERS
from rlx.codegen.qmatmul.tile import Tile
from rlx.codegen.target import Target
from rlx.ir.quant import QuantScheme
from rlx.ir.quant_rows import RowLayout
from rlx.ir.quant_strips import ROWS, strip_layout
from rlx.support.records import dataclass

CHUNK = 256 << 10  # bytes of quantised rows that a strip is multiplied with in one go
RUNS = 64  # codes of a row that share a scale where those of a run of 32 need not have their own
_POINTERS = frozenset(["x", "w", "out", "bias", "residual"])


def format_of(scheme: QuantScheme, layout: RowLayout | None = None) -> Format:
    """What emits a tile's products with weights of the scheme, for rows of a layout."""
    if layout is not None and layout.kind == "runs":
        return Runs(layout.block)
    if scheme.name in SUPERS:
        return SUPERS[scheme.name]()
    return BLOCKS.get(scheme.name) or integer_format(scheme)


def tile_rows(target: Target) -> int:
    """Rows of a full tile: as many as leave registers for codes and scales."""
    return 8 if target.num_vector_registers >= 32 else 4


def row_layout(scheme: QuantScheme, k: int, target: Target) -> RowLayout:
    """How rows of k must be quantised for a product with weights of the scheme.

    Where bytes are multiplied by fours, scales are a good part of the work with Q8_0: some blocks
    share one of the row then.
    """
    wide = dot_kind(target) is Vnni and target.num_vector_registers >= 32
    if scheme.name == "Q8_0" and wide and k % RUNS == 0:
        return RowLayout("runs", RUNS, tile_rows(target))
    form = format_of(scheme)
    return RowLayout(form.kind, form.block, tile_rows(target))


def has_integer_path(scheme: QuantScheme, k: int, target: Target) -> bool:
    """Whether weights of k columns are multiplied as integers on the target.

    Where bytes can be multiplied at all, that is faster for any number of rows, activations
    quantised on the way included: on Zen 4 with 128 rows Q8_0, Q4_K and Q6_K take 0.28, 0.28 and
    0.32 of the time that panels decoded for the f32 micro-kernel take; with AVX2 alone 0.74, 0.38
    and 0.47; with SSSE3 alone 0.69, 0.31 and 0.46. With one row they take 0.1 to 0.3.
    """
    fits = scheme.block is not None or scheme.ggml_type is not None or k <= 1 << 16
    return dot_kind(target) is not None and fits and strip_layout(scheme, k) is not None


@dataclass(frozen=True)
class QuantMatmul(KernelSpec):
    """args: x, w, out, (bias), (residual), m, n, k, row, strip

    `row` is the bytes of a quantised row, `strip` those of a strip.
    """

    scheme: QuantScheme
    layout: RowLayout
    epilogue: Epilogue

    @property
    def args(self) -> list[str]:
        return ["x", "w", "out", *self.epilogue.args, "m", "n", "k", "row", "strip"]

    @property
    def label(self) -> str:
        return f"qmatmul {self.scheme}"

    def emit(self, m: Module) -> None:
        Product(self, m).emit()


class Product:
    """Emits the functions of one spec and the kernel that drives them."""

    routed = False

    def __init__(self, spec: QuantMatmul, m: Module) -> None:
        self.spec, self.m = spec, m
        self.strips = 2 if spec.epilogue.pair else 1
        lanes = m.target.lanes(32)
        geometry = Geometry(f32, lanes, ROWS * self.strips // lanes)
        self.columns = spec.epilogue.columns(geometry)
        self.layout = spec.layout
        form, tile = format_of(spec.scheme, self.layout), self.layout.tile
        self.many = ManyRows.of(m, spec.scheme, form, tile, self.strips)
        widths = self.layout.widths if self.many is None else (1,)
        self.tiles = {rows: self._emit_tile(rows) for rows in widths}
        self.finish = emit_finish(m, geometry, spec.epilogue, self.arg, self.routed)
        self.f = m.kernel()
        self.given = {name: self.arg(self.f, name) for name in spec.args}

    def arg(self, f: Function, name: str) -> Value:
        index = self.spec.args.index(name)
        return f.arg(f["args"], index, ptr if name in _POINTERS else i64)

    def __getitem__(self, name: str) -> Value:
        return self.given[name]

    def _emit_tile(self, rows: int) -> Function:
        """void tile(ptr args, ptr strip, ptr x, ptr out): one strip against a tile of rows."""
        params = [("args", ptr), ("strip", ptr), ("x", ptr), ("out", ptr)]
        f = self.m.function(f"tile{rows}", params, internal=True)
        lanes = f.target.lanes(32)
        strip = Strip(f, self.spec.scheme, f["strip"], f["x"], self.arg(f, "k"))
        # Few rows take all columns at once, since memory is read in order then.
        vectors = ROWS // lanes if rows * (ROWS // lanes) <= 4 else 1
        for shift in f.range(0, ROWS, lanes * vectors):
            tile = Tile(f, rows, vectors, shift)
            format_of(self.spec.scheme, self.layout).emit(tile, strip, f["out"], ROWS * self.strips)
        return f

    def make_buffer(self) -> Value:
        if self.many is not None:
            self.many.reserve(self.f)
        return self.f.alloca(4 * ROWS * self.strips * self.layout.tile)

    def emit(self) -> None:
        f, rows, tile = self.f, self["m"], self.layout.tile
        self.buffer = self.make_buffer()
        panels = f.ceil_div(self["n"], self.columns)
        # Chunks are equal but for a tile, so that equal runs of units are equal work.
        tiles = f.ceil_div(rows, tile)
        limit = self._tiles_per_chunk()
        chunks = (tiles + limit - 1).udiv(limit)
        lo, hi = f.split(chunks * panels)
        for unit in f.range(lo, hi):
            chunk = unit.udiv(panels)
            first, last = ((c * tiles).udiv(chunks) * tile for c in (chunk, chunk + 1))
            last = f.min(last, rows)
            self.panel(self["w"], unit - chunk * panels, self["x"], first, last, f.null())

    def _tiles_per_chunk(self) -> Value:
        """The most tiles whose quantised rows fit the cache."""
        f = self.f
        return f.max(f.const(CHUNK).udiv(f.max(self["row"] * self.layout.tile, 1)), 1)

    def panel(self, w: Value, p: Value, x: Value, first: Value, last: Value, route: Value) -> None:
        """Rows first .. last of the quantised rows x against panel p of the strips w."""
        f = self.f
        strips = f.gep(w, p * self["strip"] * self.strips)
        given = strips, p * self.columns, x, first, last, route
        if self.many is None:
            self._tiles(*given)
        else:
            many, one = partial(self._many, self.many, *given), partial(self._tiles, *given)
            f.if_(last - first > 1, many, one)

    def _tiles(
        self, strips: Value, column: Value, x: Value, first: Value, last: Value, route: Value
    ) -> None:
        f = self.f
        for r in f.range(first, last, self.layout.tile):
            left = f.min(last - r, self.layout.tile)
            given = strips, f.gep(x, r * self["row"]), self.buffer
            width = tile_width(f, self.layout, left)
            f.switch(width, {s: partial(self._tile, t, *given) for s, t in self.tiles.items()})
            self._finish(self.buffer, left, r, column, route)

    def _many(
        self, many: ManyRows, strips: Value, column: Value, x: Value, first: Value, last: Value,
        route: Value,
    ) -> None:  # fmt: skip
        f = self.f
        for r in f.range(first, last, PART):
            left = f.min(last - r, PART)
            # One row that is left over is a tile of another kind.
            whole = left - (left & self.layout.tile - 1).eq(1).to(i64, signed=False)
            rows = f.gep(x, r * self["row"])
            many.clear(whole)
            for s in range(self.strips):
                strip = f.gep(strips, self["strip"] * s)
                many.run(strip, s, rows, whole, self["row"], self["k"])
            end = f.gep(rows, whole * self["row"])
            out = f.gep(many.sums, whole, 4 * many.stride)
            f.if_(whole < left, partial(self._tile, self.tiles[1], strips, end, out))
            self._finish(many.sums, left, r, column, route)

    def _finish(self, sums: Value, rows: Value, r: Value, column: Value, route: Value) -> None:
        f = self.f
        at = r * self["n"] + column
        f.call(self.finish, f["args"], sums, rows, at, column, f.gep(route, r, 4))

    def _tile(self, tile: Function, w: Value, x: Value, out: Value) -> None:
        f = self.f
        for s in range(self.strips):
            strip = f.gep(w, self["strip"]) if s else w
            f.call(tile, f["args"], strip, x, f.gep(out, 4 * ROWS * s))
