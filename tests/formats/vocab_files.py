"""Small vocabularies as GGUF files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from rlx.formats.gguf import GgufFile, ValueType, write_gguf

NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
Token = tuple[str, int, float]  # text, type, score

BYTE_TOKENS: list[Token] = [(f"<0x{i:02X}>", BYTE, 0.0) for i in range(256)]


def vocab_file(folder: Path, model: str, tokens: list[Token], /, **more: Any) -> GgufFile:
    """A GGUF file that holds a vocabulary; `more` goes under `tokenizer.ggml.`, or as it is
    spelled where it has a dot."""
    metadata: dict[str, Any] = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": model,
        "tokenizer.ggml.tokens": [t for t, _, _ in tokens],
        "tokenizer.ggml.token_type": np.array([k for _, k, _ in tokens], np.int32),
        "tokenizer.ggml.scores": np.array([s for _, _, s in tokens], np.float32),
    }
    for key, value in more.items():
        name = key if "." in key else f"tokenizer.ggml.{key}"
        if value is None:
            metadata.pop(name, None)
        else:
            metadata[name] = value
    path = folder / "vocab.gguf"
    write_gguf(path, metadata, {}, types={"tokenizer.ggml.merges": ValueType.STRING})
    return GgufFile(path)


def byte_characters() -> list[str]:
    """GPT-2's character for each byte: printable ones stand for themselves, the others follow
    from U+0100 in order."""
    table, extra = [], 0
    for byte in range(256):
        printable = 33 <= byte <= 126 or 161 <= byte <= 172 or byte >= 174
        table.append(chr(byte) if printable else chr(256 + extra))
        extra += not printable
    return table


def bpe_tokens(merges: list[tuple[str, str]], special: list[Token] | None = None) -> list[Token]:
    """The 256 bytes, what the merges make of them, and special tokens."""
    tokens: list[Token] = [(c, NORMAL, 0.0) for c in byte_characters()]
    tokens += [(a + b, NORMAL, 0.0) for a, b in merges]
    return tokens + (special or [])


def merge_lines(merges: list[tuple[str, str]]) -> list[str]:
    return [f"{a} {b}" for a, b in merges]
