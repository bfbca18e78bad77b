"""The rules of the house: which room may import which, sizes of files, lint, format and types."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from public_names import STUB, stub

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "rlx"
FILES = sorted(PACKAGE.rglob("*.py"))
ARROW = [
    "ir",
    "passes",
    "specialize",
    "loops",
    "llvm",
    "backends",
    "runtime",
    "numpy",
    "random",
    "nn",
    "optim",
    "data",
    "pytorch",
    "onnx",
    "models",
    "ray",
    "serve",
    "viz",
    "cli",
]
MOST_LINES, MOST_LINES_OF_A_FUNCTION, MOST_OF_A_NAME = 500, 60, 3


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _imported(path: Path) -> Iterator[str]:
    """Dotted names that a file imports, late imports included."""
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def _rooms(path: Path) -> set[str]:
    """First-level rooms of rlx that a file imports from."""
    return {name.split(".")[1] for name in _imported(path) if name.startswith("rlx.")}


def test_the_import_arrow_points_one_way() -> None:
    wrong = []
    for path in FILES:
        room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        allowed = {room, "support", "errors"}
        if room in ARROW:
            allowed |= {*ARROW[: ARROW.index(room)], *(["formats"] if room != "ir" else [])}
        elif room == "formats":
            allowed |= {"ir"}
        elif room != "support":  # files of the package itself may name anything public
            continue
        wrong += [f"{path.relative_to(ROOT)} imports {name}" for name in _rooms(path) - allowed]
    assert not wrong, "\n".join(wrong)


def test_nothing_outside_a_backend_imports_from_inside_it() -> None:
    folders = [p.parent for p in sorted((PACKAGE / "backends").glob("*/__init__.py"))]
    assert PACKAGE / "backends" / "cpu" in folders
    wrong = []
    for folder in folders:
        inside = f"rlx.backends.{folder.name}"
        for path in FILES:
            if folder in path.parents:
                continue
            names = [n for n in _imported(path) if n == inside or n.startswith(inside + ".")]
            wrong += [f"{path.relative_to(ROOT)} imports {name}" for name in names]
    assert not wrong, "\n".join(wrong)


def test_llvmlite_is_named_in_llvm_only() -> None:
    users = {
        str(path.relative_to(PACKAGE))
        for path in FILES
        for name in _imported(path)
        if name.split(".")[0] == "llvmlite"
    }
    assert users, "the check must see the imports it is about"
    assert all(user.startswith("llvm/") for user in users), users


def test_files_and_functions_are_short_enough_to_read() -> None:
    long = []
    for path in FILES:
        lines = path.read_text(encoding="utf-8").count("\n")
        if lines > MOST_LINES:
            long.append(f"{path.relative_to(ROOT)}: {lines} lines")
        for node in ast.walk(_tree(path)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                first = node.body[0].lineno if _lists_options(node) else node.lineno
                size = (node.end_lineno or 0) - first + 1
                if size > MOST_LINES_OF_A_FUNCTION:
                    long.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name}: {size} lines")
    assert not long, "\n".join(long)


def _lists_options(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether the parameters are options of a command, with their help."""
    given = (*node.args.args, *node.args.kwonlyargs)
    return any(a.annotation and "Annotated" in ast.unparse(a.annotation) for a in given)


def test_a_file_name_says_which_file_it_is() -> None:
    counted = Counter(path.name for path in FILES if path.name != "__init__.py")
    many = {name: n for name, n in counted.items() if n > MOST_OF_A_NAME}
    assert not many, many


def test_importing_rlx_loads_no_compiler_and_no_extra() -> None:
    code = (
        "import sys, rlx; heavy = {'llvmlite','gguf','tokenizers','jinja2','safetensors','rich',"
        "'typer','starlette','uvicorn','ray','onnx','torch'} & set(sys.modules); "
        "sys.exit(', '.join(heavy) or 0)"
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
        for path in FILES
        if "dataclasses.dataclass" in _imported(path) and path.name != "records.py"
    }
    hint = "use `from rlx.support.records import dataclass`"
    assert not users, f"{hint} in {', '.join(sorted(users))}"


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
