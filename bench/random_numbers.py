"""Drawing numbers with `rlx.random` against NumPy's Generator (PCG64), 10 million at a time.

    python -m bench random_numbers

NumPy draws one number after the other, on one thread; ours are functions of key and index, drawn on
`--threads`. The bar is for normal numbers; the others are figures.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np

from bench.common import Bar, arguments, finish, interleaved
from rlx import random

COUNT = 10_000_000
GOAL = 1 / 1.5  # at most 1.5 times NumPy's time

Draw = Callable[[int], Any]


def rows() -> dict[str, tuple[Draw, Draw]]:
    """For each distribution how we draw n numbers, and how NumPy does."""
    key, numpy = random.key(0), np.random.default_rng(0)
    return {
        "normal f32": (
            lambda n: random.normal(key, (n,)),
            lambda n: numpy.standard_normal(n, np.float32),
        ),
        "normal f64": (lambda n: random.normal(key, (n,), "f64"), numpy.standard_normal),
        "uniform f32": (
            lambda n: random.uniform(key, (n,)),
            lambda n: numpy.random(n, np.float32),
        ),
        "integers": (
            lambda n: random.randint(key, (n,), 0, 100),
            lambda n: numpy.integers(0, 100, n, np.int32),
        ),
        "exponential f32": (
            lambda n: random.exponential(key, (n,)),
            lambda n: numpy.standard_exponential(n, np.float32),
        ),
        "permutation": (lambda n: random.permutation(key, n // 10),
                        lambda n: numpy.permutation(n // 10)),
        "gamma 2": (lambda n: random.gamma(key, 2.0, (n // 10,)),
                    lambda n: numpy.standard_gamma(2.0, n // 10, np.float32)),
        "poisson 20": (lambda n: random.poisson(key, 20.0, (n // 10,)),
                       lambda n: numpy.poisson(20.0, n // 10)),
    }  # fmt: skip


def main(argv: list[str]) -> int:
    parser = arguments("random_numbers", __doc__ or "")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args(argv)
    os.environ["RLX_NUM_THREADS"] = str(options.threads)
    count, repeat = (COUNT // 10, 3) if options.quick else (COUNT, 7)
    bars = []
    for name, (ours, theirs) in rows().items():
        mine, other = interleaved(
            [lambda f=ours: f(count), lambda f=theirs: f(count)],
            repeat,  # type: ignore[misc]
        )
        print(f"{name}: {mine * 1e3:.1f} ms, NumPy {other * 1e3:.1f} ms", flush=True)
        if name.startswith("normal"):
            bars.append(Bar(name, mine * 1e3, "ms", "numpy", other * 1e3, GOAL, False))
    return finish(bars, options.json)
