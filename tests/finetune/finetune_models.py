"""Small models and examples to fine-tune: a llama whose tokens are characters, as a folder and as
the GGUF file that llama.cpp's converter makes of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent.parent
for _place in ("cli", "goldens", "models"):
    sys.path.insert(0, str(TESTS / _place))

from cli_support import TEMPLATE  # noqa: E402
from tiny import VOCAB, write_folder  # noqa: E402

from rlx.formats.gguf import write_gguf  # noqa: E402
from rlx.models.model_file import ModelFile  # noqa: E402
from rlx.models.to_gguf import gguf_of  # noqa: E402

END = "<|im_end|>"
QUESTIONS = ("red", "blue", "green", "pink", "grey", "black", "white", "brown")


def write_llama(folder: Path, name: str = "llama") -> Path:
    """A folder with a tokenizer of ASCII characters and a chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    write_folder(name, folder)
    letters = ["Ċ", "Ġ", *map(chr, range(33, 127))]
    vocab = {letter: i for i, letter in enumerate(letters)}
    vocab |= {f"unused{i}" if i > len(letters) else "ab": i for i in range(len(letters), VOCAB - 2)}
    special = {"<|im_start|>": VOCAB - 2, END: VOCAB - 1}
    added = [
        {"id": i, "content": t, "special": True, "single_word": False, "lstrip": False,
         "rstrip": False, "normalized": False}
        for t, i in special.items()
    ]  # fmt: skip
    bytewise = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True,
                "trim_offsets": True}  # fmt: skip
    described = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added,
        "normalizer": None, "pre_tokenizer": bytewise, "post_processor": None, "decoder": bytewise,
        "model": {"type": "BPE", "vocab": vocab | special, "merges": ["a b"]},
    }  # fmt: skip
    settings = {"chat_template": TEMPLATE, "eos_token": END, "bos_token": "<|im_start|>"}
    (folder / "tokenizer.json").write_text(json.dumps(described), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


def write_copy(folder: Path, path: Path) -> Path:
    """The folder's model as GGUF, its rows of q and k in llama.cpp's order."""
    metadata, sources = gguf_of(ModelFile.open(folder))
    write_gguf(path, metadata, {name: source.array() for name, source in sources.items()})
    return path


def chats(count: int = 8, answer: str = "yes {}") -> list[dict[str, Any]]:
    """Conversations of one question and its answer."""
    names = [QUESTIONS[i % len(QUESTIONS)] + "!" * (i // len(QUESTIONS)) for i in range(count)]
    return [
        {
            "messages": [
                {"role": "user", "content": name},
                {"role": "assistant", "content": answer.format(name)},
            ]
        }
        for name in names
    ]


def write_lines(path: Path, entries: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(e) + "\n" for e in entries), encoding="utf-8")
    return path
