"""What happens to a finished tile: scale, bias, activation, residual, rounding, and out it goes."""

from __future__ import annotations

from collections.abc import Callable

from rlx.codegen.emit import Function, Module, Value, i32, i64, ptr
from rlx.codegen.matmul_micro import Geometry
from rlx.codegen.region.elements import activate
from rlx.codegen.storage import load, memory_type, store
from rlx.ir.dtype import DType
from rlx.support.records import dataclass


@dataclass(frozen=True)
class Epilogue:
    """activation(scale * product + bias) + residual, in `out`.

    `pair`: half of a panel's columns are gates; the result is activation(gate) * up.
    """

    out: DType
    activation: str = "none"
    bias: DType | None = None
    residual: DType | None = None
    pair: bool = False
    scale: float = 1.0

    @property
    def args(self) -> list[str]:
        """The operands it reads beside the tile."""
        return ["bias"] * (self.bias is not None) + ["residual"] * (self.residual is not None)

    def columns(self, geometry: Geometry) -> int:
        """Columns of the result that one panel gives."""
        return geometry.width // 2 if self.pair else geometry.width


Args = Callable[[Function, str], Value]  # the value of a kernel's arg, by name


def emit_finish(
    m: Module, geometry: Geometry, epilogue: Epilogue, args: Args, routed: bool = False
) -> Function:
    """void finish(ptr args, ptr tile, i64 rows, i64 at, i64 column, ptr route)

    `at` is the element of the result where the tile's first row begins (column included); the rows
    follow each other, or lie where `route` (i32 row numbers) says when `routed`.
    """
    params = [("args", ptr), ("tile", ptr), ("rows", i64), ("at", i64), ("column", i64)]
    f = m.function("finish", [*params, ("route", ptr)], internal=True)
    _Finish(f, geometry, epilogue, args, routed).emit()
    return f


class _Finish:
    def __init__(
        self, f: Function, geometry: Geometry, epilogue: Epilogue, args: Args, routed: bool
    ) -> None:
        self.f, self.geometry, self.epilogue, self.routed = f, geometry, epilogue, routed
        self.bases = {name: args(f, name) for name in ["out", *epilogue.args]}
        self.n = args(f, "n")
        self.columns = epilogue.columns(geometry)
        self.left = self.n - f["column"]
        self.short = self.left < self.columns

    def emit(self) -> None:
        f, e = self.f, self.epilogue
        # The last panel may be wider than what is left of a row. It works on copies then, so that
        # there is one body, without masks, for both.
        spare = {name: f.alloca(self.columns * self._bytes(name)) for name in self.bases}
        if e.bias is not None:
            self._fetch("bias", f["column"], spare)
        for i in f.range(0, f["rows"]):
            if self.routed:
                row = f.load(f.gep(f["route"], i, i32), i32).to(i64)
                at = row * self.n + f["column"]
            else:
                at = i * self.n + f["at"]
            if e.residual is not None:
                self._fetch("residual", at, spare)
            self._row(i, at, spare)

    def _bytes(self, name: str) -> int:
        return memory_type(self._dtype(name)).bytes

    def _dtype(self, name: str) -> DType:
        found = getattr(self.epilogue, name)
        assert isinstance(found, DType)
        return found

    def _fetch(self, name: str, at: Value, spare: dict[str, Value]) -> None:
        source = self._place(name, at)
        self.f.if_(self.short, lambda: self._copy(spare[name], source, name))

    def _place(self, name: str, at: Value) -> Value:
        return self.f.gep(self.bases[name], at, self._bytes(name))

    def _copy(self, dst: Value, src: Value, name: str) -> None:
        f, type_ = self.f, memory_type(self._dtype(name)).as_int
        for i in f.range(0, self.left):
            f.store(f.load(f.gep(src, i, type_), type_), f.gep(dst, i, type_))

    def _row(self, i: Value, at: Value, spare: dict[str, Value]) -> None:
        f, g = self.f, self.geometry
        starts = {"bias": f["column"]}
        sources = {
            name: f.select(self.short, spare[name], self._place(name, starts.get(name, at)))
            for name in self.bases
        }
        tile = f.gep(f["tile"], i, g.row_bytes)
        for column in f.range(0, self.columns, g.lanes):
            value = self._value(f.gep(tile, column, g.sums), column, sources)
            to = f.gep(sources["out"], column, self._bytes("out"))
            store(f, value, to, self.epilogue.out)
        out = self._place("out", at)
        f.if_(self.short, lambda: self._copy(out, spare["out"], "out"))

    def _value(self, tile: Value, column: Value, sources: dict[str, Value]) -> Value:
        f, g, e = self.f, self.geometry, self.epilogue

        def beside(name: str) -> Value:
            address = f.gep(sources[name], column, self._bytes(name))
            return load(f, address, self._dtype(name), g.lanes, g.sums)

        value = f.load(tile, g.sums.with_lanes(g.lanes))
        if e.scale != 1.0:
            value = value * e.scale
        if e.bias is not None:
            value = value + beside("bias")
        value = activate(e.activation, value)
        if e.pair:
            value = value * f.load(tile, value.type, g.row_bytes // 2)
        if e.residual is not None:
            value = value + beside("residual")
        return value
