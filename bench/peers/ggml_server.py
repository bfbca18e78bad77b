"""llama.cpp's quantisers behind a pipe.

Commands: {"do": "quantize", "weights": file.npy, "type": number, "row_bytes": n, "threads": t,
"out": file.npy, "importance": file.npy of a value for each column, or left out}, answered with the
seconds it took.
"""

from __future__ import annotations

import ctypes
import json
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import llama_cpp
import numpy as np


def quantizer() -> ctypes._CFuncPtr:
    """The function of the library that the package has loaded."""
    found = re.search(r"\S*libggml-base\S*", Path("/proc/self/maps").read_text())
    if found is None:
        raise SystemExit("llama_cpp has no libggml-base")
    function = ctypes.CDLL(found[0]).ggml_quantize_chunk
    function.restype = ctypes.c_size_t
    p, n = ctypes.c_void_p, ctypes.c_int64
    function.argtypes = [ctypes.c_int, p, p, n, n, n, p]
    return function


def quantize(
    weights: str, type: int, row_bytes: int, threads: int, out: str, importance: str | None = None
) -> dict[str, object]:
    rows = np.ascontiguousarray(np.load(weights), np.float32)
    matrix = None if importance is None else np.ascontiguousarray(np.load(importance), np.float32)
    packed = np.zeros((len(rows), row_bytes), np.uint8)
    parts = [slice(p[0], p[-1] + 1) for p in np.array_split(np.arange(len(rows)), threads)]

    def work(part: slice) -> None:
        source, target = rows[part], packed[part]
        place = source.ctypes.data, target.ctypes.data
        by = None if matrix is None else matrix.ctypes.data
        QUANTIZE(type, *place, 0, len(source), rows.shape[1], by)

    with ThreadPoolExecutor(threads) as pool:
        start = time.perf_counter()
        list(pool.map(work, parts))
        seconds = time.perf_counter() - start
    np.save(out, packed)
    return {"seconds": seconds}


QUANTIZE = quantizer()
print(json.dumps({"version": llama_cpp.__version__}), flush=True)
for line in sys.stdin:
    command = json.loads(line)
    assert command.pop("do") == "quantize"
    print(json.dumps(quantize(**command)), flush=True)
