"""The args of a kernel by name, for kernels that have many."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from rlx.llvm.builder import Function, Value, i64, ptr


class Operands:
    """Args read where they are first asked for; `o["name"]` is a pointer or an i64.

    Ask for an arg in a block that comes before all its uses: at the start of a function, usually by
    making the object with every name the function needs.
    """

    def __init__(
        self,
        f: Function,
        order: Sequence[str],
        pointers: Collection[str],
        wanted: Collection[str] | None = None,
    ) -> None:
        self.values: dict[str, Value] = {}
        for index, name in enumerate(order):
            if wanted is None or name in wanted:
                type_ = ptr if name in pointers else i64
                self.values[name] = f.arg(f["args"], index, type_)

    def __getitem__(self, name: str) -> Value:
        return self.values[name]
