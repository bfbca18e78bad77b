"""Products with packed weights that are decoded on the way: any scheme, on any target.

Many rows: a panel of columns is decoded, row by row of the packed weight, turned, and multiplied by
the f32 micro-kernel; the cost of decoding is shared by all rows of a chunk. Few rows: every packed
row is decoded into the cache and multiplied with them at once.
"""

from __future__ import annotations

from functools import partial

from rlx.codegen.emit import Function, Module, Value, f32, i64, ptr, vec
from rlx.codegen.grouped_matmul import GroupedMatmul, GroupedProduct
from rlx.codegen.matmul import CHUNK, GROUP, TERMS, Matmul, Product
from rlx.codegen.matmul_micro import ROWS
from rlx.codegen.qmatmul.decode import emit_decode
from rlx.codegen.target import Target
from rlx.ir.quant import GGUF_SCHEMES, QuantScheme
from rlx.support.records import dataclass

FEW = 12  # rows up to which decoding a column at a time beats turning panels
_AT_ONCE = 4  # rows that share the loads of a column, or chains of the sum of one row
_POINTERS = frozenset(["scale", "zp"])
_F32 = GGUF_SCHEMES["F32"]


def block_terms(scheme: QuantScheme) -> int:
    """k of a decoded panel: about `TERMS`, in whole blocks."""
    run = scheme.block or scheme.block_size
    return max(TERMS // run, 1) * run


@dataclass(frozen=True)
class DecodedMatmul(Matmul):
    """args: as `self.args` lists them; `w`, `scale` and `zp` are the packed weight's, with
    `row`, `scale_row` and `zp_row` bytes to a row."""

    scheme: QuantScheme = _F32

    @property
    def args(self) -> list[str]:
        return [*super().args, "scale", "zp", "row", "scale_row", "zp_row"]

    @property
    def label(self) -> str:
        return f"decoded_matmul {self.scheme}"

    @property
    def direct(self) -> bool:
        """Rows are copied: of few, some more than there are may be read."""
        return False

    def scratch(self, target: Target, rows: int, n: int, k: int) -> int:
        terms = block_terms(self.scheme)
        g, tall = self.geometry(target), _up(min(rows, CHUNK), ROWS)
        tiles = min(-(-n // g.width), GROUP) * max(tall // ROWS, 1) * g.tile_bytes
        parts = [max(tall * terms, FEW * k), terms * g.width, max(terms * g.width, k)]
        return sum(_up(4 * p, 64) for p in parts) + max(tiles, FEW * g.row_bytes)

    def emit(self, m: Module) -> None:
        DecodedProduct(self, m).emit()


def _up(n: int, step: int) -> int:
    return -(-n // step) * step


class _Decodes(Product):
    """Panels that come from packed rows. `spec.w` is f32: what the micro-kernel reads."""

    spec: DecodedMatmul
    decode: Function

    def arg(self, f: Function, name: str) -> Value:
        if name in _POINTERS:
            return f.arg(f["args"], self.spec.args.index(name), ptr)
        return super().arg(f, name)

    def lay_out_scratch(self, offset: Value, per_chunk: Value) -> None:
        """Packed rows (or, of few, the rows themselves), a panel, decoded rows, and tiles."""
        f, terms, k = self.f, block_terms(self.spec.scheme), self["k"]
        self.cut_terms(per_chunk)
        tall = f.ceil_div(per_chunk, ROWS) * ROWS
        self.packed_rows = f.gep(self["scratch"], offset)
        rows = f.max(tall * terms, k * FEW)
        self.packed_panel = f.gep(self.packed_rows, _round_up(rows * 4))
        panel = _up(4 * terms * self.g.width, 64)
        self.decoded = f.gep(self.packed_panel, panel)
        self.tiles = f.gep(self.decoded, f.max(_round_up(k * 4), panel))

    def cut_terms(self, rows: Value) -> None:
        terms = block_terms(self.spec.scheme)
        self.terms, self.single = self.f.i64(terms), self["k"] <= terms

    def decode_row(self, w: Value, row: Value, k: Value, count: Value, out: Value) -> None:
        """Weights k .. k + count of a row of the expert (or the whole weight) that begins at w."""
        f = self.f
        before = (w.bits(i64) - self["w"].bits(i64)).udiv(f.max(self["row"], 1))
        index = before + row
        names = (("w", "row"), ("scale", "scale_row"), ("zp", "zp_row"))
        places = [f.gep(self[base], index * self[step]) for base, step in names]
        f.call(self.decode, *places, k, count, out)

    def _panel(self, w: Value, p: Value, k: Value, terms: Value) -> Value:
        f = self.f
        first = p * self.columns
        count = f.min(self["n"] - first, self.columns)
        for i in f.range(0, count):
            self.decode_row(w, first + i, k, terms, f.gep(self.decoded, i * terms, 4))
        self._stage(self.decoded, (terms * 4, f.i64(4)), count, terms, 0)
        return self.packed_panel


class DecodedProduct(_Decodes):
    def __init__(self, spec: DecodedMatmul, m: Module) -> None:
        super().__init__(spec, m)
        self.decode = emit_decode(m, spec.scheme)

    def emit(self) -> None:
        f = self.f
        f.if_(self["m"] <= FEW, self._few_rows, super().emit)

    def _few_rows(self) -> None:
        """Every column decoded once, and multiplied with all rows."""
        f, rows, k = self.f, self["m"], self["k"]
        self.lay_out_scratch(f["tid"].to(i64) * self["step"], rows)
        self._copy_rows(rows, k)
        panels = f.ceil_div(self["n"], self.columns)
        lo, hi = f.split(panels)
        for p in f.range(lo, hi):
            first = p * self.columns
            count = f.min(self["n"] - first, self.columns)
            for c in f.range(0, count):
                self.decode_row(self["w"], first + c, f.i64(0), k, self.decoded)
                f.if_(rows.eq(1), partial(self._column, 1, c), partial(self._column, _AT_ONCE, c))
            self._finish(self.tiles, rows, first, first, f.null())

    def _column(self, at_once: int, c: Value) -> None:
        """Column c of the tile, some rows at once; rows that are not there hold anything."""
        f, k = self.f, self["k"]
        for r in f.range(0, self["m"], at_once):
            rows = [f.gep(self.packed_rows, (r + i) * k, 4) for i in range(at_once)]
            for i, total in enumerate(self._dots(rows, self.decoded, k)):
                f.store(total, f.gep(self.tiles, (r + i) * self.g.width + c, 4))

    def _copy_rows(self, rows: Value, k: Value) -> None:
        """The rows as f32, one after another."""
        f = self.f
        for r in f.range(0, rows):
            src = f.gep(self["x"], r * self["x_line"])
            dst = f.gep(self.packed_rows, r * k, 4)
            one = f.i64(1)
            f.call(self.pack_x, src, self["x_line"], self["x_term"], one, k, dst, one, f.null())

    def _dots(self, rows: list[Value], b: Value, k: Value) -> list[Value]:
        """Products of rows with one column."""
        f, lanes, count = self.f, self.g.lanes, len(rows)
        wide, chains = vec(lanes, f32), _AT_ONCE // count
        whole = k - k.urem(lanes * chains)

        def step(i: Value, *given: Value) -> list[Value]:
            sums = list(given)
            places = [f.gep(row, i, 4) for row in rows]
            column = f.gep(b, i, 4)
            for j in range(chains):
                weights = f.load(column, wide, j * wide.bytes)
                for r, place in enumerate(places):
                    x = f.load(place, wide, j * wide.bytes)
                    sums[j * count + r] = f.fma(x, weights, sums[j * count + r])
            return sums

        zeros = [f.const(0.0, wide)] * _AT_ONCE
        sums = f.loop(0, whole, lanes * chains, zeros, step)
        totals = []
        for r in range(count):
            total = sums[r]
            for j in range(1, chains):
                total = total + sums[j * count + r]
            totals.append(f.reduce("add", total))

        def one(i: Value, *totals: Value) -> list[Value]:
            weight = f.load(f.gep(b, i, 4), f32)
            return [
                f.fma(f.load(f.gep(row, i, 4), f32), weight, total)
                for row, total in zip(rows, totals, strict=True)
            ]

        return f.loop(whole, k, 1, totals, one)


@dataclass(frozen=True)
class DecodedGrouped(DecodedMatmul, GroupedMatmul):
    """args: those of a decoded product, and `table`, `w_expert` as for `GroupedMatmul`."""

    def emit(self, m: Module) -> None:
        _DecodedGrouped(self, m).emit()


class _DecodedGrouped(_Decodes, GroupedProduct):
    def __init__(self, spec: DecodedGrouped, m: Module) -> None:
        GroupedProduct.__init__(self, spec, m)
        self.decode = emit_decode(m, spec.scheme)


def _round_up(size: Value) -> Value:
    return (size + 63) & -64
