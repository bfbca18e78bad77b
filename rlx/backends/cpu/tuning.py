"""Measured values of tunables, by kernel spec and target, in the disk cache.

A tunable (`Module.tunable`) changes how fast a kernel is and never what it computes: a prefetch
distance, rows of a cache block. Its default is a rule; `autotune` measures and writes this table.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from rlx.llvm.target import Target
from rlx.support.files import (
    cache_directory,
    check_directory,
    make_trusted_directory,
    read_trusted,
    write_atomic,
)

_FORMAT = 1
Values = Mapping[str, int]


def tuned_values(spec: object, target: Target) -> Values:
    """Measured values for a spec; empty where nobody measured."""
    table = _table(target)
    return table.get(kernel_name(spec), {}) if table else {}


def tuning_key(target: Target) -> str:
    """Identity of all measured values of a target; empty where there are none."""
    table = _table(target)
    return hashlib.sha256(_encoded(target, table)).hexdigest()[:16] if table else ""


def kernel_name(spec: object) -> str:
    """The name of a spec in the table: its class, and a digest of its fields."""
    return f"{type(spec).__name__} {hashlib.sha256(repr(spec).encode()).hexdigest()[:32]}"


def store_tuned(found: Mapping[str, Values], target: Target) -> Path | None:
    """Add values to the table; a kernel with none gets its defaults. None where RLX_CACHE=0."""
    path = _path(target)
    if path is None:
        return None
    merged = {k: dict(v) for k, v in {**_table(target), **found}.items() if v}
    make_trusted_directory(path.parent)
    write_atomic(path, _encoded(target, merged))
    _read.cache_clear()
    return path


def forget_tuned(target: Target) -> None:
    """Delete the table."""
    path = _path(target)
    if path is not None:
        path.unlink(missing_ok=True)
    _read.cache_clear()


def _path(target: Target) -> Path | None:
    folder = cache_directory("tuning")
    name = hashlib.sha256(target.key.encode()).hexdigest()[:24]
    return None if folder is None else folder / f"{name}.json"


def _encoded(target: Target, table: Mapping[str, Values]) -> bytes:
    content = {"format": _FORMAT, "target": target.key, "kernels": table}
    return json.dumps(content, indent=1, sort_keys=True).encode()


def _table(target: Target) -> Mapping[str, Values]:
    path = _path(target)
    return {} if path is None else _read(path, target)


@cache
def _read(path: Path, target: Target) -> Mapping[str, Values]:
    """The table on disk, read once. One that cannot be used counts as empty."""
    if not path.exists():
        return {}
    try:
        check_directory(path.parent)
        return _checked(json.loads(read_trusted(path)), target)
    except (OSError, ValueError, TypeError, RecursionError) as error:
        text = f"[tuning] {path} is not used: {error}; `rlx tune` writes it again"
        warnings.warn(text, RuntimeWarning, stacklevel=2)
        return {}


def _checked(content: Any, target: Target) -> Mapping[str, Values]:
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise ValueError("it has another format")
    if content.get("target") != target.key:
        raise ValueError("it is for another CPU")
    kernels = content.get("kernels")
    if not isinstance(kernels, dict):
        raise ValueError("it has no kernels")
    for values in kernels.values():
        if not isinstance(values, dict) or not all(type(v) is int for v in values.values()):
            raise ValueError("a value is not a number")
    return kernels
