"""A folder's vocabulary as GGUF metadata: BPE, on bytes or on text."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

from rlx.errors import UnsupportedError
from rlx.formats.hf import HfFolder
from rlx.formats.json_file import read_object
from rlx.formats.tokenizer.gguf_vocabulary import BYTE, CONTROL, KEY, NORMAL, UNKNOWN, USER
from rlx.formats.tokenizer.pretokenizers import GPT2_WORDS, Split, gguf_name

_UNUSED = 5  # type of tokens that fill the table up
_LARGEST = 1 << 28  # bytes of tokenizer.json
_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")


def tokenizer_metadata(folder: HfFolder, rows: int) -> dict[str, Any]:
    """What GGUF says of the folder's vocabulary, filled up to `rows` tokens."""
    path = folder.path / "tokenizer.json"
    vocabulary = folder.tokenizer().vocabulary
    stored = read_object(path, _LARGEST)
    model = stored["model"]
    kind = vocabulary.decoder.kind
    if model.get("type") != "BPE" or kind not in ("byte_level", "metaspace"):
        got = f"{model.get('type')} with decoder {kind}"
        raise _unsupported(path, "a vocabulary", got, "byte-level or metaspace BPE")
    merges = [tuple(m.split(" ")) if isinstance(m, str) else tuple(m) for m in model["merges"]]
    tokens = _tokens(stored, rows)
    found: dict[str, Any] = {
        "tokens": tokens,
        "token_type": _types(stored, tokens, metaspace=kind == "metaspace"),
        "add_bos_token": vocabulary.bos is not None and vocabulary.bos in vocabulary.prefix,
        "add_eos_token": vocabulary.eos is not None and vocabulary.eos in vocabulary.suffix,
    }
    if kind == "byte_level":
        pre = gguf_name(_split(stored, model, path), str(path))
        found |= {"model": "gpt2", "pre": pre, "merges": [" ".join(m) for m in merges]}
    else:
        found |= {"model": "llama", "scores": _scores(tokens, merges)}
        found["add_space_prefix"] = vocabulary.decoder.strip_first
    ids = {"bos": vocabulary.bos, "eos": vocabulary.eos, "padding": vocabulary.pad}
    ids["unknown"] = vocabulary.unknown
    found |= {f"{name}_token_id": i for name, i in ids.items() if i is not None}
    metadata = {KEY + name: value for name, value in found.items()}
    for name, text in vocabulary.templates.items():
        suffix = "" if name == "default" else f".{name}"
        metadata[f"tokenizer.chat_template{suffix}"] = text
    return metadata


def _tokens(stored: dict[str, Any], rows: int) -> list[str]:
    by_id = {i: text for text, i in stored["model"]["vocab"].items()}
    by_id |= {t["id"]: t["content"] for t in stored.get("added_tokens", [])}
    count = max(rows, max(by_id, default=-1) + 1)
    return [by_id.get(i, f"[PAD{i}]") for i in range(count)]


def _types(stored: dict[str, Any], tokens: list[str], *, metaspace: bool) -> Any:
    types = np.full(len(tokens), NORMAL, np.int32)
    known = set(stored["model"]["vocab"].values())
    for i, text in enumerate(tokens):
        if i not in known:
            types[i] = _UNUSED
        elif metaspace and _BYTE_TOKEN.fullmatch(text):
            types[i] = BYTE
    for token in stored.get("added_tokens", []):
        types[token["id"]] = CONTROL if token.get("special") else USER
    unknown = stored["model"].get("unk_token")
    if unknown in stored["model"]["vocab"]:
        types[stored["model"]["vocab"][unknown]] = UNKNOWN
    return types


def _scores(tokens: list[str], merges: list[tuple[str, ...]]) -> Any:
    """The earlier a merge, the better the token it makes; what no merge makes comes last."""
    rank: dict[str, int] = {}
    for i, pair in enumerate(merges):
        rank.setdefault("".join(pair), i)
    return np.array([-float(rank.get(t, len(merges))) for t in tokens], np.float32)


def _split(stored: dict[str, Any], model: dict[str, Any], path: Path) -> Split:
    """The pre-tokenizer of the folder's tokenizer."""
    pre = stored.get("pre_tokenizer") or {}
    patterns: list[str] = []
    for part in pre.get("pretokenizers", [pre]):
        kind, pattern = part.get("type"), part.get("pattern", {})
        if kind == "Split" and "Regex" in pattern and part.get("behavior") == "Isolated":
            patterns.append(pattern["Regex"])
        elif kind == "Digits" and part.get("individual_digits"):
            patterns.append(r"\p{N}")
        elif kind == "ByteLevel" and not part.get("add_prefix_space"):
            patterns += [GPT2_WORDS] if part.get("use_regex", True) else []
        else:
            raise _unsupported(path, "a pre-tokenizer", part, "Split, Digits and ByteLevel")
    return Split(tuple(patterns), bool(model.get("ignore_merges")))


def _unsupported(path: Path, what: str, got: object, expected: str) -> UnsupportedError:
    return UnsupportedError(
        f"{what} that cannot be written as GGUF", where=str(path), got=str(got)[:80],
        expected=expected,
    )  # fmt: skip
