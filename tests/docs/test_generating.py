"""docs/generating.md names all that may be asked for."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields

import pytest
from blocks import ROOT

import rlx

PAGE = (ROOT / "docs" / "generating.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", [f.name for f in fields(rlx.GenerationSettings)])
def test_settings(name: str) -> None:
    assert f"`{name}`" in PAGE


@pytest.mark.parametrize("call", [rlx.load, rlx.Engine], ids=lambda c: c.__name__)
def test_options(call: Callable[..., object]) -> None:
    names = [
        p.name for p in inspect.signature(call).parameters.values() if p.kind is p.KEYWORD_ONLY
    ]
    assert [n for n in names if f"`{n}`" not in PAGE] == []
