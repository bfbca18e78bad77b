"""What autotuning gains: `rlx tune` in a cache of its own, defaults and best values in turns.

`--model FILE.gguf` (may be given several times). Tunables change no result, so that speed is all
there is to compare; a value replaces a default only where it wins twice. The goal is that tuning
never loses: 0.98, within the noise of a run.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from bench.common import Bar, arguments, finish

GOAL = 0.98


def measure(path: str, prompt: int) -> list[Bar]:
    import rlx

    bars = []
    with rlx.load(path) as model:
        for part, program in rlx.tune_model(model, prompt=prompt).items():
            for kernel in program.kernels:
                print(f"{part}: {kernel.label}: {dict(kernel.best) or 'defaults'}")
            bars.append(
                Bar(
                    f"tune_{part}_{Path(path).stem}",
                    1e3 * program.after,
                    "ms",
                    "defaults",
                    1e3 * program.before,
                    GOAL,
                    higher_is_better=False,
                )
            )
    return bars


def main(argv: list[str]) -> int:
    parser = arguments("tune", __doc__ or "")
    parser.add_argument("--model", action="append", required=True, metavar="FILE")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["RLX_CACHE_DIR"] = folder
        prompt = 64 if options.quick else 128
        bars = [bar for path in options.model for bar in measure(path, prompt)]
    return finish(bars, options.json)
