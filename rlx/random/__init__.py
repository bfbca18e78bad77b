"""Random numbers with explicit keys.

    key = rlx.random.key(0)
    first, second = rlx.random.split(key)
    x = rlx.random.normal(first, (3, 4))

There is no hidden state: the same key gives the same numbers, on every device, at once and inside
`rlx.jit`. Split a key for each use. The generator is Philox4x32-10 (`rlx.ir.philox`).
"""

from __future__ import annotations

from rlx.random.distributions import (
    bernoulli,
    categorical,
    choice,
    dropout_mask,
    exponential,
    gumbel,
    laplace,
    normal,
    permutation,
    rademacher,
    randint,
    truncated_normal,
    uniform,
)
from rlx.random.keys import bits, fold_in, key, split
from rlx.random.rejection import beta, gamma, poisson

__all__ = [
    "bernoulli",
    "beta",
    "bits",
    "categorical",
    "choice",
    "dropout_mask",
    "exponential",
    "fold_in",
    "gamma",
    "gumbel",
    "key",
    "laplace",
    "normal",
    "permutation",
    "poisson",
    "rademacher",
    "randint",
    "split",
    "truncated_normal",
    "uniform",
]
