"""Devices by name. Plugins use `register_backend`, or the entry point `rlx.backends`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from rlx.backends.base import Backend
from rlx.errors import OptionError
from rlx.support.records import dataclass
from rlx.support.suggestions import did_you_mean

if TYPE_CHECKING:
    from importlib.metadata import EntryPoints

# the module of a device is imported on its first use
_BUILT_IN = {"reference": "rlx.backends.reference", "cpu": "rlx.backends.cpu"}
_factories: dict[str, Callable[[], Backend]] = {}
_backends: dict[str, Backend] = {}


@dataclass(frozen=True)
class Device:
    """A device to run on: `Device("cpu")`, `Device("reference")`, … Its name is accepted wherever a
    device is."""

    name: str

    def __post_init__(self) -> None:
        known = self.name in _BUILT_IN or self.name in _factories
        if not known and self.name not in available_devices():
            names = available_devices()
            raise OptionError(
                "unknown device", got=repr(self.name), expected=", ".join(names),
                hint=did_you_mean(self.name, names),
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


def register_backend(name: str, factory: Callable[[], Backend]) -> None:
    """Make a device available under `name`."""
    if name in available_devices():
        raise OptionError("a device of that name exists", got=name)
    _factories[name] = factory


def available_devices() -> list[str]:
    return sorted({*_BUILT_IN, *_factories, *(e.name for e in _entry_points())})


def _entry_points() -> EntryPoints:
    # scans every installed package: slow, and most starts do without
    from importlib.metadata import entry_points

    return entry_points(group="rlx.backends")


def get_backend(name: str) -> Backend:
    if name not in _backends:
        _backends[name] = _find(name)()
    return _backends[name]


def _find(name: str) -> Callable[[], Backend]:
    if name in _factories:
        return _factories[name]
    if name in _BUILT_IN:
        found: Callable[[], Backend] = importlib.import_module(_BUILT_IN[name]).make_backend
        return found
    for entry in _entry_points():
        if entry.name == name:
            plugin: Callable[[], Backend] = entry.load()
            return plugin
    raise OptionError("unknown device", got=repr(name), expected=", ".join(available_devices()))
