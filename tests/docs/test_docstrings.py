"""Docstrings name what exists: every `method()`, `Class.method` and imported name in them."""

from __future__ import annotations

import ast
import builtins
import inspect
import re
from functools import cache

import numpy as np
import pytest
from blocks import ROOT

import rlx

CALL = re.compile(r"`(?:\w+\.)*(\w+)\([^`]*\)`")
MEMBER = re.compile(r"\b(?:rlx\.)?([A-Z]\w+)\.([a-z_]\w*)\b")

Defined = dict[str, set[str]]


@cache
def trees() -> list[tuple[str, ast.Module]]:
    paths = sorted((ROOT / "rlx").rglob("*.py"))
    return [(str(p.relative_to(ROOT)), ast.parse(p.read_text(encoding="utf-8"))) for p in paths]


def names_in(node: ast.AST) -> set[str]:
    """Names that a class or module gives a meaning to: functions, fields, assigned attributes."""
    found: set[str] = set()
    for inner in ast.walk(node):
        if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(inner.name)
        elif isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
            found.add(inner.id)
        elif isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store):
            found.add(inner.attr)
        elif isinstance(inner, ast.arg):
            found.add(inner.arg)
    return found


def defined() -> tuple[Defined, set[str]]:
    """The members of each class with those of its bases, and every name in the package."""
    members: Defined = {}
    bases: dict[str, set[str]] = {}
    everything: set[str] = set()
    for _, tree in trees():
        everything |= names_in(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                members.setdefault(node.name, set()).update(names_in(node))
                own = {b.attr if isinstance(b, ast.Attribute) else getattr(b, "id", "")
                       for b in node.bases}  # fmt: skip
                bases.setdefault(node.name, set()).update(own)
    for name in members:
        todo, seen = bases[name], {name}
        while todo - seen:
            base = (todo - seen).pop()
            seen.add(base)
            members[name] |= members.get(base, set())
            todo = todo | bases.get(base, set())
    return members, everything


MEMBERS, EVERYTHING = defined()


def wrong(text: str) -> list[str]:
    """Names in a docstring that nothing has."""
    found = [
        name for name in CALL.findall(text)
        if not (name in EVERYTHING or hasattr(builtins, name) or hasattr(np, name)
                or hasattr(rlx.Graph, name))
    ]  # fmt: skip
    for kind, name in MEMBER.findall(text):
        real = getattr(rlx, kind, None)
        known = name in MEMBERS.get(kind, {name}) or (real is not None and hasattr(real, name))
        found += [] if known else [f"{kind}.{name}"]
    return found


def test_the_check_of_this_test_can_fail() -> None:
    assert wrong("`no_such_thing()`, `x.no_such_thing(1)` and `close()`") == ["no_such_thing"] * 2
    assert wrong("GraphModule.no_such_thing, GraphModule.define") == ["GraphModule.no_such_thing"]


@pytest.mark.parametrize("room", sorted({name.split("/")[1] for name, _ in trees()}))
def test_docstrings_name_what_exists(room: str) -> None:
    seen = []
    for path, tree in trees():
        if path.split("/")[1] != room:
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = inspect.cleandoc(ast.get_docstring(node) or "")
                seen += [f"{path}: {name}" for name in wrong(text)]
    assert not seen
