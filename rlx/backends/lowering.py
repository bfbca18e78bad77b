"""What lowerings of all devices share: the table of lowerings, and the context they are given.

A device has one table, and its kernel families fill it by the names of ops:

    TABLE: LoweringTable[Context, KernelLaunch] = LoweringTable()
    lowers = TABLE.lowers

    @lowers("matmul", when=suits, scratch=scratch_bytes)
    def lower_matmul(node: Node, ctx: Context) -> list[KernelLaunch]: ...

Kernel args are in `kernel_args`; loop nests of regions and strided copies in `rlx.loops`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Generic, TypeVar

from rlx.ir.lir import Lir
from rlx.ir.node import Node
from rlx.ir.op import Op, on_register
from rlx.ir.ops.composite import decomposed
from rlx.loops.decompose import HasCode, is_decomposed
from rlx.passes.views import Layouts, PlanContext
from rlx.support.records import dataclass

C = TypeVar("C", bound=PlanContext)  # the context of a device
L = TypeVar("L")  # its kernel launches
Predicate = Callable[[Node], bool]
# of a node and what the device passes besides: its target, the layouts of values
ReadsStrided = Callable[..., bool | Collection[int]]
ScratchSize = Callable[..., int]


@dataclass(frozen=True)
class OpLowering(Generic[C, L]):
    """How an op is lowered: its launches, the nodes it applies to, the scratch memory it needs.

    `strided` says whether the kernel (for this node) reads strided views, or which of its operands
    may be ones. Where it does not, `insert_contiguous` copies them first.
    """

    lower: Callable[[Node, C], list[L]]
    when: Predicate | None = None
    scratch: ScratchSize | None = None
    strided: bool | ReadsStrided = False


class LoweringTable(dict[str, OpLowering[C, L]]):
    """The lowerings of a device by op name; `strided` is the default of its kernels."""

    def __init__(self, strided: bool = False) -> None:
        super().__init__()
        self._strided = strided

    def lowers(
        self,
        *names: str,
        when: Predicate | None = None,
        scratch: ScratchSize | None = None,
        strided: bool | ReadsStrided | None = None,
    ) -> Callable[[Callable[[Node, C], list[L]]], Callable[[Node, C], list[L]]]:
        """Register a lowering for ops; `when` limits it to nodes that the kernel supports."""

        reads = self._strided if strided is None else strided

        def register(function: Callable[[Node, C], list[L]]) -> Callable[[Node, C], list[L]]:
            for name in names:
                self[name] = OpLowering(function, when, scratch, reads)
            return function

        return register

    def lowers_regions(
        self,
        *names: str,
        has_code: HasCode,
        scratch: ScratchSize,
    ) -> Callable[[Callable[[Node, C], list[L]]], Callable[[Node, C], list[L]]]:
        """Register the lowering of loop nests: for these ops, and for all that regions compute by
        their decomposition, those there are and those to come."""

        def register(function: Callable[[Node, C], list[L]]) -> Callable[[Node, C], list[L]]:
            def decompose(cls: type[Op]) -> None:
                if cls.name in self or not cls.has_decomposition():
                    return
                if is_decomposed(cls, has_code):
                    when = None if cls.runs_as_region else _is_region
                    self[cls.name] = OpLowering(function, when, scratch, True)

            self.lowers(*names, scratch=scratch, strided=True)(function)
            on_register(decompose)
            return function

        return register

    def find(self, node: Node) -> OpLowering[C, L] | None:
        """The lowering of a node; None where it has no kernel."""
        found = self.get(node.op.name)
        return None if found is None or (found.when is not None and not found.when(node)) else found

    def reads_strided(self, node: Node, *more: object) -> bool | Collection[int]:
        """Whether the node's kernel reads operands that are strided views, or the numbers of those
        operands that it does."""
        entry = self.find(node)
        if entry is None:
            return False
        return entry.strided(node, *more) if callable(entry.strided) else entry.strided

    def scratch(self, node: Node, *more: object) -> int:
        """Bytes of scratch memory that a node's kernels need."""
        entry = self.find(node)
        return 0 if entry is None or entry.scratch is None else entry.scratch(node, *more)


def _is_region(node: Node) -> bool:
    """Whether the decomposition covers the node's attributes."""
    return decomposed(node.op, tuple([v.shape for v in node.inputs])) is not None


def nodes_to_lower(lir: Lir) -> Iterator[Node]:
    """The nodes of a plan that do work: no sources, and no views of other memory."""
    for node in lir.graph.nodes:
        if node.op.is_source or (node.op.is_view and lir.slots[node.output].kind == "alias"):
            continue
        yield node


__all__ = ["Layouts", "LoweringTable", "OpLowering", "PlanContext", "nodes_to_lower"]
