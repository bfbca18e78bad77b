"""The GEMM epilogue: scale, bias, activation, residual and rounding of a tile, then the store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from rlx.backends.cpu.kernels.gemm.microkernel import TileShape
from rlx.ir.dtype import DType
from rlx.llvm.builder import Function, Module, Type, Value, i32, i64, ptr
from rlx.llvm.nest.elements import activate
from rlx.llvm.storage import load, memory_type, store
from rlx.support.records import dataclass


@dataclass(frozen=True)
class Epilogue:
    """activation(scale * x·w + bias) + residual, in `out`.

    `pair`: half of a panel's columns are the gate's; the result is activation(gate) * up.
    """

    out: DType
    activation: str = "none"
    bias: DType | None = None
    residual: DType | None = None
    pair: bool = False
    scale: float = 1.0

    @property
    def args(self) -> list[str]:
        """Its operands beside the tile."""
        return ["bias"] * (self.bias is not None) + ["residual"] * (self.residual is not None)

    def columns(self, shape: TileShape) -> int:
        """Columns of the result that one panel gives."""
        return shape.nr // 2 if self.pair else shape.nr


def finish(
    f: Function, e: Epilogue, value: Value, operand: Callable[[str], Value],
    up: Callable[[], Value] | None = None,
) -> Value:  # fmt: skip
    """The epilogue of sums of products; `operand` loads what stands beside them."""
    if e.scale != 1.0:
        value = value * e.scale
    if e.bias is not None:
        value = value + operand("bias")
    value = activate(e.activation, value)
    if up is not None:
        value = value * up()
    if e.residual is not None:
        value = value + operand("residual")
    return value


class RowEpilogue:
    """The epilogue of one row of results; `args` are the names of the kernel's args, in order."""

    def __init__(self, f: Function, e: Epilogue, args: Sequence[str], acc: Type) -> None:
        self.f, self.e, self.acc = f, e, acc
        self.bases = {name: f.arg(f["args"], args.index(name)) for name in e.args}

    def apply(self, value: Value, column: Value, lanes: int) -> Value:
        """The results of the sums in `lanes` columns from `column` on."""
        return finish(self.f, self.e, value, partial(self._operand, column, lanes))

    def _operand(self, column: Value, lanes: int, name: str) -> Value:
        dtype = self.e.bias if name == "bias" else self.e.residual
        assert dtype is not None
        address = self.f.gep(self.bases[name], column, memory_type(dtype))
        return load(self.f, address, dtype, lanes, self.acc)


def emit_epilogue(
    m: Module, shape: TileShape, epilogue: Epilogue, args: Sequence[str], routed: bool = False
) -> Function:
    """void epilogue(ptr args, ptr tile, i64 rows, i64 at, i64 column, ptr route)

    `args` are the names of the kernel's args, in order.
    `at` is the result element of the tile's top left corner. Rows follow each other in the result,
    or are scattered to the row numbers `route` (i32) when `routed`.
    """
    params = [("args", ptr), ("tile", ptr), ("rows", i64), ("at", i64), ("column", i64)]
    f = m.function("epilogue", [*params, ("route", ptr)], internal=True)
    _EpilogueEmitter(f, shape, epilogue, args, routed).emit()
    return f


class _EpilogueEmitter:
    def __init__(
        self, f: Function, shape: TileShape, epilogue: Epilogue, args: Sequence[str], routed: bool
    ) -> None:
        self.f, self.shape, self.epilogue, self.routed = f, shape, epilogue, routed
        names = ["out", *epilogue.args]
        self.bases = {name: f.arg(f["args"], args.index(name)) for name in names}
        self.n = f.arg(f["args"], args.index("n"), i64)
        self.columns = epilogue.columns(shape)
        self.left = self.n - f["column"]
        self.is_edge = self.left < self.columns

    def emit(self) -> None:
        f, e = self.f, self.epilogue
        # The last panel may be wider than the rest of a row: such an edge tile works on copies, so
        # that one body without masks serves both.
        edge = {name: f.alloca(self.columns * self._bytes(name)) for name in self.bases}
        if e.bias is not None:
            self._copy_edge("bias", f["column"], edge)
        for i in f.range(0, f["rows"]):
            if self.routed:
                row = f.load(f.gep(f["route"], i, i32), i32).to(i64)
                at = row * self.n + f["column"]
            else:
                at = i * self.n + f["at"]
            if e.residual is not None:
                self._copy_edge("residual", at, edge)
            self._row(i, at, edge)

    def _bytes(self, name: str) -> int:
        return memory_type(self._dtype(name)).bytes

    def _dtype(self, name: str) -> DType:
        found = getattr(self.epilogue, name)
        assert isinstance(found, DType)
        return found

    def _copy_edge(self, name: str, at: Value, edge: dict[str, Value]) -> None:
        source = self._place(name, at)
        for _ in self.f.when(self.is_edge):
            self._copy(edge[name], source, name)

    def _place(self, name: str, at: Value) -> Value:
        return self.f.gep(self.bases[name], at, self._bytes(name))

    def _copy(self, dst: Value, src: Value, name: str) -> None:
        f, type_ = self.f, memory_type(self._dtype(name)).as_int
        for i in f.range(0, self.left):
            f.store(f.load(f.gep(src, i, type_), type_), f.gep(dst, i, type_))

    def _row(self, i: Value, at: Value, edge: dict[str, Value]) -> None:
        f, g = self.f, self.shape
        starts = {"bias": f["column"]}
        sources = {
            name: f.select(self.is_edge, edge[name], self._place(name, starts.get(name, at)))
            for name in self.bases
        }
        tile = f.gep(f["tile"], i, g.row_bytes)
        for column in f.range(0, self.columns, g.lanes):
            value = self._value(f.gep(tile, column, g.acc), column, sources)
            to = f.gep(sources["out"], column, self._bytes("out"))
            store(f, value, to, self.epilogue.out)
        out = self._place("out", at)
        for _ in f.when(self.is_edge):
            self._copy(out, edge["out"], "out")

    def _value(self, tile: Value, column: Value, sources: dict[str, Value]) -> Value:
        f, g, e = self.f, self.shape, self.epilogue

        def operand(name: str) -> Value:
            address = f.gep(sources[name], column, self._bytes(name))
            return load(f, address, self._dtype(name), g.lanes, g.acc)

        value = f.load(tile, g.acc.with_lanes(g.lanes))
        up = partial(f.load, tile, value.type, g.row_bytes // 2) if e.pair else None
        return finish(f, e, value, operand, up)
