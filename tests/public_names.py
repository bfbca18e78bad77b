"""Makes rlx/__init__.pyi, which tells type checkers what `rlx` has: python tests/public_names.py"""

from __future__ import annotations

from pathlib import Path

import rlx

STUB = Path(rlx.__file__).with_suffix(".pyi")
HEAD = "# Made by tests/public_names.py from the table in __init__.py.\n# ruff: noqa: I001\n"
_WIDTH = 100


def stub() -> str:
    """A re-export for each name of the table."""
    version = "\n__version__: str\n" if hasattr(rlx, "__version__") else ""
    names = [_imports(module, names.split()) for module, names in rlx._HOMES.items()]
    rooms = _imports("rlx", list(rlx._ROOMS)) if hasattr(rlx, "_ROOMS") else ""
    return HEAD + "".join(names) + rooms + version


def _imports(module: str, names: list[str]) -> str:
    shown = [f"{name} as {name}" for name in sorted(names)]
    line = f"from {module} import {', '.join(shown)}\n"
    if len(line) <= _WIDTH + 1:
        return line
    return f"from {module} import (\n" + "".join(f"    {name},\n" for name in shown) + ")\n"


if __name__ == "__main__":
    STUB.write_text(stub(), encoding="utf-8")
