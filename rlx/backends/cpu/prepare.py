"""Runs prepare graphs: weights are prepacked and constants of params folded, once, when loaded.

Packing kernels are native where there is a compiler. Prepacked weights replace the pages of the
file they came from: these are released as soon as they have been read, so that a model is resident
once, not twice.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from math import prod

import numpy as np

from rlx.backends.base import packing_hook
from rlx.backends.buffer import HOST
from rlx.backends.cpu.kernels.qgemm.repack_weights import RepackColumnTiles
from rlx.backends.cpu.kernels.spec import compile_specs
from rlx.backends.cpu.layouts.quant_ops import PackQuant
from rlx.backends.cpu.program import Launch, Program, address_of
from rlx.backends.cpu.thread_pool import get_thread_pool
from rlx.ir.graph import Graph
from rlx.ir.interp import evaluate
from rlx.ir.node import Node
from rlx.ir.op import Array, Op
from rlx.ir.ops.quantize import QuantizeWeight
from rlx.ir.quant.scheme import encode
from rlx.ir.shape import Shape
from rlx.llvm.target import Target


def prepare_params(graph: Graph, params: Mapping[str, Array], native: bool = True) -> list[Array]:
    """The outputs of a prepare graph, row-major, as kernels expect them.

    Without a compiler NumPy computes the same, slower.
    """
    given = {n.name: params[n.name] for n in graph.sources("param")}

    views: dict[Node, list[Array]] = {}  # the parameters that a node is a view of

    def release(node: Node, results: Sequence[Array]) -> None:
        packed(node, results)
        seen = [a for v in node.inputs for a in views.get(v.node, ())]
        if node.name in given and node.op.is_source:
            views[node] = [given[node.name]]
        elif node.op.is_view:
            views[node] = seen
        else:
            for array in seen:
                release_pages(array)

    if native:
        graph = graph.copy()
        for node in graph.nodes:
            node.op = _native(node.op)
    packed = packing_hook(graph)
    results = evaluate(graph, given, on_node=release)
    return [np.ascontiguousarray(a) for a in results]


def _native(op: Op) -> Op:
    """The op with a native reference, where there is one."""
    if isinstance(op, PackQuant):
        return NativePack(**op.attributes())
    return ThreadedQuantize(op.scheme) if isinstance(op, QuantizeWeight) else op


class NativePack(PackQuant):
    """`pack_quant` by all workers, into memory aligned to a cache line."""

    def reference(self, w: Array, scale: Array | None = None, zp: Array | None = None) -> Array:
        parts = [np.ascontiguousarray(a) for a in (w, scale, zp) if a is not None]
        dims = self.infer(*[Shape(a.shape, a.dtype) for a in parts]).static_dims
        out = HOST.alloc_arena(prod(dims)).array.reshape(dims)
        spec = RepackColumnTiles(self.scheme)
        kernel = compile_specs([spec], Target.host())[spec]
        *outer, rows, width = parts[0].shape
        sizes = spec.sizes(int(np.prod(outer)), rows, self.scheme.row_elements(width), self.pair)
        addresses = [address_of(a) for a in parts] + [0] * (3 - len(parts))
        args = [*addresses, address_of(out), *sizes]
        program = Program([Launch(kernel.address(), args)], keep=(kernel, parts))  # type: ignore[arg-type]
        get_thread_pool().run(program)
        return out


class ThreadedQuantize(QuantizeWeight):
    """`quantize_weight` by as many threads as there are workers."""

    def reference(self, w: Array) -> tuple[Array, ...]:
        parts = encode(self.scheme, w, threads=get_thread_pool().workers)
        return tuple(part for part in parts if part is not None)


def release_pages(array: Array) -> None:
    """Let the system drop the pages of a read-only memory map under an array."""
    base = array
    while isinstance(base, np.ndarray):
        base = base.base
    if not isinstance(base, mmap.mmap) or not hasattr(base, "madvise"):
        return
    whole = memoryview(base)
    if not whole.readonly or not array.flags.c_contiguous:
        return  # what can be written must not be dropped
    start = address_of(array) - address_of(np.frombuffer(base, np.uint8))
    page = mmap.PAGESIZE
    first, last = -(-start // page) * page, (start + array.nbytes) // page * page
    if last > first:
        base.madvise(mmap.MADV_DONTNEED, first, last - first)
