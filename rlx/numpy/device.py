"""The device that array functions and `rlx.jit` run on.

Arrays are in the host's memory, whatever the device: `x.device` is "cpu". The device is where
kernels run. It is RLX_DEVICE, or within a block:

    with rlx.default_device("reference"):
        rnp.sum(x)  # by NumPy, the oracle
"""

from __future__ import annotations

from contextvars import ContextVar, Token
from types import TracebackType

from rlx.backends.registry import Device
from rlx.support.settings import setting

_chosen: ContextVar[str] = ContextVar("default_device")
_of_process: list[str] = []


def current_device() -> str:
    """The name of the device that runs now."""
    found = _chosen.get(None)
    if found is not None:
        return found
    if not _of_process:
        _of_process.append(Device.of(setting("RLX_DEVICE") or "cpu").name)
    return _of_process[0]


class default_device:
    """`with rlx.default_device(name):` array functions in the block, and functions that are jitted
    in it, run on that device."""

    def __init__(self, device: Device | str) -> None:
        self.device = Device.of(device)
        self._tokens: list[Token[str]] = []

    def __enter__(self) -> Device:
        self._tokens.append(_chosen.set(self.device.name))
        return self.device

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _chosen.reset(self._tokens.pop())

    def __repr__(self) -> str:
        return f"default_device({self.device.name!r})"
