"""Every environment variable RLX reads, in one table, and the debug levels.

RLX_DEBUG=1..7 writes to standard error; each level includes those below it:
1 devices and caches, 2 kernels with time and GB/s, 3 MIR, 4 LIR, 5 LLVM IR, 6 rules fired,
7 assembly.
"""

from __future__ import annotations

import os
import sys
import warnings
from typing import NamedTuple

from rlx.errors import OptionError, did_you_mean


class Setting(NamedTuple):
    name: str
    default: str
    meaning: str


SETTINGS = (
    Setting("RLX_DEBUG", "0", "how much to print, 0 to 7"),
    Setting("RLX_TARGET", "", "compile for and run as a lesser CPU, such as x86-64-v3 or znver3"),
    Setting("RLX_NUM_THREADS", "", "worker threads; empty: every physical core"),
    Setting("RLX_CACHE", "1", "0 turns the disk cache off"),
    Setting("RLX_CACHE_DIR", "", "where the disk cache is; empty: the user's cache directory"),
    Setting(
        "RLX_CACHE_LIMIT",
        "4096",
        "most MiB of artifacts there; the least recently used are evicted first",
    ),
    Setting(
        "RLX_CACHE_WEIGHTS", "2048", "most MiB of prepacked weights of one model there; 0: none"
    ),
    Setting("RLX_KERNEL_DISPATCH", "", "common or native: the default kernel policy"),
    Setting("RLX_DEVICE", "cpu", "the device of array functions and `rlx.jit`: cpu, reference, …"),
    Setting(
        "RLX_PERSISTENT",
        "auto",
        "decode as one kernel on GPUs: 0 never, auto where it is faster, 1 wherever it can be",
    ),
    Setting("RLX_API_KEYS", "", "keys that `rlx serve` accepts, separated by commas"),
    Setting("RLX_CHECK_NAN", "0", "1 checks every result and names the first bad node"),
)
_DEFAULTS = {s.name: s.default for s in SETTINGS}


_warned = False


def warn_of_unknown() -> None:
    """Warn, once in a process, of variables RLX_… that RLX does not read: misspelt ones."""
    global _warned
    if _warned:
        return
    _warned = True
    for name in sorted(os.environ):
        if name.startswith("RLX_") and name not in _DEFAULTS:
            near = did_you_mean(name[4:], [known[4:] for known in _DEFAULTS])
            hint = near.replace("mean ", "mean RLX_") or "docs/settings.md lists those there are"
            warnings.warn(f"{name} is no setting of RLX; {hint}", RuntimeWarning, stacklevel=3)


def setting(name: str) -> str:
    """The value of a setting of the table."""
    if not _warned:
        warn_of_unknown()
    return os.environ.get(name, _DEFAULTS[name]).strip()


def mebibytes(name: str, least: int = 1) -> int:
    """A setting that is a size in MiB, as bytes."""
    text = setting(name)
    if not text.isdigit() or int(text) < least:
        raise OptionError("not a size", where=name, got=repr(text), expected="MiB")
    return int(text) << 20


def debug_level() -> int:
    text = setting("RLX_DEBUG") or "0"
    if not text.isdigit() or int(text) > 7:
        raise OptionError("not a debug level", where="RLX_DEBUG", got=text, expected="0 … 7")
    return int(text)


class NanChecks:
    """Whether the program asked for checks of every result, besides RLX_CHECK_NAN."""

    wanted = False


NAN_CHECKS = NanChecks()


def check_nan() -> bool:
    return NAN_CHECKS.wanted or setting("RLX_CHECK_NAN") not in ("", "0")


def debug(level: int, *lines: object) -> None:
    """Print to standard error when RLX_DEBUG is `level` or above."""
    if debug_level() >= level:
        for line in lines:
            print(f"rlx{level}: {line}", file=sys.stderr)
