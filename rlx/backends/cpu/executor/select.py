"""Which native driver runs here: one that came with an artifact, or one made for this machine."""

from __future__ import annotations

import sys

from rlx.llvm.jit import Kernel
from rlx.llvm.target import Target

_offered: dict[bool, Kernel] = {}


def uses_futex(target: Target) -> bool:
    """Whether workers sleep in the system's futexes, as the pool chooses by the system it is on."""
    return "linux" in target.triple and sys.platform == "linux"


def offer_driver(kernel: Kernel, futex: bool) -> None:
    """Use this driver, unless another is in use already; its code must run on this machine."""
    _offered.setdefault(futex, kernel)


def get_driver(futex: bool) -> Kernel:
    """The driver in use."""
    if futex not in _offered:
        _offered[futex] = make_driver(Target.host(), futex)
    return _offered[futex]


def make_driver(target: Target, futex: bool | None = None) -> Kernel:
    """The driver for a target, from the caches or compiled."""
    # what emits code takes longer to import than an artifact to load
    from rlx.backends.cpu.executor.emit import load_driver

    return load_driver(target, uses_futex(target) if futex is None else futex)
