"""Timing and the line that every bar ends with."""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rlx.llvm.target import Target


@dataclass(frozen=True)
class Bar:
    """One figure against a peer or a limit, with the goal for it."""

    name: str
    value: float
    unit: str
    peer: str
    peer_value: float
    goal: float
    higher_is_better: bool = True

    @property
    def ratio(self) -> float:
        """Above 1 we are the better one, whichever way the unit points."""
        if not self.value or not self.peer_value:
            return 0.0
        better = self.value / self.peer_value
        return better if self.higher_is_better else 1 / better

    @property
    def met(self) -> bool:
        return self.ratio >= self.goal

    def __str__(self) -> str:
        return (
            f"bar {self.name}: {self.value:.4g} {self.unit}; peer {self.peer} "
            f"{self.peer_value:.4g}; ratio {self.ratio:.2f}; goal {self.goal:g}; "
            f"{'met' if self.met else 'missed'}"
        )


def arguments(name: str, description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"python -m bench {name}", description=description)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument("--json", metavar="FILE", help="write the figures to FILE")
    return parser


def instruction_set() -> str:
    """What RLX compiles for here: RLX_TARGET=znver3 (or x86-64-v3) holds it to AVX2."""
    target = Target.host()
    if not target.is_x86:
        return "NEON"
    return "AVX512" if target.avx512 else "AVX2" if target.has("avx2") else "SSE"


def median_time(run: Callable[[], object], repeat: int = 5, inner: int = 1) -> float:
    """Seconds per call: the median of `repeat` samples of `inner` calls, collector off."""
    return interleaved([run], repeat, inner)[0]


def interleaved(
    runs: Sequence[Callable[[], object]], repeat: int = 5, inner: int = 1
) -> list[float]:
    """Median seconds of each, sampled in turn so that a noisy minute hits all of them."""
    samples: list[list[float]] = [[] for _ in runs]
    for run in runs:
        run()
    enabled = gc.isenabled()
    gc.disable()
    try:
        for _ in range(repeat):
            for kept, run in zip(samples, runs, strict=True):
                start = time.perf_counter()
                for _ in range(inner):
                    run()
                kept.append((time.perf_counter() - start) / inner)
    finally:
        if enabled:
            gc.enable()
    return [statistics.median(s) for s in samples]


def finish(bars: Sequence[Bar], json_file: str | None) -> int:
    """Print every bar, write them if asked; the exit status says whether all were met."""
    for bar in bars:
        print(bar)
    if json_file:
        rows = [asdict(b) | {"ratio": b.ratio, "met": b.met} for b in bars]
        Path(json_file).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 0 if all(b.met for b in bars) else 1
