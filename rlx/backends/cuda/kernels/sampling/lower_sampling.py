"""Lowering of `sample`."""

from __future__ import annotations

from math import prod
from typing import Any

from rlx.backends.cuda.kernels.sampling.draw_token import DrawToken
from rlx.backends.cuda.kernels.sampling.part_maxima import BLOCKS, PARTS, PartMaxima
from rlx.backends.cuda.lowering import Context, KernelArg, KernelLaunch, lowers
from rlx.backends.kernel_args import Pointer, Scratch
from rlx.ir.dim import Dim, upper_bound
from rlx.ir.node import Node


def _suits(node: Node) -> bool:
    logits = node.inputs[0].shape
    return logits.dtype.name == "f32" and isinstance(logits.dims[-1], int)


def _rows(node: Node) -> Dim:
    return prod(node.inputs[0].shape.dims[:-1], start=1)


def _scratch(node: Node) -> int:
    return 8 * PARTS * upper_bound(_rows(node), node.graph.live)


@lowers("sample", when=_suits, scratch=_scratch, strided=False)
def lower_sample(node: Node, ctx: Context) -> list[KernelLaunch]:
    op: Any = node.op
    logits, rng, *settings = node.inputs
    vocab, rows = logits.shape.dims[-1], _rows(node)
    assert isinstance(vocab, int)
    most = ctx.upper(rows)
    if not most:
        return [KernelLaunch(None)]  # the rng goes on
    fixed = None if settings else (op.temperature, float(op.top_k), op.top_p, op.min_p)
    maxima: KernelArg = Scratch(node)
    given: KernelArg = Pointer(settings[0]) if settings else 0
    parts = KernelLaunch(PartMaxima(vocab), [Pointer(logits), maxima, rows], blocks=most * BLOCKS)
    outputs = [Pointer(v) for v in node.outputs]
    args = [Pointer(logits), maxima, Pointer(rng), given, *outputs, rows]
    draw = DrawToken(vocab, fixed, rng.shape.rank > 1)
    return [parts, KernelLaunch(draw, args, blocks=most)]
