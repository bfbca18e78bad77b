"""How a result is compared with the reference, within what its case allows."""

from __future__ import annotations

import numpy as np
from cases import Case, eps, smallest_normal


def compare(case: Case, got: np.ndarray, wanted: np.ndarray) -> None:
    assert got.dtype == wanted.dtype
    assert got.shape == wanted.shape
    if got.size == 0:
        return
    wide = np.complex128 if got.dtype.kind == "c" else np.float64
    if got.dtype.kind in "biu" or case.ulps == 0:
        same = np.array_equal(got, wanted, equal_nan=got.dtype.kind not in "biu")
        assert same, f"\n{got}\n{wanted}"
        return
    g, w = got.astype(wide), wanted.astype(wide)
    assert np.array_equal(np.isnan(g), np.isnan(w))
    assert np.array_equal(g[np.isinf(w)], w[np.isinf(w)])
    fine = np.isfinite(w)
    size = np.abs(w[fine])
    if case.mode == "sum":
        size = np.full_like(size, size.max(initial=0.0))
    tiny = smallest_normal(got)  # below it units in the last place stop shrinking
    allowed = case.ulps * eps(got) * np.maximum(size, tiny)
    off = np.abs(g[fine] - w[fine])
    assert (off <= allowed).all(), (
        f"off by {np.max(off / np.maximum(allowed, 1e-300)):.2f} × allowed"
    )
