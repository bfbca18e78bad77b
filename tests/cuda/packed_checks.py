"""Checks of products with packed weights, at sizes that choose each of their kernels."""

from __future__ import annotations

from functools import partial

import numpy as np
from checks_on_gpu import CHECKS, compiled, graph_of, random

from rlx.ir.graph import Graph
from rlx.ir.node import Value
from rlx.ir.quant.scheme import GGUF_SCHEMES, decode, encode

TYPES = ("Q8_0", "Q4_0", "Q4_K", "Q5_K", "Q6_K")
# rows, n, k and what the result may be off by, of its largest: one row has at least 22 bits of each
# number, and so have few; many are rounded to 11 bits as weights are, about 2⁻¹² each
SIZES = (
    (1, 16384, 1024, 4e-6), (1, 4128, 4096, 4e-6), (1, 1280, 14336, 4e-6), (1, 9000, 2304, 4e-6),
    (2, 4104, 1024, 4e-6), (8, 9000, 4096, 4e-6), (11, 1000, 2304, 4e-6), (40, 1000, 1024, 2e-3),
    (64, 1024, 3072, 2e-3), (200, 4104, 1024, 2e-3), (513, 1000, 2048, 2e-3),
)  # fmt: skip
DRAWN = 200  # rows of a weight, which are repeated


def products_are_right(name: str) -> None:
    scheme = GGUF_SCHEMES[name]
    for rows, n, k, allowed in SIZES:
        drawn = encode(scheme, random(DRAWN, k, seed=1)).data
        packed = np.resize(drawn, (n, drawn.shape[1]))

        def build(g: Graph, rows: int = rows, k: int = k, packed: np.ndarray = packed) -> Value:
            w = g.param("w", list(packed.shape), "u8")
            return g.dequant_matmul(g.input("x", [rows, k]), w, scheme=scheme)

        made = compiled(graph_of(build)).set_param("w", packed)
        x = random(rows, k, seed=2)
        some = x.astype(np.float64) @ decode(scheme, drawn).astype(np.float64).T
        want = np.resize(np.ascontiguousarray(some.T), (n, rows)).T
        for _ in range(3):  # as launches, while captured, and as a graph
            off = np.abs(made.run(x=x)[0] - want).max() / np.abs(want).max()
            assert off <= allowed, f"{rows} rows {n}x{k}: off by {off:.1e}"


for _name in TYPES:
    CHECKS[f"packed products of {_name}"] = partial(products_are_right, _name)
