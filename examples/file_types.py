"""What is in files, by their bytes: Magika, an ONNX model, on RLX.

    python examples/file_types.py [FILE …]

The model looks at the first and the last kilobyte of each file. All files are one batch.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

import rlx
from rlx.formats.fetch import fetch

ROOT = Path(__file__).resolve().parent.parent


def features(data: bytes, config: dict[str, int]) -> list[int]:
    """Bytes of the beginning and the end without blanks around them, filled up with a token."""
    block, begin, end = config["block_size"], config["beg_size"], config["end_size"]
    padding = config["padding_token"]
    first, last = data[:block].lstrip()[:begin], data[-block:].rstrip()[-end:]
    left = [*first, *[padding] * (begin - len(first))]
    return [*left, *[padding] * (end - len(last)), *last]


def main() -> None:
    names = sys.argv[1:] or [
        str(ROOT / name) for name in ("README.md", "pyproject.toml", "rlx/errors.py",
                                      "docs/architecture.svg", "docs/chat.png")
    ]  # fmt: skip
    path = fetch("magika")
    config = json.loads((path.parent / "config.json").read_text())
    model = rlx.load(path)
    assert isinstance(model, rlx.OnnxModel)
    rows = [features(Path(name).read_bytes(), config) for name in names]
    (scores,) = model.run(bytes=np.array(rows, np.int32))
    for name, row in zip(names, scores, strict=True):
        best = int(row.argmax())
        print(f"{Path(name).name}: {config['target_labels_space'][best]} ({row[best]:.0%})")


if __name__ == "__main__":
    main()
