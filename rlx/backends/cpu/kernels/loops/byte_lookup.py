"""Functions of one 8-bit tensor, as quantised networks have them between convolutions, are tables.

`tabulate` finds values of 8 bits that elementwise ops make of another one and of scalars that are
params: a dequantised activation that is quantised again. The table is those ops on all 256 bytes,
which `prepare` computes once. The kernel looks up a register of bytes at a time: two permutes of
128 bytes each where the target has them, else sixteen shuffles in which all indices but those of
their sixteen bytes give zero.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import numpy as np

from rlx.backends.cpu.kernels.spec import KernelSpec, Operands
from rlx.backends.cpu.layouts.byte_table import ByteLookup
from rlx.backends.cpu.lowering import Context, KernelArg, KernelLaunch, Pointer, lowers
from rlx.ir.dtype import i8, u8
from rlx.ir.graph import Graph
from rlx.ir.node import Node, Value
from rlx.llvm.builder import Function, Module, i64, vec
from rlx.llvm.builder import Value as Register
from rlx.llvm.builder import i8 as byte
from rlx.llvm.target import Target
from rlx.passes.rewrite import GONE, Editor
from rlx.passes.simplify import dce
from rlx.support.records import dataclass

_LEAST, _MOST = 4, 64  # ops that a table replaces
_GRAIN = 4096  # bytes of a worker at least


def has_tables(target: Target) -> bool:
    return target.is_x86 and (target.has("avx512vbmi") or target.avx2)


def tabulate(graph: Graph, target: Target) -> Graph:
    """The graph with tables in place of elementwise ops from bytes to bytes."""
    if not has_tables(target):
        return graph
    editor = Editor(graph, "tables")
    for node in list(graph.nodes):
        if node.id == GONE or not _maps_bytes(node) or editor.is_param_only(node.output):
            continue
        found = _chain(editor, node)
        if found is not None:
            _replace(editor, node, *found)
    return dce(editor.finish())


def _maps_bytes(node: Node) -> bool:
    return node.op.is_elementwise and len(node.outputs) == 1 and node.output.shape.dtype in (u8, i8)


def _chain(editor: Editor, last: Node) -> tuple[Value, list[Node]] | None:
    """The 8-bit value that a node is a function of, and the ops between, in order. Where there are
    two values, one may be a function of the other."""
    seen, sources = {last}, set[Value]()
    if not _follow(editor, last, seen, sources):
        return None
    while len(sources) > 1:
        latest = max(sources, key=lambda v: v.node.id)
        sources.remove(latest)
        if not _is_function(latest.node) or not _follow(editor, latest.node, seen, sources):
            return None
        seen.add(latest.node)
    found = next(iter(sources), None)
    if found is None or len(seen) < _LEAST or not found.shape.same_dims(last.output.shape):
        return None
    return found, sorted(seen, key=lambda n: n.id)


def _is_function(node: Node) -> bool:
    """Whether elements are functions of elements at the same place."""
    return len(node.outputs) == 1 and (node.op.is_elementwise or isinstance(node.op, ByteLookup))


def _follow(editor: Editor, last: Node, seen: set[Node], sources: set[Value]) -> bool:
    """Add the ops before a node, up to 8-bit values; False where it is no function of those."""
    todo = [last]
    while todo:
        node = todo.pop()
        for i, value in enumerate(node.inputs):
            if isinstance(node.op, ByteLookup) and i == 1:
                continue
            if editor.is_param_only(value):
                if any(d != 1 for d in value.shape.dims):
                    return False
            elif value.shape.dtype in (u8, i8):
                if value.node not in seen:
                    sources.add(value)
            elif not _is_function(value.node):
                return False
            elif value.node not in seen:
                seen.add(value.node)
                todo.append(value.node)
        if len(seen) > _MOST:
            return False
    return True


def _replace(editor: Editor, last: Node, source: Value, nodes: list[Node]) -> None:
    g = editor.graph
    with editor.building(last):
        codes = np.arange(256, dtype=np.uint8).view(source.shape.dtype.numpy)
        made: dict[Value, Value] = {source: g.constant(codes)}

        def operand(value: Value) -> Value:
            if value in made:
                return made[value]
            return value if value.shape.dims == (256,) else g.reshape(value, shape=())

        for node in nodes:
            made[node.output] = g.append(node.op, [operand(v) for v in node.inputs])
        result = g.append(ByteLookup(), (source, made[last.output]))
    editor.replace(last.output, result)


@dataclass(frozen=True)
class LookUpBytes(KernelSpec):
    """args: x, table, out, count."""

    args: ClassVar[tuple[str, ...]] = ("x", "table", "out", "count")

    def emit(self, m: Module) -> None:
        f = m.kernel()
        o = Operands(f, self.args, ("x", "table", "out"))
        permutes = m.target.has("avx512vbmi") and m.target.avx512
        size = m.target.vector_bits // 8 if permutes else 32
        lookup = _permutes(f, o["table"]) if permutes else _shuffles(f, o["table"])
        kind = vec(size, byte)
        lo, hi = f.split(o["count"], _GRAIN)
        whole = hi - (hi - lo).urem(size)
        for at in f.range(lo, whole, size):
            f.store(lookup(f.load(f.gep(o["x"], at), kind)), f.gep(o["out"], at))
        for at in f.range(whole, hi):
            index = f.load(f.gep(o["x"], at), byte).to(i64, signed=False)
            f.store(f.load(f.gep(o["table"], index), byte), f.gep(o["out"], at))


def _permutes(f: Function, table: Register) -> Callable[[Register], Register]:
    kind = vec(64, byte)
    parts = [f.load(table, kind, 64 * n) for n in range(4)]
    name = "llvm.x86.avx512.vpermi2var.qi.512"

    def lookup(x: Register) -> Register:
        low, high = (f.intrinsic(name, kind, a, x, b) for a, b in (parts[:2], parts[2:]))
        return f.select(x < 0, high, low)

    return lookup


def _shuffles(f: Function, table: Register) -> Callable[[Register], Register]:
    kind, half = vec(32, byte), vec(16, byte)
    parts = [f.load(table, half, 16 * n) for n in range(16)]
    wide = [f.concat(part, part) for part in parts]

    def lookup(x: Register) -> Register:
        found = f.const(0, kind)
        for n, part in enumerate(wide):
            # 0 … 15 for its bytes: adding 112 sets the high bit, which gives zero, for all others
            index = f.intrinsic(
                "llvm.uadd.sat.v32i8", kind, x ^ _signed(16 * n), f.const(112, kind)
            )
            found = found | f.intrinsic("llvm.x86.avx2.pshuf.b", kind, part, index)
        return found

    return lookup


def _signed(number: int) -> int:
    return number - 256 if number > 127 else number


@lowers("byte_lookup")
def lower_byte_lookup(node: Node, ctx: Context) -> list[KernelLaunch]:
    x, table = node.inputs
    args: list[KernelArg] = [Pointer(x), Pointer(table), Pointer(node.output)]
    args.append(x.shape.num_elements)
    cost = node.op.cost([v.shape for v in node.inputs], [node.output.shape])
    return [KernelLaunch(LookUpBytes(), args, [x, table], node.outputs, bytes=cost.bytes)]
