"""Devices by name. Plugins use `register_backend`, or the entry point `rlx.backends`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from rlx.backends.base import Backend
from rlx.errors import OptionError, did_you_mean
from rlx.support.records import dataclass

if TYPE_CHECKING:
    from importlib.metadata import EntryPoints

# the module of a device is imported on its first use
_BUILT_IN = {
    "reference": "rlx.backends.reference",
    "cpu": "rlx.backends.cpu",
    "cuda": "rlx.backends.cuda",
}
_NUMBERED = ("cuda",)  # there may be several: "cuda:1" is the second; listed where there is one
_GPU_TARGET = "sm_"  # how the names of GPU targets begin
_factories: dict[str, Callable[[], Backend]] = {}
_backends: dict[str, Backend] = {}


@dataclass(frozen=True)
class Device:
    """A device to run on: `Device("cpu")`, `Device("cuda:1")`, … Its name is accepted wherever a
    device is."""

    name: str

    def __post_init__(self) -> None:
        known = _built_in(self.name) is not None or self.name in _factories
        if not known and self.name not in available_devices():
            names = available_devices()
            raise OptionError(
                "unknown device", got=repr(self.name), expected=", ".join(names),
                hint=_hint(self.name, names),
            )  # fmt: skip

    @staticmethod
    def of(value: Device | str) -> Device:
        if isinstance(value, Device):
            return value
        if not isinstance(value, str):
            raise OptionError("not a device", got=repr(value), expected="a Device or its name")
        return Device(value)

    @property
    def backend(self) -> Backend:
        return get_backend(self.name)

    def __str__(self) -> str:
        return self.name


def _hint(name: str, names: list[str]) -> str:
    """What a device that there is not may have meant."""
    if not name.lower().startswith(("gpu", "nvidia", "cuda")):
        return did_you_mean(name, names)
    if "cuda" in names:
        return 'an NVIDIA GPU is "cuda", the second of several "cuda:1"'
    return 'an NVIDIA GPU is "cuda", but no driver finds one here; "cpu" runs everything'


def register_backend(name: str, factory: Callable[[], Backend]) -> None:
    """Make a device available under `name`."""
    if name in _names():
        raise OptionError("a device of that name exists", got=name)
    _factories[name] = factory


def available_devices() -> list[str]:
    """Names of the devices that this machine has."""
    return sorted(name for name in _names() if name not in _NUMBERED or _count(name))


def _names() -> set[str]:
    return {*_BUILT_IN, *_factories, *(e.name for e in _entry_points())}


def _count(name: str) -> int:
    """How many devices of this name the machine has, according to the driver."""
    count: int = importlib.import_module(_BUILT_IN[name]).count_devices()
    return count


def _built_in(name: str) -> tuple[str, int] | None:
    """Module and number of a device of the package: `cuda:1` is number 1 of `cuda`."""
    if name in _BUILT_IN:
        return _BUILT_IN[name], 0
    family, _, number = name.partition(":")
    if family in _NUMBERED and number.isdecimal():
        return _BUILT_IN[family], int(number)
    return None


def _entry_points() -> EntryPoints:
    # scans every installed package: slow, and most starts do without
    from importlib.metadata import entry_points

    return entry_points(group="rlx.backends")


def get_backend(name: str) -> Backend:
    if name.partition(":")[0] in _NUMBERED:
        name = name.removesuffix(":0")
    if name not in _backends:
        _backends[name] = _find(name)()
    return _backends[name]


def _find(name: str) -> Callable[[], Backend]:
    if name in _factories:
        return _factories[name]
    built_in = _built_in(name)
    if built_in is not None:
        module, number = importlib.import_module(built_in[0]), built_in[1]
        make: Callable[..., Backend] = module.make_backend
        return lambda: make(number) if name.partition(":")[0] in _NUMBERED else make()
    for entry in _entry_points():
        if entry.name == name:
            plugin: Callable[[], Backend] = entry.load()
            return plugin
    raise OptionError("unknown device", got=repr(name), expected=", ".join(available_devices()))


def backend_for_target(device: Device, target: str) -> Backend:
    """A device making code for a target that `inspect` shows: a CPU by name, or a GPU's, such as
    `sm_90a`, which need not be here."""
    if target.startswith(_GPU_TARGET):
        made: Backend = importlib.import_module(_BUILT_IN["cuda"]).make_code_backend(target)
        return made
    return device.backend.for_target(target)
