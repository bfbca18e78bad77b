"""Writes docs/models.md from the pages of the architectures: python tests/docs/models_page.py"""

from __future__ import annotations

import inspect
from pathlib import Path

from rlx.models.architectures import architecture, supported
from rlx.models.config import GGUF_NAMES

PAGE = Path(__file__).resolve().parents[2] / "docs" / "models.md"

HEAD = """# Language models

Each is one page in `rlx/models/`, named as `model_type` in config.json: how a layer is put together
from shared blocks, and what Hugging Face calls its weights. GGUF's names are ours. Weights may be
plain or of any block type of GGUF; of experts, only those are read that a token is sent to.

| architecture | in GGUF | |
|---|---|---|
"""


def page() -> str:
    stored = {ours: theirs for theirs, ours in GGUF_NAMES.items()} | dict.fromkeys(
        ("mistral", "mixtral"), "llama"
    )
    rows = []
    for name in supported():
        said = (inspect.getdoc(architecture(name)) or "").partition("\n\n")[0].replace("\n", " ")
        rows.append(f"| `{name}` | `{stored.get(name, name)}` | {said} |\n")
    return HEAD + "".join(rows)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
