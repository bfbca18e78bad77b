"""ONNX files that ship in packages, with drawn inputs; ONNX Runtime's results are goldens
(`tests/goldens/make_onnx.py`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

STEP = 53  # of the flat results, one element in so many is kept


def inputs() -> dict[str, dict[str, Any]]:
    """By "model/file" of the catalogue."""
    rng = np.random.default_rng(6)
    f = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    return {
        "silero-vad/silero_vad.onnx": {
            "input": 0.1 * f(3, 576), "state": 0.1 * f(2, 3, 128), "sr": np.array(16000),
        },
        "magika/model.onnx": {"bytes": rng.integers(0, 256, (3, 2048)).astype(np.int32)},
        "rapidocr/det.onnx": {"x": f(1, 3, 160, 224)},
        "rapidocr/cls.onnx": {"x": f(2, 3, 48, 192)},
        "rapidocr/rec.onnx": {"x": f(2, 3, 48, 160)},
    }  # fmt: skip


def place(name: str) -> Path:
    """The file, fetched if need be."""
    from rlx.formats.fetch import fetch

    model, _, file = name.partition("/")
    found = fetch(model)
    return (found if found.is_dir() else found.parent) / file
