"""The rules of the house: which folder may import which, lint, format and types."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
from public_names import STUB, stub

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "rlx"
ARROW = [
    "ir",
    "passes",
    "specialize",
    "loops",
    "llvm",
    "backends",
    "runtime",
    "models",
    "viz",
    "cli",
]


# folders that know a device through the backend protocol alone
OUTSIDE = ("cli", "runtime", "viz")
INSIDE = ("rlx.codegen", "rlx.backends.cpu")


def _modules(path: Path) -> set[str]:
    """Every name of rlx that a file imports, late imports included."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names = [f"{node.module}.{a.name}" for a in node.names]
        elif isinstance(node, ast.Import):
            names = [a.name for a in node.names]
        else:
            continue
        found |= {n for n in names if n.startswith("rlx.")}
    return found


def _imports(path: Path) -> set[str]:
    """First-level rlx folders that a file imports."""
    return {name.split(".")[1] for name in _modules(path)}


def test_the_import_arrow_points_one_way() -> None:
    wrong = []
    for path in PACKAGE.rglob("*.py"):
        folder = path.relative_to(PACKAGE).parts[0]
        allowed = {folder, "support", "errors"}
        if folder in ARROW:
            allowed |= set(ARROW[: ARROW.index(folder)]) | (
                {"formats"} if folder != "ir" else set()
            )
        elif folder == "formats":
            allowed |= {"ir"}
        elif folder != "support":  # files of the package itself may name anything public
            continue
        wrong += [f"{path.relative_to(ROOT)} imports {n}" for n in _imports(path) - allowed]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("folder", OUTSIDE)
def test_nothing_reaches_into_a_device(folder: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in (PACKAGE / folder).rglob("*.py")
        for name in _modules(path)
        if name.startswith(INSIDE)
    ]
    assert not wrong, "\n".join(wrong)


def test_llvmlite_is_named_in_llvm_only() -> None:
    users = {
        str(p.relative_to(PACKAGE))
        for p in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(p.read_text(encoding="utf-8")))
        if (isinstance(node, ast.ImportFrom) and (node.module or "").startswith("llvmlite"))
        or (isinstance(node, ast.Import) and any(a.name.startswith("llvmlite") for a in node.names))
    }
    assert users, "the check must see the imports it is about"
    assert all(u.startswith("llvm/") for u in users), users


def test_importing_rlx_loads_no_compiler_and_no_extra() -> None:
    code = (
        "import sys, rlx; heavy = {'llvmlite','gguf','tokenizers','jinja2','safetensors','rich',"
        "'typer','starlette','onnx','torch'} & set(sys.modules); sys.exit(', '.join(heavy) or 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_stub_is_up_to_date() -> None:
    assert STUB.read_text(encoding="utf-8") == stub(), "run python tests/public_names.py"


def test_dataclasses_are_those_that_import_quickly() -> None:
    users = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and node.module == "dataclasses"
        if any(a.name == "dataclass" for a in node.names)
    }
    assert not users, (
        f"use `from rlx.support.records import dataclass` in {', '.join(sorted(users))}"
    )


@pytest.mark.parametrize(
    "command",
    [
        ["ruff", "check", "."],
        ["ruff", "format", "--check", "."],
        pytest.param(["mypy", "rlx"], marks=pytest.mark.slow),
    ],
    ids=["lint", "format", "types"],
)
def test_tools_are_content(command: list[str]) -> None:
    environment = os.environ | {"MYPY_CACHE_DIR": str(ROOT / ".mypy_cache")}
    done = subprocess.run(
        [sys.executable, "-m", *command],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
