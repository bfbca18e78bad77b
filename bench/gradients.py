"""Gradients and second derivatives beside JAX and PyTorch, over shapes and numbers drawn anew.

    python -m bench gradients --peer-python PYTHON [--draws N] [--first N] [--device NAME]

The functions are those of tests/arrays/derivative_cases.py: elementwise functions, reductions,
layouts, products, linear algebra, spectra, and functions of networks at their edges. The peer
computes in f64 and its results are kept in 32 bits. A figure is the largest difference, relative to
the largest element of a derivative and 1.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from bench.common import Bar, arguments, finish

TESTS = Path(__file__).resolve().parent.parent / "tests"
ALLOWED = 1e-6
"""One rounding of 6e-8 of what is kept, and the cancellation of second derivatives."""


def worst_of(goldens: Path, first: int, draws: int) -> tuple[dict[str, float], int]:
    """The largest difference of first and of second derivatives, and how many were compared."""
    sys.path.insert(0, str(TESTS / "arrays"))
    from derivative_cases import ARRAYS, EDGES
    from own_derivatives import derivatives, distance, wide

    known = np.load(goldens)
    worst, count = {"d": 0.0, "dd": 0.0}, 0
    for case in [*ARRAYS, *EDGES]:
        for draw in case.draws(first, draws):
            arrays = wide(case.arrays(draw))
            given = case.name, case.expression, case, arrays, set(known.files), draw
            for name, found in derivatives(*given):
                order = "dd" if name.rpartition("/")[2].startswith("dd") else "d"
                off = distance(found, known[name])
                if off > ALLOWED:
                    print(f"{name}: off by {off:.2g}", flush=True)
                worst[order], count = max(worst[order], off), count + 1
    return worst, count


def main(argv: list[str]) -> int:
    parser = arguments("gradients", __doc__ or "")
    parser.add_argument("--peer-python", default=sys.executable, metavar="PYTHON",
                        help="a Python that has JAX and torch")  # fmt: skip
    parser.add_argument("--draws", type=int, default=5, help="shapes of each function")
    parser.add_argument("--first", type=int, default=100, help="the number of the first draw")
    parser.add_argument("--device", default="reference", help="what computes ours: reference, cpu")
    options = parser.parse_args(argv)
    draws = 1 if options.quick else options.draws
    import rlx

    with tempfile.TemporaryDirectory() as folder:
        goldens = Path(folder) / "derivatives.npz"
        script = TESTS / "goldens" / "make_derivatives.py"
        asked = ["--draws", str(draws), "--first", str(options.first), "--out", str(goldens)]
        made = subprocess.run([options.peer_python, str(script), *asked], check=False)
        if made.returncode:
            print("the peer needs JAX and torch: pip install -r bench/requirements-train.txt",
                  file=sys.stderr)  # fmt: skip
            return 2
        with rlx.default_device(options.device):
            worst, count = worst_of(goldens, options.first, draws)
    print(f"{count} derivatives of {options.device} compared", flush=True)
    bars = [
        Bar(f"gradients_{name}", worst[order], "relative", "JAX and torch, allowed", ALLOWED, 1.0,
            False)
        for order, name in (("d", "first"), ("dd", "second"))
    ]  # fmt: skip
    return finish(bars, options.json)
