"""Every kind of error has its section, and errors know where it is."""

from __future__ import annotations

import re
import traceback

import pytest
from blocks import ROOT

import rlx.errors
from rlx.errors import OptionError, RlxError

KINDS = [k for k in vars(rlx.errors).values() if isinstance(k, type) and issubclass(k, RlxError)]
PAGE = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.__name__)
def test_page(kind: type[RlxError]) -> None:
    page, _, anchor = kind("wrong").page.partition("#")
    assert page == "docs/errors.md"
    assert anchor in {name.lower() for name in SECTIONS}  # as GitHub and mkdocs make them
    if kind is not RlxError:
        assert f"{kind.__name__}: " in SECTIONS[kind.__name__], "a section shows an example"


def test_sections_are_kinds() -> None:
    assert set(SECTIONS) == {k.__name__ for k in KINDS}


def test_other_folders_errors_lead_to_the_nearest_kind() -> None:
    class Odd(OptionError):
        pass

    assert Odd("wrong").page == "docs/errors.md#optionerror"


def test_a_traceback_names_the_page_and_the_message_does_not() -> None:
    error = OptionError("wrong")
    assert str(error) == "wrong"
    assert "see docs/errors.md#optionerror" in "".join(traceback.format_exception(error))
