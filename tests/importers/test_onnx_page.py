"""The page of ONNX operators is the one that the table gives, and no operator is missing."""

from __future__ import annotations

from pathlib import Path

from onnx_ops_page import page, schemas

from rlx.onnx.table import find

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_is_up_to_date() -> None:
    text = (ROOT / "docs" / "onnx-ops.md").read_text(encoding="utf-8")
    assert text == page(), "run python tests/importers/onnx_ops_page.py > docs/onnx-ops.md"


def test_every_operator_of_the_default_domain_is_there() -> None:
    missing = [
        name for (domain, name), schema in schemas().items()
        if domain in ("", "ai.onnx.ml") and find(domain, name, 999) is None
        and not (schema.has_function or schema.has_context_dependent_function)
    ]  # fmt: skip
    assert missing == []
