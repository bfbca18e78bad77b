"""The tokenizer of a GGUF file of SmolLM2 as a folder that other tools read: FILE FOLDER."""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main(file: str, folder: str) -> None:
    from transformers import AutoTokenizer

    path = Path(file)
    AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).save_pretrained(folder)
    written = Path(folder) / "tokenizer.json"
    found = json.loads(written.read_text(encoding="utf-8"))
    # the file says "smollm": each digit is a token; the conversion leaves that out
    digits = {"type": "Digits", "individual_digits": True}
    if found["pre_tokenizer"]["type"] == "ByteLevel":
        both = [digits, found["pre_tokenizer"]]
        found["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": both}
    written.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
