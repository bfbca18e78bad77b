"""From nodes to kernel launches: the table of lowerings, one per op.

A launch is a kernel, its args (pointers to values, sizes, scratch memory) and a number of threads.
A node without a launch of its own that has no decomposition either runs on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import field

from rlx.backends.cuda.append import Append, Appends
from rlx.backends.cuda.kernel import GpuKernel
from rlx.backends.kernel_args import NodeArg
from rlx.ir.dim import Dim, Expr, upper_bound
from rlx.ir.graph import Graph
from rlx.ir.lir import Lir, View
from rlx.ir.node import Node, Value
from rlx.ir.ops.composite import decomposed
from rlx.passes.views import find_views, is_plain, plain_view
from rlx.support.records import dataclass


@dataclass(frozen=True)
class Counters:
    """The address of `count` i64 that are 0 before a kernel and that it leaves at 0."""

    count: int


KernelArg = NodeArg | Counters


@dataclass
class KernelLaunch:
    """One launch of a kernel, or (without one) a call of the node's reference on the host."""

    kernel: GpuKernel | None
    args: Sequence[KernelArg] = ()
    threads: int = 1  # how many have work, at the upper bounds of dynamic sizes
    blocks: int = 0  # of a kernel of blocks, likewise
    reads: Sequence[Value] = field(default=(), repr=False)  # named where it may be merged with
    writes: Sequence[Value] = field(default=(), repr=False)  # its neighbours
    node: Node | None = field(default=None, repr=False)

    @property
    def label(self) -> str:
        if self.kernel is not None:
            return self.kernel.label
        return self.node.op.name if self.node is not None else ""


class Layouts:
    """How values lie in memory: those of a graph before it is planned, or of a plan."""

    def __init__(self, view: Callable[[Value], View | None]) -> None:
        self._view = view

    @staticmethod
    def of(graph: Graph) -> Layouts:
        views = find_views(graph.nodes)
        return Layouts(lambda value: views[value][1] if value in views else None)

    def strides(self, value: Value) -> tuple[Dim, ...]:
        return (self._view(value) or plain_view(value.shape)).strides

    def offset(self, value: Value) -> Dim:
        """Elements from the start of the memory that the value is a view of."""
        view = self._view(value)
        return 0 if view is None else view.offset

    def is_plain(self, value: Value) -> bool:
        """Whether the value lies row-major."""
        view = self._view(value)
        return view is None or is_plain(view, value.shape)


class Context(Layouts):
    """What a lowering may ask about its surroundings."""

    def __init__(self, lir: Lir, cpu: str) -> None:
        """`cpu` is the name of the GPU that kernels are made for."""
        super().__init__(lambda value: lir.slots[value].view)
        self.lir, self.cpu = lir, cpu
        self._appends = Appends(lir)
        self._users = lir.graph.users()
        self._positions = {node: i for i, node in enumerate(lir.graph.nodes)}
        self.norms: dict[Value, Node] = {}  # norms that the reader of their result computes
        self.absorbed: set[Node] = set()  # nodes whose work other launches do

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

    def upper(self, dim: Dim) -> int:
        """The most a dimension can be."""
        return upper_bound(dim, self.lir.live)


def is_multiple(dim: Dim, number: int) -> bool:
    """Whether a dimension is a multiple of a number, whatever its dynamic sizes are."""
    if isinstance(dim, Expr):
        return all(factor % number == 0 for _, factor in dim.terms)
    return dim % number == 0


Lowering = Callable[[Node, Context], list[KernelLaunch]]
Condition = Callable[[Node], bool]
ReadsStrided = Callable[[Node, Layouts], bool]


@dataclass(frozen=True)
class Entry:
    """How an op is lowered, when that applies, the scratch memory it wants, and whether the kernel
    (for this node) reads operands that are strided views."""

    lower: Lowering
    when: Condition | None = None
    scratch: Callable[[Node], int] | None = None
    strided: bool | ReadsStrided = True


TABLE: dict[str, Entry] = {}


def lowers(
    *names: str,
    when: Condition | None = None,
    scratch: Callable[[Node], int] | None = None,
    strided: bool | ReadsStrided = True,
) -> Callable[[Lowering], Lowering]:
    """Register a lowering for ops by name; `when` limits it to nodes it can do."""

    def register(function: Lowering) -> Lowering:
        for name in names:
            TABLE[name] = Entry(function, when, scratch, strided)
        return function

    return register


def entry_for(node: Node) -> Entry | None:
    """The lowering of a node; None where it has no kernel."""
    found = TABLE.get(node.op.name)
    return None if found is None or (found.when is not None and not found.when(node)) else found


def reads_strided(node: Node, layouts: Layouts) -> bool:
    """Whether the kernel reads the operands of the node as they lie; the host reads row-major
    ones."""
    entry = entry_for(node)
    if entry is None:
        return False
    return entry.strided(node, layouts) if callable(entry.strided) else entry.strided


def runs_on_host(node: Node) -> bool:
    """Whether a node has neither a kernel nor a decomposition, so that its reference runs."""
    if node.op.is_source or node.op.is_view or entry_for(node) is not None:
        return False
    if not node.op.has_decomposition():
        return True
    return decomposed(node.op, tuple([v.shape for v in node.inputs])) is None


def lower_graph(lir: Lir, cpu: str = "sm_90a") -> list[KernelLaunch]:
    """The launches of all nodes, in schedule order, for a GPU of this name."""
    ctx, launches = Context(lir, cpu), list[KernelLaunch]()
    for node in lir.graph.nodes:
        if node.op.is_source or (node.op.is_view and lir.slots[node.output].kind == "alias"):
            continue
        if node in ctx.absorbed:
            continue
        entry = entry_for(node)
        made = [KernelLaunch(None)] if entry is None else entry.lower(node, ctx)
        for launch in made:
            launch.node = launch.node or node
        launches += made
    return launches
