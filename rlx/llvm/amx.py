"""Intel AMX: eight tile registers of up to 16 rows of 64 bytes, and their dot products.

    tiles = Tiles(f, [(16, 64)] * 8)              # rows and bytes of a row of each register
    tiles.configure()
    tiles.zero(0)
    tiles.load(1, a, a_stride)                    # 16 rows of x
    tiles.load(2, b, 64)                          # w: [k / 4][column][4]
    tiles.multiply("ss", 0, 1, 2)                 # 0 += 1 x 2, signed bytes times signed bytes
    tiles.store(0, out, out_stride)
    tiles.release()

Registers are named by number, so that LLVM neither chooses nor spills them. They hold nothing
across a call; the configuration stays until `release`. A target whose code emulates AMX has the
same in memory, with the results that Intel's manual gives, so that kernels can be run on any CPU.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlx.errors import CodegenError
from rlx.llvm.builder import Function, Module, Value, f32, i8, i32, i64, ptr, vec, void
from rlx.llvm.target import Target

TILE_ROWS = 16
TILE_BYTES = 64  # of a row
NUM_TILES = 8
_SIZE = TILE_ROWS * TILE_BYTES
_INT8 = ("ss", "su", "us", "uu")  # signs of the left and the right operand
_BF16 = "bf16"


class Tiles:
    """The tile registers of a function: each has a shape, (rows, bytes of a row)."""

    def __init__(self, f: Function, shapes: Sequence[tuple[int, int]]) -> None:
        if len(shapes) > NUM_TILES or not all(map(_is_shape, shapes)):
            raise CodegenError(
                "no such tiles", where="amx", got=list(shapes),
                expected=f"at most {NUM_TILES} of up to {TILE_ROWS} rows, {TILE_BYTES} bytes each",
            )  # fmt: skip
        if not (f.target.has("amx-tile") or f.target.emulates_amx):
            raise CodegenError("no tile registers", where="amx", got=f.target.cpu)
        self.f, self.shapes = f, list(shapes)
        self._memory = f.alloca(_SIZE * len(shapes)) if f.target.emulates_amx else None

    def configure(self) -> None:
        """Give the registers their shapes, and zeros."""
        if self._memory is None:
            rows = bytes(r for r, _ in self.shapes)
            widths = b"".join(width.to_bytes(2, "little") for _, width in self.shapes)
            table = b"\x01" + bytes(15) + widths.ljust(32, b"\0") + rows.ljust(16, b"\0")
            at = self.f.module.table(self.f, table)
            self.f.intrinsic("llvm.x86.ldtilecfg", void, at)

    def release(self) -> None:
        """Leave the registers without contents, which a switch of threads then need not save."""
        if self._memory is None:
            self.f.intrinsic("llvm.x86.tilerelease", void)

    def zero(self, tile: int) -> None:
        if self._memory is None:
            self.f.intrinsic("llvm.x86.tilezero", void, self._number(tile))
        else:
            self.f.call(_emulated(self.f.module, "zero"), self._place(tile))

    def load(self, tile: int, at: Value, stride: Value | int) -> None:
        """Rows from memory, `stride` bytes apart."""
        self._move("load", "tileloadd64", tile, at, stride)

    def store(self, tile: int, at: Value, stride: Value | int) -> None:
        """Rows to memory, `stride` bytes apart."""
        self._move("store", "tilestored64", tile, at, stride)

    def _move(self, name: str, instruction: str, tile: int, at: Value, stride: Value | int) -> None:
        f, stride = self.f, self.f.const(stride)
        if self._memory is None:
            f.intrinsic(f"llvm.x86.{instruction}", void, self._number(tile), at, stride)
            return
        rows, width = self.shapes[tile]
        function = _emulated(f.module, name)
        f.call(function, self._place(tile), at, stride, f.i64(rows), f.i64(width // 4))

    def multiply(self, kind: str, total: int, a: int, b: int) -> None:
        """total += a x b. Words of four bytes, signed or not ("ss", "su", "us", "uu": a, then b),
        are summed in i32; pairs of bf16 ("bf16") in f32."""
        rows, width = self.shapes[total]
        inner = self.shapes[a][1] // 4
        if self.shapes[a][0] != rows or self.shapes[b] != (inner, width):
            shapes = [self.shapes[t] for t in (total, a, b)]
            raise CodegenError("shapes of tiles do not fit", where=f"multiply {kind}", got=shapes)
        if self._memory is None:
            name = "tdpbf16ps" if kind == _BF16 else f"tdpb{kind}d"
            numbers = map(self._number, (total, a, b))
            self.f.intrinsic(f"llvm.x86.{name}", void, *numbers)
            return
        function = _emulated(self.f.module, kind)
        sizes = self.f.i64(rows), self.f.i64(inner)
        self.f.call(function, *map(self._place, (total, a, b)), *sizes)

    def _number(self, tile: int) -> Value:
        self._check(tile)
        return self.f.const(tile, i8)

    def _place(self, tile: int) -> Value:
        self._check(tile)
        assert self._memory is not None
        return self.f.gep(self._memory, _SIZE * tile)

    def _check(self, tile: int) -> None:
        if not 0 <= tile < len(self.shapes):
            raise CodegenError("no such tile", where="amx", got=tile, expected=len(self.shapes))


def _is_shape(shape: tuple[int, int]) -> bool:
    rows, width = shape
    return 1 <= rows <= TILE_ROWS and width % 4 == 0 and 4 <= width <= TILE_BYTES


def has_tiles(target: Target) -> bool:
    """Whether kernels for the target multiply bytes by tiles."""
    return target.amx_int8 or target.emulates_amx


# -- the same in memory ------------------------------------------------------------------------

_LINE = vec(TILE_BYTES // 4, i32)


def _emulated(m: Module, name: str) -> Function:
    """A function of the module that does what an instruction does."""
    full = f"amx_{name}"
    if full not in m.functions:
        if name == "zero":
            _emit_zero(m.function(full, [("tile", ptr)], internal=True))
        elif name in ("load", "store"):
            params = [("tile", ptr), ("at", ptr), ("stride", i64), ("rows", i64), ("words", i64)]
            _emit_move(m.function(full, params, internal=True), name == "load")
        else:
            params = [("total", ptr), ("a", ptr), ("b", ptr), ("rows", i64), ("inner", i64)]
            f = m.function(full, params, internal=True)
            _emit_bf16(f) if name == _BF16 else _emit_int8(f, name)
    return m.functions[full]


def _emit_zero(f: Function) -> None:
    for at in f.range(0, _SIZE, TILE_BYTES):
        f.store(f.const(0, _LINE), f.gep(f["tile"], at))


def _emit_move(f: Function, loads: bool) -> None:
    """Rows and words that the tile does not have become zero when it is loaded."""
    if loads:
        for at in f.range(0, _SIZE, TILE_BYTES):
            f.store(f.const(0, _LINE), f.gep(f["tile"], at))
    for r in f.range(0, f["rows"]):
        inside = f.gep(f["tile"], r, TILE_BYTES)
        outside = f.gep(f["at"], r * f["stride"])
        source, to = (outside, inside) if loads else (inside, outside)
        for j in f.range(0, f["words"]):
            f.store(f.load(f.gep(source, j, 4), i32, align=1), f.gep(to, j, 4), align=1)


def _emit_int8(f: Function, kind: str) -> None:
    left, right = (sign == "s" for sign in kind)
    for m in f.range(0, f["rows"]):
        at = f.gep(f["total"], m, TILE_BYTES)
        total = f.carry([f.load(at, _LINE)])
        for k in total.range(0, f["inner"]):
            word = f.splat(f.load(f.gep(f.gep(f["a"], m, TILE_BYTES), k, 4), i32), _LINE.lanes)
            line = f.load(f.gep(f["b"], k, TILE_BYTES), _LINE)
            for j in range(4):
                product = _byte(word, j, left) * _byte(line, j, right)
                total.values = [total.values[0] + product]
        f.store(total.values[0], at)


def _byte(words: Value, j: int, signed: bool) -> Value:
    moved = words << 24 - 8 * j
    return moved.ashr(24) if signed else moved >> 24


def _emit_bf16(f: Function) -> None:
    """TDPBF16PS: sums of even and of odd products, each a chain of fma from zero, are added, then
    added to the total. Denormal operands and results are zero, rounding is to nearest even."""
    zero = f.const(0.0, vec(_LINE.lanes, f32))
    for m in f.range(0, f["rows"]):
        at = f.gep(f["total"], m, TILE_BYTES)
        sums = f.carry([zero, zero])
        for k in sums.range(0, f["inner"]):
            word = f.splat(f.load(f.gep(f.gep(f["a"], m, TILE_BYTES), k, 4), i32), _LINE.lanes)
            line = f.load(f.gep(f["b"], k, TILE_BYTES), _LINE)
            sums.values = [
                _flushed(f.fma(_half(word, odd), _half(line, odd), total))
                for odd, total in enumerate(sums.values)
            ]
        with f.exact():
            both = _flushed(sums.values[0] + sums.values[1])
            f.store(_flushed(_flushed(f.load(at, zero.type)) + both), at)


def _half(words: Value, odd: int) -> Value:
    """The bf16 of every word's low or high half, as f32."""
    wide = words & -0x10000 if odd else words << 16
    return _flushed(wide.bits(words.type.with_scalar(f32)))


def _flushed(value: Value) -> Value:
    """Zero, of the same sign, in place of denormals."""
    bits = value.bits()
    tiny = (bits & 0x7F800000).eq(0)
    return value.fn.select(tiny, bits & -0x80000000, bits).bits(value.type)
