"""The list of supported language models is what there is."""

from __future__ import annotations

from models_page import PAGE, page

from rlx.models.architectures import supported


def test_docs_models_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run python tests/docs/models_page.py"


def test_readme_names_every_architecture() -> None:
    text = (PAGE.parents[1] / "README.md").read_text(encoding="utf-8")
    missing = [name for name in supported() if name not in text]
    assert not missing
