"""The list of supported language models is what there is."""

from __future__ import annotations

from models_page import PAGE, page


def test_docs_models_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run python tests/docs/models_page.py"
