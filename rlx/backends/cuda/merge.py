"""Neighbouring launches that do not depend on each other, as one launch: a block has one of them.

A launch of its own costs microseconds, more than the work of a small kernel.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlx.backends.cuda.builder import BlockFunction, KernelModule
from rlx.backends.cuda.kernel import BlockKernel
from rlx.backends.cuda.lowering import KernelLaunch
from rlx.ir.lir import Lir
from rlx.ir.node import Value
from rlx.llvm.builder import Value as Code
from rlx.support.records import dataclass


@dataclass(frozen=True)
class Merged(BlockKernel):
    """args: those of all parts, one after the other

    `parts` are kernels with the number of their blocks and args.
    """

    parts: tuple[tuple[BlockKernel, int, int], ...]

    @property
    def label(self) -> str:
        return " + ".join(dict.fromkeys(kernel.label for kernel, _, _ in self.parts))

    @property
    def threads(self) -> int:
        return self.parts[0][0].threads

    @property
    def shared(self) -> int:
        return max(kernel.shared for kernel, _, _ in self.parts)

    def emit(self, m: KernelModule) -> None:
        f = m.begin_block(self.threads, self.shared)
        f.let_next_start()
        f.wait_for_previous()
        self._emit_from(f, m, 0, 0, 0)

    def _emit_from(self, f: BlockFunction, m: KernelModule, i: int, block: int, arg: int) -> None:
        kernel, blocks, args = self.parts[i]

        def emit_part() -> None:
            with f.part(block, 8 * arg):
                kernel.emit(PartModule(f, m))

        if i == len(self.parts) - 1:
            emit_part()
            return
        inside: Code = f.block_number() < block + blocks
        f.if_(inside, emit_part, lambda: self._emit_from(f, m, i + 1, block + blocks, arg + args))


class PartModule(KernelModule):
    """A module that has begun its kernel already."""

    def __init__(self, f: BlockFunction, m: KernelModule) -> None:
        super().__init__(m.target)
        self._f = f

    def begin_block(self, threads: int, shared: int = 0, min_blocks: int = 1) -> BlockFunction:
        return self._f


def merge_launches(launches: Sequence[KernelLaunch], lir: Lir) -> list[KernelLaunch]:
    """Merge runs of launches that name what they read and write, and do not depend on each
    other."""
    made: list[KernelLaunch] = []
    run: list[KernelLaunch] = []
    for launch in launches:
        if run and not all(_are_independent(lir, x, launch) for x in run):
            made.append(_merged(run))
            run = []
        if launch.writes and isinstance(launch.kernel, BlockKernel):
            run.append(launch)
            continue
        if run:
            made.append(_merged(run))
            run = []
        made.append(launch)
    if run:
        made.append(_merged(run))
    return made


def _merged(run: Sequence[KernelLaunch]) -> KernelLaunch:
    if len(run) == 1:
        return run[0]
    parts = []
    for x in run:
        assert isinstance(x.kernel, BlockKernel)
        parts.append((x.kernel, x.blocks, len(x.args)))
    args = [a for x in run for a in x.args]
    return KernelLaunch(
        Merged(tuple(parts)), args, blocks=sum(x.blocks for x in run), node=run[-1].node
    )


def _are_independent(lir: Lir, a: KernelLaunch, b: KernelLaunch) -> bool:
    if not (a.writes and b.writes) or a.kernel is None or b.kernel is None:
        return False
    if a.kernel.threads != b.kernel.threads or _phase(lir, a) is not _phase(lir, b):
        return False
    after = [(w, v) for w in a.writes for v in (*b.reads, *b.writes)]
    before = [(v, w) for v in a.reads for w in b.writes]
    return not any(overlap(lir, x, y) for x, y in (*after, *before))


def _phase(lir: Lir, x: KernelLaunch) -> object:
    return None if x.node is None else lir.phases.get(x.node)


def overlap(lir: Lir, a: Value, b: Value) -> bool:
    """Whether two values may share memory."""
    (x, here), (y, there) = lir.home(a), lir.home(b)
    if x is y:
        return True
    if here.kind != "arena" or there.kind != "arena":
        return False
    assert here.offset is not None and there.offset is not None
    first, second = sorted(
        (slot.offset, slot.offset + v.shape.upper_bytes(lir.live))
        for v, slot in ((x, here), (y, there))
        if slot.offset is not None
    )
    return first[1] > second[0]
