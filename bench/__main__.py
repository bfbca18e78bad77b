"""`python -m bench NAME [--quick] [--json FILE]`, `python -m bench all`, `python -m bench list`."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from pathlib import Path

import bench

_HELPERS = {"__main__", "common", "peers", "qwen3", "random_model", "results", "shallow_model"}


def names() -> list[str]:
    found = (m.name for m in pkgutil.iter_modules(bench.__path__))
    return sorted(n for n in found if n not in _HELPERS)


def main(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help", "list"):
        print(__doc__)
        print("benches:", ", ".join(names()))
        return 0
    name, rest = argv[0], argv[1:]
    if name == "all":
        from bench.results import run_all

        return run_all(names(), rest, Path(__file__).parent / "RESULTS.md")
    if name not in names():
        print(f"bench: no such bench: {name}; there are {', '.join(names())}", file=sys.stderr)
        return 2
    return int(importlib.import_module(f"bench.{name}").main(rest))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
