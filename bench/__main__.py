"""`python -m bench NAME [--quick] [--json FILE]`, `python -m bench all`, `python -m bench list`.

RLX_TARGET=x86-64-v3 in front measures AVX2 code, against peers held to AVX2 where they can be.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from pathlib import Path

import bench
from bench.instruction_set import hold_peers

_ALIASES = {"qmatmul": "qgemm", "import": "import_models"}
_NO_BARS = {"gpu_decode", "gpu_packed", "mca"}  # figures without a peer: not part of `all`
_HELPERS = {
    "__main__", "common", "gpu_batches", "gpu_f32", "instruction_set", "lora_model", "peers",
    "qwen3", "random_model", "results", "shallow_model", "start_models", "vocabularies",
}  # fmt: skip


def names() -> list[str]:
    found = (m.name for m in pkgutil.iter_modules(bench.__path__))
    return sorted(n for n in found if n not in _HELPERS)


def main(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help", "list"):
        print(__doc__)
        print("benches:", ", ".join(names()))
        return 0
    name, rest = _ALIASES.get(argv[0], argv[0]), argv[1:]
    if name == "all":
        from bench.results import run_all

        return run_all(
            [n for n in names() if n not in _NO_BARS], rest, Path(__file__).parent / "RESULTS.md"
        )
    if name not in names():
        print(f"bench: no such bench: {name}; there are {', '.join(names())}", file=sys.stderr)
        return 2
    hold_peers()  # before NumPy is imported
    return int(importlib.import_module(f"bench.{name}").main(rest))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
