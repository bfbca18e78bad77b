"""Packed weights of any GGUF type as f32: a thread decodes a block, neighbours one of other rows.

The code for a block is that of CPUs (`rlx.llvm.dequant_formats`).
"""

from __future__ import annotations

from math import prod
from typing import Any

from rlx.backends.cuda.builder import KernelFunction, KernelModule
from rlx.backends.cuda.kernel import GpuKernel
from rlx.backends.cuda.lowering import Context, KernelArg, KernelLaunch, lowers
from rlx.backends.kernel_args import NodeNumber, Pointer, Status
from rlx.errors import CodegenError
from rlx.ir.dtype import DType
from rlx.ir.node import Node
from rlx.ir.quant.scheme import GGUF_SCHEMES, QuantScheme
from rlx.llvm.builder import Value, f32, i64
from rlx.llvm.dequant_formats import DEQUANTIZERS, Block, Offset
from rlx.llvm.storage import load, memory_type
from rlx.support.records import dataclass

_FLOATS = {"F32": "f32", "F16": "f16", "BF16": "bf16"}


class _ColumnBlock(Block):
    """A block whose weights are written `stride` bytes apart."""

    def __init__(self, f: KernelFunction, src: Value, out: Value, stride: Value) -> None:
        super().__init__(f, src, out)
        self.stride = stride

    def write(self, at: Offset, values: Value) -> None:
        f = self.f
        first = f.i64(at) if isinstance(at, int) else at
        for i in range(values.type.lanes):
            f.store(f.extract(values, i), f.gep(self.out, (first + i) * self.stride))


@dataclass(frozen=True)
class DequantRows(GpuKernel):
    """args: weight, ids, result (f32), number of ids, experts, rows of an expert, blocks of a row,
    status, error number

    The weight is [experts, rows, blocks], the result [ids, elements, rows].
    """

    scheme: str
    ids: DType

    @property
    def label(self) -> str:
        return f"dequant({self.scheme})"

    def emit(self, m: KernelModule) -> None:
        f = m.begin_kernel()
        args = f["args"]
        weight, ids, out = (f.arg(args, i) for i in range(3))
        count, experts, rows, blocks = (f.arg(args, i, i64) for i in range(3, 7))
        status, node = f.arg(args, 7), f.arg(args, 8, i64)
        scheme = GGUF_SCHEMES[self.scheme]
        size, elements = scheme.bytes_per_block, scheme.block_size
        for item in f.elements(count * blocks * rows):
            outer = item.udiv(rows)
            row, number = item - outer * rows, outer.udiv(blocks)
            block = outer - number * blocks
            found = f.load(f.gep(ids, number, self.ids.bytes), memory_type(self.ids))
            expert = found.to(i64, signed=self.ids.kind == "int")
            place = (expert * rows + row) * blocks + block
            to = f.gep(out, outer * (rows * elements) + row, 4)

            def decode(place: Value = place, to: Value = to) -> None:
                self._decode(f, f.gep(weight, place, size), to, rows * 4)

            f.if_(expert.ult(experts), decode, lambda: f.store(node, status))

    def _decode(self, f: KernelFunction, source: Value, to: Value, stride: Value) -> None:
        if self.scheme in _FLOATS:
            f.store(load(f, source, DType.of(_FLOATS[self.scheme]), 1, f32), to)
            return
        emitter = DEQUANTIZERS.get(self.scheme)
        if emitter is None:
            raise CodegenError("no native dequantizer", where="dequantize", got=self.scheme)
        emitter(_ColumnBlock(f, source, to, stride))


def _is_of_gguf(node: Node) -> bool:
    op: Any = node.op
    scheme: QuantScheme = op.scheme
    known = scheme.name in DEQUANTIZERS or scheme.name in _FLOATS
    return scheme.ggml_type is not None and known


@lowers("dequant_moe_weights", when=_is_of_gguf, strided=False)
def lower_dequant(node: Node, ctx: Context) -> list[KernelLaunch]:
    op: Any = node.op
    scheme: QuantScheme = op.scheme
    w, ids = node.inputs
    experts, rows, _ = w.shape.dims
    blocks = node.output.shape.dims[1] // scheme.block_size
    kernel = DequantRows(scheme.name, ids.dtype)
    args: list[KernelArg] = [
        Pointer(w),
        Pointer(ids),
        Pointer(node.output),
        ids.shape.dims[0],
        experts,
        rows,
    ]
    args += [blocks, Status(), NodeNumber(node)]
    count = ctx.upper(prod((ids.shape.dims[0], rows, blocks), start=1))
    return [KernelLaunch(kernel, args, count)] if count else []
