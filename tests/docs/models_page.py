"""Writes docs/models.md from the pages of the architectures: python tests/docs/models_page.py"""

from __future__ import annotations

import inspect
from pathlib import Path

from rlx.models.architectures import architecture, supported
from rlx.models.config_gguf import GGUF_NAMES

PAGE = Path(__file__).resolve().parents[2] / "docs" / "models.md"

HEAD = """# Language models

Each is one page in `rlx/models/`, named as `model_type` in config.json: how a layer is put together
from shared blocks, and what Hugging Face calls its weights. GGUF's names are ours. Weights may be
plain or of any block type of GGUF; of experts, only those are read that a token is sent to.

| architecture | in GGUF | |
|---|---|---|
"""

TAIL = """
`qwen3_next`, `qwen3_5`, `qwen3_5_moe` and `mamba2` carry a state from token to token, which cannot
be taken back to an earlier one: a prompt that goes on from all that was run before is continued,
any other is read from its beginning. They run one request at a time (`rlx.load`, not `rlx.Engine`),
without guesses.

## Adding one

A file `rlx/models/<model_type>.py` with four names, found by its own name:

- `HF_NAMES`: our names (those of GGUF) and those in safetensors, `{i}` for the layer; `{e}` for an
  expert, where files keep experts apart; a `Made` where a weight must be put together from others.
- `embed(net, ids)`, `layer(net, x, i)` and `finish(net, x)`: the graph, in blocks of `net`
  (`rlx/models/blocks.py`): `norm`, `qkv`, `attend`, `ffn` and others. What the file has decides
  what they do: biases, norms of q and k, packed weights, experts.
- `configure(config)`, where there is more to say than the file does.

`olmo2.py` is a short example. What GGUF calls otherwise is in `GGUF_NAMES` of
`rlx/models/config_gguf.py`. Then a tiny configuration in `tests/goldens/tiny.py`, its golden with
`tests/goldens/make.py`, and this page with `tests/docs/models_page.py`: prefill, chunks and
decoding are compared with transformers, and with a GGUF file by llama.cpp's names.
"""


def page() -> str:
    stored = {ours: theirs for theirs, ours in GGUF_NAMES.items()} | dict.fromkeys(
        ("mistral", "mixtral"), "llama"
    )
    rows = []
    for name in supported():
        said = (inspect.getdoc(architecture(name)) or "").partition("\n\n")[0].replace("\n", " ")
        rows.append(f"| `{name}` | `{stored.get(name, name)}` | {said} |\n")
    return HEAD + "".join(rows) + TAIL


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
