"""Regions as steps: fused groups, and every elementwise, layout, reduction or norm op by itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from rlx.backends.cpu.cores import usable_cores
from rlx.backends.cpu.lowering import Context, Number, Pointer, Scratch, Status, Step, Word, lowers
from rlx.codegen.region.elements import NAMES
from rlx.codegen.region.kernels import make_plan
from rlx.codegen.region.nest import Quantity
from rlx.codegen.region.nest import Word as NestWord
from rlx.codegen.region.rows import scratch_sizes
from rlx.codegen.region.rules import FOLDS, MOVES
from rlx.codegen.region.settle import NODE, REPORT, Address, Meaning, Settled, settle
from rlx.codegen.region.spec import Region
from rlx.codegen.region.trace import Place, Source
from rlx.codegen.region.wrap import WRITTEN_OUT, graph_of
from rlx.codegen.target import Target
from rlx.ir.dim import Dim, upper_bound
from rlx.ir.lir import aligned, contiguous_strides
from rlx.ir.node import Node, Value
from rlx.ir.op import Op
from rlx.ir.shape import Shape

Strides = tuple[Dim, ...]


@dataclass
class Made:
    """A region for operands that lie in one way: kernels, and values kept between them."""

    kernels: list[Settled]
    temporaries: list[Shape]


@lru_cache(maxsize=4096)
def make(op: Op, shapes: tuple[Shape, ...], strides: tuple[Strides, ...]) -> Made:
    graph = graph_of(op, shapes)
    inputs = [n.output for n in graph.sources("input")]
    operands = {
        v: Source(Place("operand", i), v.shape.dtype, s)
        for i, (v, s) in enumerate(zip(inputs, strides, strict=True))
    }
    plan = make_plan(graph, operands)
    return Made([settle(k) for k in plan.kernels], [v.shape for v in plan.temporaries])


def _plain(node: Node) -> Made:
    shapes = tuple(v.shape for v in node.inputs)
    return make(node.op, shapes, tuple(contiguous_strides(s) for s in shapes))


def scratch_bytes(node: Node, target: Target, threads: int) -> int:
    if _is_empty(node):
        return 0
    made, live = _plain(node), node.graph.live
    kept = max((_kept_bytes(k, live) for k in made.kernels), default=0)
    return sum(_sizes(made, live)) + max(threads, usable_cores()) * kept


def _sizes(made: Made, live: dict[str, int]) -> list[int]:
    """Bytes of each temporary."""
    return [aligned(shape.upper_bytes(live)) for shape in made.temporaries]


def _kept_bytes(settled: Settled, live: dict[str, int]) -> int:
    """Bytes that each worker needs for elements kept between passes."""
    total = 0
    for sizes, each in scratch_sizes(settled.nest):
        total += prod(_most(settled, s, live) for s in sizes) * each
    return aligned(total)


def _most(settled: Settled, size: Quantity, live: dict[str, int]) -> int:
    meaning = size if isinstance(size, int) else settled.words[size.index]
    assert not isinstance(meaning, (str, Address))
    return upper_bound(meaning, live)


def _is_empty(node: Node) -> bool:
    """Whether there is surely nothing to compute."""
    return all(0 in v.shape.dims for v in node.outputs)


_KINDS = (NAMES | MOVES | FOLDS | WRITTEN_OUT | {"elementwise_region"}) - {"constant"}


@lowers(*sorted(_KINDS), scratch=scratch_bytes, strided=True)
def lower_region(node: Node, ctx: Context) -> list[Step]:
    if _is_empty(node):
        return []
    shapes = tuple(v.shape for v in node.inputs)
    made = make(node.op, shapes, tuple(ctx.strides(v) for v in node.inputs))
    offsets = _offsets(made, ctx.lir.live)
    cost = node.op.cost([v.shape for v in node.inputs], [v.shape for v in node.outputs])
    steps = [step_for(node, ctx, settled, offsets) for settled in made.kernels]
    for step in steps:
        step.flops, step.bytes = cost.flops // len(steps), cost.bytes // len(steps)
    return steps


def step_for(node: Node, ctx: Context, settled: Settled, offsets: Sequence[int] = (0,)) -> Step:
    """The step of a kernel; `offsets` are those of temporaries in scratch memory, and the end."""
    words = [_word(node, meaning, offsets) for meaning in settled.words]
    scratch = None
    kept = 0 if settled.columns else _kept_bytes(settled, ctx.lir.live)
    if kept:
        scratch = (NestWord(len(words)), NestWord(len(words) + 1))
        words += [Scratch(node, offsets[-1]), kept]
    places = [m.place for m in settled.words if isinstance(m, Address)]
    reads, writes = _touched(node, settled)
    uses_scratch = bool(kept) or any(p.kind == "temporary" for p in places)
    spec = Region(settled.nest, settled.columns, scratch)
    return Step(spec, words, reads, writes, uses_scratch=uses_scratch)


def _offsets(made: Made, live: dict[str, int]) -> list[int]:
    """Where each temporary lies in scratch memory, and what follows them."""
    offsets = [0]
    for size in _sizes(made, live):
        offsets.append(offsets[-1] + size)
    return offsets


def _word(node: Node, meaning: Meaning, offsets: Sequence[int]) -> Word:
    if meaning == REPORT:
        return Status()
    if meaning == NODE:
        return Number(node)
    if not isinstance(meaning, Address):
        assert not isinstance(meaning, str)
        return meaning
    place = meaning.place
    if place.kind == "temporary":
        return Scratch(node, offsets[place.number], meaning.shift * meaning.bytes)
    values = node.inputs if place.kind == "operand" else node.outputs
    return Pointer(values[place.number], meaning.shift)


def _touched(node: Node, settled: Settled) -> tuple[list[Value], list[Value]]:
    """Values that a kernel reads and writes."""
    stored = {s.walk.pointer for s in settled.nest.stores}
    reads, writes = list[Value](), list[Value]()
    for number, meaning in enumerate(settled.words):
        if not isinstance(meaning, Address) or meaning.place.kind == "temporary":
            continue
        values = node.inputs if meaning.place.kind == "operand" else node.outputs
        into = writes if NestWord(number) in stored else reads
        into.append(values[meaning.place.number])
    return reads, writes
