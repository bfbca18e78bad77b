"""The CPU device."""

from rlx.backends.cpu.backend import CpuBackend, make_backend

__all__ = ["CpuBackend", "make_backend"]
