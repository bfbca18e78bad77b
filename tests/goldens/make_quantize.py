"""Makes the goldens of tests/ir/test_quant_search.py with llama.cpp.

    python tests/goldens/make_quantize.py FOLDER/libggml-base.so

Writes quantize.json: the root mean square error of its quantisers for each type and tensor, and
the weighted one that they leave with an importance matrix.
"""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path

import gguf
import gguf.quants
import numpy as np
from quant_tensors import TYPES, WEIGHTED, importance, tensors

HERE = Path(__file__).resolve().parent


def error(
    quantize: ctypes._CFuncPtr, name: str, weights: np.ndarray, by: np.ndarray | None = None
) -> float:
    kind = gguf.GGMLQuantizationType[name]
    n, k = weights.shape
    block, size = gguf.GGML_QUANT_SIZES[kind]
    packed = np.zeros((n, k // block * size), np.uint8)
    start, rows, columns = (ctypes.c_int64(v) for v in (0, n, k))
    source, target = (ctypes.c_void_p(a.ctypes.data) for a in (weights, packed))
    matrix = None if by is None else ctypes.c_void_p(by.ctypes.data)
    quantize(ctypes.c_int(kind), source, target, start, rows, columns, matrix)
    decoded = gguf.quants.dequantize(packed, kind).astype(np.float64)
    return float(np.sqrt(np.mean((decoded - weights) ** 2 * (1 if by is None else by))))


def main(library: str) -> None:
    quantize = ctypes.CDLL(library).ggml_quantize_chunk
    quantize.restype = ctypes.c_size_t
    found = {
        "plain": {t: {n: error(quantize, t, w) for n, w in tensors().items()} for t in TYPES},
        "weighted": {
            t: {n: error(quantize, t, w, importance()) for n, w in tensors().items()}
            for t in WEIGHTED
        },
    }
    (HERE / "quantize.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
