"""NVIDIA GPUs as devices: loop nests as PTX through the LLVM builder, the driver by ctypes."""

from __future__ import annotations

from rlx.backends.base import Backend
from rlx.backends.cuda.driver import count_devices

__all__ = ["count_devices", "make_backend", "make_code_backend"]


def make_backend(number: int = 0) -> Backend:
    from rlx.backends.cuda.backend import CudaBackend  # without a GPU it is not needed
    from rlx.backends.cuda.driver import Gpu

    return CudaBackend(Gpu(number))


def make_code_backend(target: str) -> Backend:
    """Code for the GPUs of a target, to be shown; none need be here."""
    from rlx.backends.cuda.backend import CodeBackend

    return CodeBackend(target)
