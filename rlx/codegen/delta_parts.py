"""Products of small matrices that lie in working memory, a few columns wide."""

from __future__ import annotations

from rlx.codegen.emit import Function, Module, Type, Value, i64, ptr, vec

_ROWS = 4  # computed together


class Products:
    """The functions of one module that multiply."""

    def __init__(self, m: Module, sums: Type, lanes: int) -> None:
        self.m, self.sums, self.lanes = m, sums, lanes

    def emit(self, vectors: int, fresh: bool) -> Function:
        """void product(a, b, c, a_row, a_term, b_term, c_row, rows, terms, scale)

        c = a·b, or scale·c + a·b unless `fresh`: `rows` by `vectors` vectors, over `terms`. Strides
        are bytes.
        """
        name = f"{'into' if fresh else 'onto'}{vectors}"
        if name in self.m.functions:
            return self.m.functions[name]
        numbers = ["a_row", "a_term", "b_term", "c_row", "rows", "terms"]
        params = [("a", ptr), ("b", ptr), ("c", ptr), *((n, i64) for n in numbers)]
        f = self.m.function(name, [*params, ("scale", self.sums)], internal=True)
        whole = f["rows"] - f["rows"].urem(_ROWS)
        for rows, lo, hi in ((_ROWS, f.i64(0), whole), (1, whole, f["rows"])):
            for i in f.range(lo, hi, rows):
                self._rows(f, i, rows, vectors, fresh)
        return f

    def _rows(self, f: Function, i: Value, rows: int, vectors: int, fresh: bool) -> None:
        type_ = vec(self.lanes, self.sums)
        starts = [f.gep(f["a"], (i + r) * f["a_row"]) for r in range(rows)]
        targets = [f.gep(f["c"], (i + r) * f["c_row"]) for r in range(rows)]
        sums = [f.const(0, type_)] * (rows * vectors)
        if not fresh:
            scale = f.splat(f["scale"], self.lanes)
            sums = [
                f.load(c, type_, j * type_.bytes) * scale for c in targets for j in range(vectors)
            ]

        def term(k: Value, *sums: Value) -> list[Value]:
            line = f.gep(f["b"], k * f["b_term"])
            b = [f.load(line, type_, j * type_.bytes) for j in range(vectors)]
            at, out = k * f["a_term"], []
            for r, start in enumerate(starts):
                a = f.broadcast_load(start, self.sums, self.lanes, at)
                out += [f.fma(a, x, sums[r * vectors + j]) for j, x in enumerate(b)]
            return out

        sums = f.loop(0, f["terms"], 1, sums, term)
        for n, value in enumerate(sums):
            f.store(value, targets[n // vectors], n % vectors * type_.bytes)
