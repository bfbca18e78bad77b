"""Lowering of Fourier transforms and linear systems."""

from __future__ import annotations

from math import prod
from typing import Any

from rlx.backends.cpu.kernels.linalg.dft import Dft
from rlx.backends.cpu.kernels.linalg.fft import Fft
from rlx.backends.cpu.kernels.linalg.solve import Solve
from rlx.backends.cpu.lowering import Context, KernelArg, KernelLaunch, Pointer, Scratch, lowers
from rlx.ir.dim import Dim, upper_bound
from rlx.ir.lir import contiguous_strides
from rlx.ir.node import Node
from rlx.ir.shape import Shape, normalize_axis
from rlx.llvm.target import Target


def _axes(node: Node) -> tuple[Dim, Dim, Dim]:
    """The shape as [outer, n, inner] around the axis."""
    op: Any = node.op
    whole = node.output.shape if op.name == "irfft" else node.inputs[0].shape
    axis = normalize_axis(op.axis, whole.rank)
    outer, inner = prod(whole.dims[:axis], start=1), prod(whole.dims[axis + 1 :], start=1)
    return outer, whole.dims[axis], inner


def _kind(node: Node) -> tuple[str, bool]:
    op: Any = node.op
    if op.name == "irfft":
        return "irfft", True
    if op.name == "rfft":
        return "rfft", False
    return "complex" if node.inputs[0].shape.dtype.kind == "complex" else "real", op.inverse


def _fft(node: Node, target: Target) -> Fft | None:
    """The FFT kernel, if the length is constant."""
    outer, n, inner = _axes(node)
    if not isinstance(n, int):
        return None
    kind, inverse = _kind(node)
    signals = upper_bound(outer * inner, node.graph.live)
    dtype = node.inputs[0].shape.dtype
    return Fft.make(kind, n, dtype, inverse, target, signals, single_inner=inner == 1)


def _scratch(node: Node, target: Target, threads: int) -> int:
    spec = _fft(node, target)
    return 0 if spec is None else spec.scratch * threads


@lowers("fft", "rfft", "irfft", scratch=_scratch)
def lower_fft(node: Node, ctx: Context) -> list[KernelLaunch]:
    x, y = node.inputs[0], node.output
    outer, n, inner = _axes(node)
    cost = node.op.cost([x.shape], [y.shape])
    spec = _fft(node, ctx.target)
    if spec is None:
        args: list[KernelArg] = [Pointer(x), Pointer(y), outer, n, inner]
        kind, inverse = _kind(node)
        dft = Dft(kind, x.shape.dtype, inverse)
        return [KernelLaunch(dft, args, [x], [y], flops=cost.flops, bytes=cost.bytes)]
    args = [Pointer(x), Pointer(y), Scratch(node), spec.scratch, outer, inner]
    return [
        KernelLaunch(spec, args, [x], [y], uses_scratch=True, flops=cost.flops, bytes=cost.bytes)
    ]


def _solve_sizes(node: Node) -> tuple[int, int]:
    """Upper bounds of the rows and right-hand sides."""
    n, m = node.output.shape.dims[-2:]
    return upper_bound(n, node.graph.live), upper_bound(m, node.graph.live)


def _rhs_splits(node: Node, threads: int) -> int:
    """Splits of the right-hand sides; each repeats the elimination, so there must be many."""
    n, m = _solve_sizes(node)
    matrices = prod(node.output.shape.dims[:-2], start=1)
    if not isinstance(matrices, int) or matrices == 0 or n == 0:
        return 1
    return max(1, min(threads // matrices, m // n))


def _solve_scratch(node: Node, target: Target, threads: int) -> int:
    return threads * max(Solve.scratch(target, *_solve_sizes(node)), 64)


@lowers("solve", scratch=_solve_scratch)
def lower_solve(node: Node, ctx: Context) -> list[KernelLaunch]:
    a, b = node.inputs
    x = node.output
    n, m = x.shape.dims[-2:]
    batch = x.shape.dims[:-2]
    spec = Solve(a.shape.dtype, b.shape.dtype, x.shape.dtype, len(batch))
    args: list[KernelArg] = [Pointer(a), Pointer(b), Pointer(x), Scratch(node)]
    args += [Solve.scratch(ctx.target, *_solve_sizes(node)), n, m, _rhs_splits(node, ctx.threads)]
    for axis, size in enumerate(batch):
        args += [size, *[_batch_stride(v.shape, axis - len(batch) - 2) for v in (a, b)]]
    cost = node.op.cost([a.shape, b.shape], [x.shape])
    return [
        KernelLaunch(spec, args, [a, b], [x], uses_scratch=True, flops=cost.flops, bytes=cost.bytes)
    ]


def _batch_stride(shape: Shape, axis: int) -> Dim:
    """Stride along a batch axis (counted from the end), in elements."""
    if -axis > shape.rank or shape.dims[axis] == 1:
        return 0
    return contiguous_strides(shape)[axis]
