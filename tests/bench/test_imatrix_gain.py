"""The figures of `python -m bench imatrix`, on numbers that can be computed by hand."""

from __future__ import annotations

import numpy as np

from bench import imatrix
from rlx.ir.quant.scheme import QuantScheme


class Fixed:
    """A model of two tokens whose logits are the same after every token."""

    def __init__(self, first: float) -> None:
        self._logits = np.log([first, 1 - first]) + 5  # a constant changes nothing

    def logits(self, tokens: list[int]) -> np.ndarray:
        return np.tile(self._logits, (len(tokens), 1))


def test_divergence_and_perplexity() -> None:
    tokens = [0] * (imatrix.CHUNK + 10)  # two chunks, each without a first token to guess
    kl, perplexity = imatrix.divergence(Fixed(0.5), Fixed(0.25), tokens)
    assert np.isclose(kl, 0.5 * np.log(0.5 / 0.25) + 0.5 * np.log(0.5 / 0.75), rtol=1e-12)
    assert np.isclose(perplexity, 4, rtol=1e-12)
    kl, perplexity = imatrix.divergence(Fixed(0.5), Fixed(0.5), tokens)
    assert kl == 0 and np.isclose(perplexity, 2, rtol=1e-12)


def test_rows_are_padded_and_heavy_columns_kept() -> None:
    rng = np.random.default_rng(3)
    w = rng.standard_normal((8, 320)).astype(np.float32)  # a superblock and a quarter
    by = np.where(np.arange(320) % 4, 1, 1000).astype(np.float32)  # one in each group of codes
    scheme = QuantScheme.parse("IQ3_XXS")
    errors = [(imatrix.rounded(scheme, w, b) - w) ** 2 for b in (None, by)]
    assert errors[0].shape == w.shape and errors[0].mean() < 0.05  # of a variance of 1
    assert errors[1][:, ::4].mean() < 0.5 * errors[0][:, ::4].mean()
