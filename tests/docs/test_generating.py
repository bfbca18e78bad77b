"""docs/generating.md and docs/engine.md name all that may be asked for."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import get_type_hints

import pytest
from blocks import ROOT

import rlx
from rlx.cli.options import Loading
from rlx.formats.template_sandbox import _SECONDS, _STEPS, _VALUE
from rlx.models.config import DEFAULT_CONTEXT

PAGE = (ROOT / "docs" / "generating.md").read_text(encoding="utf-8")
ENGINE = (ROOT / "docs" / "engine.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", [f.name for f in fields(rlx.GenerationSettings)])
def test_settings(name: str) -> None:
    assert f"`{name}`" in PAGE


@pytest.mark.parametrize(
    ("call", "page"),
    [(rlx.load, PAGE), (rlx.Engine, ENGINE), (rlx.Engine.submit, ENGINE)],
    ids=["load", "Engine", "submit"],
)
def test_options(call: Callable[..., object], page: str) -> None:
    names = [
        p.name for p in inspect.signature(call).parameters.values() if p.kind is p.KEYWORD_ONLY
    ]
    assert [n for n in names if f"`{n}`" not in page] == []


def test_the_default_context() -> None:
    """Wherever a page or a help text says what it is, it is this one."""
    less = "or what the model was trained for if that is less"
    (row,) = [line for line in PAGE.splitlines() if line.startswith("| `context` |")]
    assert f"what the model was trained for, or {DEFAULT_CONTEXT} if that is less" in row
    assert f"or {DEFAULT_CONTEXT} if that is\n    less" in (rlx.load.__doc__ or "")
    cli = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    assert f"{DEFAULT_CONTEXT}, {less}" in cli
    (option,) = get_type_hints(Loading, include_extras=True)["context"].__metadata__
    assert option.show_default == f"{DEFAULT_CONTEXT}, {less}"


def test_the_bounds_of_templates() -> None:
    assert f"{_STEPS:,} steps, {_SECONDS:.0f} seconds" in PAGE and _VALUE == 4 << 20
