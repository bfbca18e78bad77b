"""Writes docs/models.md from the pages of the architectures: python tests/docs/models_page.py"""

from __future__ import annotations

import inspect
from pathlib import Path

from rlx.models.arch import architecture, encoder_architecture, supported
from rlx.models.config_gguf import GGUF_ENCODERS, GGUF_NAMES
from rlx.models.config_hf import HF_ENCODERS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "models.md"

HEAD = """# Models

## Language models

Each is one page in `rlx/models/arch/`, named as `model_type` in config.json: how a layer is put
together from shared blocks, and what Hugging Face calls its weights. GGUF's names are ours. Weights
may be floats or of any block type of GGUF; of experts, only those are read that a token is routed
to.

| architecture | in GGUF | |
|---|---|---|
"""

STATES = """
`qwen3_next`, `qwen3_5`, `qwen3_5_moe` and `mamba2` have a recurrent state, which cannot be rewound:
a prompt that continues all that was run before reuses it, any other is prefilled from its
beginning. They run one request at a time (`rlx.load`, not `rlx.Engine`), without speculative
decoding.
"""

ENCODERS = """
## Encoders

Each is one page in `rlx/models/arch/encoders/`. [Embedding](embedding.md) says what is read beside
the weights.

| architecture | `model_type` | in GGUF | |
|---|---|---|---|
"""

TAIL = """
As GGUF, RoBERTa and DistilBERT are called `bert`; where the column is empty, folders are read only.
Configurations of all-MiniLM, all-mpnet, all-distilroberta, paraphrase-multilingual, distiluse,
LaBSE, BGE, E5, GTE, Arctic Embed, Nomic Embed 1.5 and ModernBERT Embed, and of the rerankers MS
MARCO MiniLM and ELECTRA, BGE, GTE, mxbai and STS-B RoBERTa, were compared with
sentence-transformers on random weights, to 1e-5. What is not known (mixtures
of experts, ALiBi, T5, adapters by task) is refused by name.

## Adding one

For a language model, a file `rlx/models/arch/<model_type>.py` with four names:

- `HF_NAMES`: our names (those of GGUF) and those in safetensors, `{i}` for the layer; `{e}` for an
  expert, where files keep experts apart; a `Derived` where a weight is made of others.
- `embed(net, ids)`, `layer(net, x, i)` and `finish(net, x)`: the graph, in blocks of `net`
  (`rlx/models/decoder_builder.py`): `norm`, `qkv`, `attend`, `ffn` and others. What the
  file has decides what they do: biases, norms of q and k, packed weights, experts.
- `configure(config)`, for what follows from the architecture and no file says.

`olmo2.py` is a short example. Names that differ in GGUF are in `GGUF_NAMES` of
`rlx/models/config_gguf.py`. Then a tiny configuration in `tests/goldens/tiny.py`, its golden with
`tests/goldens/make.py`, and this page with `tests/docs/models_page.py`: prefill, chunks and
decoding are compared with transformers, and with a GGUF file by llama.cpp's names.

For an encoder, a file `rlx/models/arch/encoders/<name>.py` with `PREFIXES`, `BODY` and `HEAD`
(names in safetensors), the same three functions, and `read_config(settings)` for its config.json;
`electra.py` is a short example. Its tiny configuration is in `tests/goldens/tiny_encoders.py`;
`tests/goldens/make_encoders.py` makes its golden.
"""


def page() -> str:
    stored = {ours: theirs for theirs, ours in GGUF_NAMES.items()} | dict.fromkeys(
        ("mistral", "mixtral"), "llama"
    )
    rows = []
    for name in supported():
        said = (inspect.getdoc(architecture(name)) or "").partition("\n\n")[0].replace("\n", " ")
        rows.append(f"| `{name}` | `{stored.get(name, name)}` | {said} |\n")
    return HEAD + "".join(rows) + STATES + ENCODERS + "".join(_encoders()) + TAIL


def _encoders() -> list[str]:
    rows = []
    for name in dict.fromkeys(HF_ENCODERS.values()):
        said = inspect.getdoc(encoder_architecture(name)) or ""
        kinds = ", ".join(f"`{kind}`" for kind, page in HF_ENCODERS.items() if page == name)
        stored = ", ".join(f"`{kind}`" for kind, page in GGUF_ENCODERS.items() if page == name)
        rows.append(f"| `{name}` | {kinds} | {stored} | {said} |\n")
    return rows


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
