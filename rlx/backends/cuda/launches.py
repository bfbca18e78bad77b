"""Launches of kernels: what a program consists of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field

from rlx.backends.cuda.kernel import GpuKernel
from rlx.backends.cuda.tensor_map import TensorMap
from rlx.backends.kernel_args import NodeArg
from rlx.ir.node import Node, Value
from rlx.support.records import dataclass


@dataclass(frozen=True)
class Counters:
    """The address of `count` i64 that are 0 before a kernel and that it leaves at 0."""

    count: int


@dataclass(frozen=True)
class Lasting:
    """The address of `count` bytes that are 0 at first and keep what the kernel writes there, whose
    `blocks` blocks must all run at once."""

    count: int
    blocks: int


KernelArg = NodeArg | Counters | Lasting | TensorMap


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
