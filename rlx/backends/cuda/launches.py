"""Launches of kernels: what a program consists of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field

from rlx.backends.cuda.kernel import GpuKernel
from rlx.backends.cuda.tensor_map import TensorMap
from rlx.backends.kernel_args import NodeArg
from rlx.ir.attrs import Data
from rlx.ir.dim import Dim
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


@dataclass(frozen=True)
class HostFlag:
    """The address of an i64 that the host reads when it takes a jump."""


KernelArg = NodeArg | Counters | Lasting | TensorMap | ConstantPointer | ArgAddress | HostFlag


@dataclass(frozen=True)
class Repeat:
    """The host queues the next `inside` launches as often as the launch's arg says."""

    inside: int


@dataclass(frozen=True)
class Branch:
    """The host waits for the flag, and queues the next `then` launches, or the `otherwise` ones
    behind them."""

    then: int
    otherwise: int


@dataclass(frozen=True)
class While:
    """The host queues the next `test` launches and waits for the flag; while it holds, `inside`
    more, and the test again, up to `most` times (0: any number). The launch's arg is what the
    status word becomes if the flag holds after these, or 0."""

    test: int
    inside: int
    most: int


Jump = Repeat | Branch | While


@dataclass
class KernelLaunch:
    """One launch of a kernel, a jump that the host takes, or (with neither) a call of the node's
    reference on the host."""

    kernel: GpuKernel | None
    args: Sequence[KernelArg] = ()
    threads: int = 1  # how many have work, at the upper bounds of dynamic sizes
    blocks: int = 0  # of a kernel of blocks, likewise
    reads: Sequence[Value] = field(default=(), repr=False)  # named where it may be merged with
    writes: Sequence[Value] = field(default=(), repr=False)  # its neighbours
    node: Node | None = field(default=None, repr=False)
    jump: Jump | None = None
    waits: bool = False  # it may not start before the one in front has ended, which writes its args

    @property
    def on_host(self) -> bool:
        """Whether the host runs the node."""
        return self.kernel is None and self.jump is None

    @property
    def label(self) -> str:
        if self.kernel is not None:
            return self.kernel.label
        if self.jump is not None:
            return type(self.jump).__name__.lower()
        return self.node.op.name if self.node is not None else ""
