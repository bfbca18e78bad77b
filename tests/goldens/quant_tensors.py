"""The tensors that quantisers are compared on."""

from __future__ import annotations

import numpy as np

TYPES = (
    *("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
    *("IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS", "TQ1_0", "TQ2_0", "MXFP4", "NVFP4"),
)
WEIGHTED = (*TYPES[1:], "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS")  # Q8_0 has no scale to choose


def importance() -> np.ndarray:
    """Mean squares of the inputs of 1024 columns: most alike, some a hundred times as large."""
    n = np.random.default_rng(2025).standard_normal((2, 1024))
    return (np.exp2(n[0]) * np.where(n[1] > 2, 100, 1)).astype(np.float32)


def tensors() -> dict[str, np.ndarray]:
    """f32 [64, 1024] each; made of normal numbers and elementary operations, so that every NumPy
    makes the same ones."""
    rng = np.random.default_rng(2024)
    n = rng.standard_normal((5, 64, 1024))
    rows = np.exp2(np.arange(64) % 9 - 4)[:, None]  # a scale of its own for each row
    found = {
        "normal": 0.02 * n[0],
        "heavy": 0.02 * n[0] / np.sqrt(np.mean(n[1:4] ** 2, axis=0)),  # Student's t with 3 degrees
        "rows": rows * n[4],
        "shifted": 0.02 * n[4] + 0.03,
        "outliers": np.where(np.abs(n[1]) > 3.2, 20 * n[0], n[0]),
        "sparse": np.where(n[2] > 1, n[3], 0),
    }
    return {name: values.astype(np.float32) for name, values in found.items()}
