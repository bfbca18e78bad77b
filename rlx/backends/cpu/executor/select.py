"""Which executor this process uses: one stored in an artifact, or one compiled for this machine."""

from __future__ import annotations

import sys

from rlx.llvm.jit import Kernel
from rlx.llvm.target import Target

_offered: dict[bool, Kernel] = {}


def uses_futex(target: Target) -> bool:
    """Whether workers sleep in futexes: on Linux, for code made for Linux."""
    return "linux" in target.triple and sys.platform == "linux"


def offer_executor(kernel: Kernel, futex: bool) -> None:
    """Use this executor, unless another is in use already; its code must run on this machine."""
    _offered.setdefault(futex, kernel)


def get_executor(futex: bool) -> Kernel:
    """The executor in use."""
    if futex not in _offered:
        _offered[futex] = make_executor(Target.host(), futex)
    return _offered[futex]


def make_executor(target: Target, futex: bool | None = None) -> Kernel:
    """The executor for a target, from the caches or compiled."""
    # importing the emitter takes longer than loading an artifact
    from rlx.backends.cpu.executor.emit import load_executor

    return load_executor(target, uses_futex(target) if futex is None else futex)
