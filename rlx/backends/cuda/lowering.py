"""From nodes to kernel launches: the table of lowerings of GPUs.

A launch is a kernel, its args (pointers to values, sizes, scratch memory) and a number of threads.
A node without a launch of its own that has no decomposition either runs on the host.
"""

from __future__ import annotations

from collections.abc import Collection

from rlx.backends.cuda.append import Append, Appends
from rlx.backends.cuda.launches import Counters, KernelArg, KernelLaunch
from rlx.backends.lowering import Layouts, LoweringTable, PlanContext, nodes_to_lower
from rlx.ir.dim import Dim, Expr
from rlx.ir.lir import Lir
from rlx.ir.node import Node, Value
from rlx.ir.ops.composite import decomposed


class Context(PlanContext):
    """What a lowering may ask about its surroundings."""

    def __init__(self, lir: Lir, cpu: str, displaced: Collection[Value] = ()) -> None:
        """`cpu` is the name of the GPU that kernels are made for; `displaced` values may begin at
        any element."""
        super().__init__(lir)
        self.cpu, self._displaced = cpu, frozenset(displaced)
        self._appends = Appends(lir)
        self._users = lir.graph.users()
        self._positions = {node: i for i, node in enumerate(lir.graph.nodes)}
        self.norms: dict[Value, Node] = {}  # norms that the reader of their result computes
        self.absorbed: set[Node] = set()  # nodes whose work other launches do

    def offset(self, value: Value) -> Dim:
        """As that of all plans; that of a displaced value is no multiple of any number."""
        found = super().offset(value)
        return found + 1 if self.lir.home(value)[0] in self._displaced else found

    def users(self, value: Value) -> list[Node]:
        return self._users.get(value, [])

    def position(self, node: Node) -> int:
        """The place of a node in the schedule."""
        return self._positions[node]

    def append_of(self, node: Node) -> Append | None:
        """The state that the node's result is only appended to, through a cast and views."""
        return self._appends.of(node)

    def absorb(self, append: Append) -> None:
        """A launch of this lowering appends: the cast and the update need none."""
        self.absorbed.update(append.absorbed)


def is_multiple(dim: Dim, number: int) -> bool:
    """Whether a dimension is a multiple of a number, whatever its dynamic sizes are."""
    if isinstance(dim, Expr):
        return all(factor % number == 0 for _, factor in dim.terms)
    return dim % number == 0


TABLE: LoweringTable[Context, KernelLaunch] = LoweringTable(strided=True)
lowers = TABLE.lowers


def runs_on_host(node: Node) -> bool:
    """Whether a node has neither a kernel nor a decomposition, so that its reference runs."""
    if node.op.is_source or node.op.is_view or TABLE.find(node) is not None:
        return False
    if not node.op.has_decomposition():
        return True
    return decomposed(node.op, tuple([v.shape for v in node.inputs])) is None


def lower_graph(
    lir: Lir, cpu: str = "sm_90a", displaced: Collection[Value] = ()
) -> list[KernelLaunch]:
    """The launches of all nodes, in schedule order, for a GPU of this name."""
    ctx, launches = Context(lir, cpu, displaced), list[KernelLaunch]()
    for node in nodes_to_lower(lir):
        if node in ctx.absorbed:
            continue
        entry = TABLE.find(node)
        made = [KernelLaunch(None)] if entry is None else entry.lower(node, ctx)
        for launch in made:
            launch.node = launch.node or node
        launches += made
    return launches


__all__ = [
    "TABLE",
    "Context",
    "Counters",
    "KernelArg",
    "KernelLaunch",
    "Layouts",
    "is_multiple",
    "lower_graph",
    "lowers",
    "runs_on_host",
]
