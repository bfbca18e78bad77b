"""Writes docs/models.md from the pages of the architectures: python tests/docs/models_page.py"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

from rlx.formats.hf_quant import METHODS
from rlx.models.arch import architecture, encoder_architecture, supported
from rlx.models.builder import ACTIVATIONS
from rlx.models.config_fields import HARMLESS, ROPE_TYPES, Field
from rlx.models.config_gguf import GGUF_ENCODERS, GGUF_NAMES
from rlx.models.config_hf import HF_ENCODERS

_FEW = 4  # fields that a page may lack to be described as another with exceptions
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
beginning. They have no speculative decoding, and `rlx.Engine` caches no prefixes of theirs.
"""

ENCODERS = """
## Encoders

Each is one page in `rlx/models/arch/encoders/`. [Embedding](embedding.md) says what is read beside
the weights.

| architecture | `model_type` | in GGUF | |
|---|---|---|---|
"""

FIELDS = """
## What is read of config.json

Every field is applied, known to be harmless, or refused by name before anything is built; so are
values that are not supported. Each page declares what it reads, with the defaults of transformers
for that type. A field that no page declares is refused unless it is null, false or empty. The
same holds for tensors: one that the configuration does not ask for is refused, and so is one that
is missing or of another size. `tests/fuzz/config_fields.py` changes every field to other values
that transformers takes: the result is that of transformers, or a refusal.

- **Harmless** in every file: {harmless}.
- **Activations**: {activations}.
- **Rotary embedding** (`rope_parameters`, or `rope_scaling`): the types {ropes}. A dynamic base
  grows only beyond `max_position_embeddings`, where no context reaches. With longrope the length of
  the sequence decides, as in transformers: up to `original_max_position_embeddings` tokens it has
  the short factors, then the long ones throughout, so that a sequence that outgrows the former
  runs once more from its beginning. `rlx.Engine` takes a `context=` up to that length. Encoders
  take all types but longrope.
- **`quantization_config`**: the methods {methods}; every other is refused. Matrices of GPTQ (2, 3,
  4, 8 bits, any order of columns), AWQ (`gemm`), fp8 (one scale, one a row, or one a block) and
  compressed-tensors (packed integers, int8, fp8, NVFP4, MXFP4) are read as floats of the model's
  dtype, each when it is packed; `quant="Q4_K_M"` packs them again for speed. Activations are not
  rounded. `mxfp4` is for the experts of gpt-oss, which stay packed.
- **GGUF**: keys behind the name of the architecture are held against a list too
  (`rlx/models/config_gguf.py`), and every tensor against the names of the page.

Every language model reads {common}. Where a row has a value, others are refused.

| architecture | reads besides | only with | without effect |
|---|---|---|---|
"""

ENCODER_FIELDS = """
Every encoder reads {common}.

| architecture | reads besides | only with | without effect |
|---|---|---|---|
"""

TAIL_OF_ENCODERS = """
As GGUF, RoBERTa and DistilBERT are called `bert`; where the column is empty, folders are read only.
Configurations of all-MiniLM, all-mpnet, all-distilroberta, paraphrase-multilingual, distiluse,
LaBSE, BGE, E5, GTE, Arctic Embed, Nomic Embed 1.5 and ModernBERT Embed, and of the rerankers MS
MARCO MiniLM and ELECTRA, BGE, GTE, mxbai and STS-B RoBERTa, were compared with
sentence-transformers on random weights, to 1e-5. What is not known (mixtures
of experts, ALiBi, T5, adapters by task) is refused by name.
"""

TAIL = """
## Adding one

For a language model, a file `rlx/models/arch/<model_type>.py` with these names:

- `HF_NAMES`: our names (those of GGUF) and those in safetensors, `{i}` for the layer; `{e}` for an
  expert, where files keep experts apart; a `Derived` where a weight is made of others.
- `embed(net, ids)`, `layer(net, x, i)` and `finish(net, x)`: the graph, in blocks of `net`
  (`rlx/models/decoder_builder.py`): `norm`, `qkv`, `attend`, `ffn` and others. What the
  file has decides what they do: biases, norms of q and k, packed weights, experts.
- `FIELDS` (`rlx/models/config_fields.py`), what it reads of config.json: the defaults, the values
  it takes; `HARMLESS`, further fields without effect; `SWITCHES`, fields that say whether weights
  are there; `SHAPES`, sizes of weights that differ from those in `rlx/models/tensor_check.py`.
- `read_config(settings)`, the configuration that they give; `configure(config)`, for GGUF files,
  what follows from the architecture and no key says.

`olmo2.py` is a short example. Names that differ in GGUF are in `GGUF_NAMES` of
`rlx/models/config_gguf.py`. Then a tiny configuration in `tests/goldens/tiny.py`, its golden with
`tests/goldens/make.py`, and this page with `tests/docs/models_page.py`: prefill, chunks and
decoding are compared with transformers, and with a GGUF file by llama.cpp's names. Configurations
that differ in every field are in `tests/goldens/variants.py`, their golden is of
`tests/goldens/make_variants.py`.

For an encoder, a file `rlx/models/arch/encoders/<name>.py` with `PREFIXES`, `BODY` and `HEAD`
(names in safetensors), the same functions, and the same declarations for its config.json;
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
    parts = [HEAD, *rows, STATES, ENCODERS, *_encoders(), TAIL_OF_ENCODERS, *_fields(), TAIL]
    return "".join(parts)


def _fields() -> list[str]:
    """The tables of what every page declares."""
    language = {name: architecture(name) for name in supported()}
    encoders = {name: encoder_architecture(name) for name in dict.fromkeys(HF_ENCODERS.values())}
    given = {
        "harmless": _listed(HARMLESS),
        "activations": _listed(ACTIVATIONS),
        "ropes": _listed(ROPE_TYPES),
        "methods": _listed(METHODS),
    }
    first, rows = _table(language)
    second, more = _table(encoders)
    head = FIELDS.format(**given, common=first)
    return [head, *rows, ENCODER_FIELDS.format(common=second), *more]


def _table(pages: dict[str, ModuleType]) -> tuple[str, list[str]]:
    """The fields that all pages read, and a row for each page."""
    alike = [{(name, f.values) for name, f in page.FIELDS.items()} for page in pages.values()]
    common = {name for name, _ in set.intersection(*alike)}
    model = {f for f, _ in _free(pages.get("llama"), common)}
    rows = []
    for name, page in pages.items():
        fields = page.FIELDS
        free = {f for f, _ in _free(page, common)}
        only = [
            f"`{f}` = {' or '.join(f'`{json.dumps(v)}`' for v in field.values)}"
            for f, field in sorted(fields.items())
            if field.values and f not in common
        ]
        harmless = _listed(getattr(page, "HARMLESS", ()))
        said = _listed(free)
        if name != "llama" and model and len(model - free) <= _FEW:
            less = f" but {_listed(model - free)}" if model - free else ""
            more = f"; {_listed(free - model)}" if free - model else ""
            said = f"what `llama` reads{less}{more}"
        rows.append(f"| `{name}` | {said} | {', '.join(only)} | {harmless} |\n")
    every = next(iter(pages.values())).FIELDS
    said = ", ".join(
        f"`{f}`" + (f" (`{json.dumps(every[f].values[0])}`)" if every[f].values else "")
        for f in sorted(common)
    )
    return said, rows


def _free(page: ModuleType | None, common: set[str]) -> list[tuple[str, Field]]:
    """The fields of a page that take more than one value."""
    fields = {} if page is None else page.FIELDS
    return [(f, field) for f, field in fields.items() if f not in common and not field.values]


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))


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
