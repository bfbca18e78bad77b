"""From nodes to kernel launches: the CPU's table of lowerings, which kernel families fill.

A launch is a kernel and its args: pointers to values, sizes, scratch memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field

from rlx.backends.cpu.interruptible import LONG_BYTES, LONG_FLOPS
from rlx.backends.cpu.kernels.spec import KernelSpec
from rlx.backends.kernel_args import NodeArg, NodeNumber, Pointer, Scratch, Status
from rlx.backends.lowering import LoweringTable, OpLowering, PlanContext, nodes_to_lower
from rlx.errors import UnsupportedError
from rlx.ir.attrs import Data
from rlx.ir.dim import Dim, upper_bound
from rlx.ir.lir import Lir, contiguous_strides
from rlx.ir.node import Node, Value
from rlx.llvm.target import Target
from rlx.support.records import dataclass


@dataclass(frozen=True)
class ConstantPointer:
    """The address of constant data, plus `shift` bytes."""

    data: Data
    shift: Dim = 0


@dataclass(frozen=True)
class ArgAddress:
    """The address of an arg of a launch, for kernels that update the args of other launches."""

    launch: KernelLaunch = field(repr=False)
    index: int


KernelArg = NodeArg | ConstantPointer | ArgAddress


@dataclass
class KernelLaunch:
    """One call of a kernel by all workers, or by the first alone if `solo`.

    The kernel of a `jump` returns the distance to the next launch. A launch without a kernel is a
    host call: Python runs the reference of the node `host` on the args, which are the addresses of
    row-major operands and results. A `fence` is always followed by a barrier.
    """

    spec: KernelSpec | None
    args: Sequence[KernelArg]
    reads: Sequence[Value] = ()
    writes: Sequence[Value] = ()
    solo: bool = False
    node: Node | None = None
    uses_scratch: bool = False
    flops: Dim = 0
    bytes: Dim = 0
    label: str = field(default="")
    jump: bool = False
    fence: bool = False
    long: bool = False  # one launch may take longer than a user waits: see `interruptible`
    host: Node | None = None
    copies_first: bool = False  # its operand 0 as it is: nothing to do where the result is there


_SMALL = 48 << 10  # operations, and bytes


class Context(PlanContext):
    """What a lowering may know besides its node: the plan, the target, the number of workers."""

    def __init__(self, lir: Lir, target: Target, threads: int) -> None:
        super().__init__(lir)
        self.target, self.threads = target, threads


TABLE: LoweringTable[Context, KernelLaunch] = LoweringTable()
lowers = TABLE.lowers
reads_strided, scratch_of = TABLE.reads_strided, TABLE.scratch


_PAGE = 4096  # that a core's prefetcher does not leave


def scratch_per_worker(size: int) -> int:
    """Bytes from one worker's scratch memory to the next, of `size` bytes that each needs. Closer
    together, a core fetches ahead what its neighbour writes: 5 to 10 % of a GEMM of one k block."""
    return -(-size // _PAGE) * _PAGE


def lower_graph(ctx: Context) -> list[KernelLaunch]:
    """The launches of all nodes, in schedule order."""
    launches: list[KernelLaunch] = []
    for node in nodes_to_lower(ctx.lir):
        launches += lower_node(node, ctx)
    return launches


def lower_node(node: Node, ctx: Context) -> list[KernelLaunch]:
    """The launches of one node."""
    entry = TABLE.find(node)
    if entry is None:
        raise UnsupportedError(
            "no native kernel", where=node.op.name, got=repr(node), origin=node.origin,
            hint="legalize should have rewritten it by its decomposition",
        )  # fmt: skip
    launches = entry.lower(node, ctx)
    for launch in launches:
        launch.node = node
        launch.label = launch.label or (node.op.name if launch.spec is None else launch.spec.label)
        # launches of one node may rely on the same number of workers for each
        if launch.spec is None or launch.jump:
            continue
        work = _work(launch, node)
        launch.solo = launch.solo or (len(launches) == 1 and _is_small(work))
        flops, moved = (_most(size, ctx.lir.dynamic) for size in work)
        if flops > LONG_FLOPS or moved > LONG_BYTES:
            launch.long, (launch.flops, launch.bytes) = True, work
    return launches


def _work(launch: KernelLaunch, node: Node) -> tuple[Dim, Dim]:
    """Operations and bytes of a launch; those of the whole node where it does not say."""
    if launch.flops or launch.bytes:
        return launch.flops, launch.bytes
    cost = node.op.cost([v.shape for v in node.inputs], [v.shape for v in node.outputs])
    return cost.flops, cost.bytes


def _most(size: Dim, bounds: Mapping[str, int]) -> int:
    """An upper bound; 0 in a subgraph, which does not know the bounds."""
    if isinstance(size, int):
        return size
    return upper_bound(size, bounds) if size.symbols <= bounds.keys() else 0


def _is_small(work: tuple[Dim, Dim]) -> bool:
    """Whether the work takes less time than a barrier and the cache misses on data that another
    worker wrote. A sequence of such launches needs no barriers."""
    return all(isinstance(size, int) and size <= _SMALL for size in work)


@lowers("custom")
def lower_custom(node: Node, ctx: Context) -> list[KernelLaunch]:
    """A user's op is a host call: Python runs its reference in the middle of a native run."""
    args = [Pointer(v) for v in (*node.inputs, *node.outputs)]
    return [KernelLaunch(None, args, node.inputs, node.outputs, host=node)]


@lowers("eig")
def lower_host(node: Node, ctx: Context) -> list[KernelLaunch]:
    """Ops whose reference is LAPACK: a host call."""
    return lower_custom(node, ctx)


def runs_on_host(node: Node) -> bool:
    """Whether Python runs the reference of an op of ours."""
    entry = TABLE.find(node)
    return entry is not None and entry.lower is lower_host


__all__ = [
    "TABLE",
    "ArgAddress",
    "ConstantPointer",
    "Context",
    "KernelArg",
    "KernelLaunch",
    "NodeNumber",
    "OpLowering",
    "Pointer",
    "Scratch",
    "Status",
    "contiguous_strides",
    "lower_graph",
    "lower_node",
    "lowers",
    "reads_strided",
    "runs_on_host",
    "scratch_of",
]
