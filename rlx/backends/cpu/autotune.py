"""Autotuning: other values of the tunables of a program's kernels, measured where they run.

Each candidate takes the place of its kernel in the linked program, so that it meets the caches and
the memory traffic of the real run. Candidates take turns with the default, and one replaces it only
where it wins by more than the noise. Results never change: a tunable has no effect on them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from rlx.backends.cpu.executable import CpuExecutable
from rlx.backends.cpu.kernels.spec import KernelSpec, emit_unit, unit_of
from rlx.backends.cpu.tuning import Values, kernel_name, store_tuned, tuned_values
from rlx.backends.inspection import TunedKernel, TunedProgram
from rlx.errors import CodegenError
from rlx.llvm.jit import Kernel, compile_many
from rlx.llvm.target import Target

ROUNDS = 7  # turns of every candidate
LEAST_SHARE = 0.02  # of the program's time; kernels below are left alone
LEAST_GAIN = 0.015  # of the kernel's time; less is noise
_AGREEING = 0.8  # of the rounds must favour the candidate

Times = npt.NDArray[np.float64]


class Autotuner:
    """Tunes the kernels of one executable; `specs` are those of its launches, in order."""

    def __init__(
        self,
        executable: CpuExecutable,
        specs: Sequence[KernelSpec | None],
        target: Target,
        run: Callable[[], None],
        progress: Callable[[str], None],
    ) -> None:
        self._executable, self._target = executable, target
        self._run, self._progress = run, progress
        self._launches: dict[KernelSpec, list[int]] = {}
        for i, spec in enumerate(specs):
            if spec is not None:
                self._launches.setdefault(spec, []).append(i)

    def tune(self) -> TunedProgram:
        """Tune the kernels that matter, the longest first, and store what is best."""
        self._run()  # caches are warm, threads awake
        times = self._measure()
        found: dict[KernelSpec, TunedKernel] = {}
        for spec in sorted(self._launches, key=lambda s: -self._seconds(times, s)):
            share = self._seconds(times, spec) / max(float(times.sum()), 1e-12)
            tuned = self._tune_kernel(spec, share) if share >= LEAST_SHARE else None
            if tuned is not None:
                found[spec] = tuned
        store_tuned({kernel_name(s): t.best for s, t in found.items()}, self._target)
        best = {spec: t.best for spec, t in found.items()}
        return TunedProgram(list(found.values()), *self._whole(best))

    def _tune_kernel(self, spec: KernelSpec, share: float) -> TunedKernel | None:
        """One kernel: its tunables one after the other, each with the best values so far. What
        wins must win a second time, against the defaults: the best of many is often luck."""
        _, tunables = emit_unit(spec, self._target, {})
        if not any(len(values) > 1 for values in tunables.values()):
            return None
        self._progress(spec.label)
        defaults = {name: values[0] for name, values in tunables.items()}
        start = {k: v for k, v in tuned_values(spec, self._target).items() if k in tunables}
        best = dict(start)
        for name, values in tunables.items():
            now = best.get(name, values[0])
            others = [v for v in values if v != now]
            best = dict(self._best(spec, [{**best, name: v} for v in (now, *others)])[0])
        best = {name: v for name, v in best.items() if v != defaults[name]}
        won, speedup = self._best(spec, [{}, best]) if best else ({}, 1.0)
        if not won and best != start:
            won, speedup = self._best(spec, [{}, start])
        return TunedKernel(spec.label, share, defaults, won, speedup)

    def _best(self, spec: KernelSpec, candidates: Sequence[Values]) -> tuple[Values, float]:
        """The best of some candidates, and how much faster than the first it is."""
        kernels = self._kernels(spec, candidates)
        rounds = np.array([[self._time(spec, k) for k in kernels] for _ in range(ROUNDS)])
        ratios = rounds[:, :1] / rounds  # above 1: faster than the first
        best = int(np.argmax(np.median(ratios, axis=0)))
        gain, agreeing = float(np.median(ratios[:, best])), float((ratios[:, best] > 1).mean())
        if gain < 1 + LEAST_GAIN or agreeing < _AGREEING:
            best, gain = 0, 1.0
        self._put(spec, kernels[best])
        return candidates[best], gain

    def _whole(self, best: Mapping[KernelSpec, Values]) -> tuple[float, float]:
        """Seconds of the program with the defaults, and with the best values, taken in turns."""
        kernels = {s: self._kernels(s, [{}, values]) for s, values in best.items()}
        times = np.zeros((ROUNDS, 2))
        for turn in range(ROUNDS):
            for which in (0, 1):
                for spec, both in kernels.items():
                    self._put(spec, both[which])
                times[turn, which] = self._measure().sum()
        before, after = np.median(times, axis=0)
        return float(before), float(after)

    def _kernels(self, spec: KernelSpec, candidates: Sequence[Values]) -> list[Kernel]:
        return compile_many([emit_unit(spec, self._target, c)[0] for c in candidates])

    def _time(self, spec: KernelSpec, kernel: Kernel) -> float:
        """Seconds of a kernel's launches in a run, with this code."""
        self._put(spec, kernel)
        return self._seconds(self._measure(), spec)

    def _put(self, spec: KernelSpec, kernel: Kernel) -> None:
        key = unit_of(spec, self._target).key
        if not self._executable.replace_kernels({key: kernel}):
            raise CodegenError(
                "the program has other kernels than its plan", where="tune", got=spec.label,
                hint="clear the cache with `rlx cache clear` and tune again",
            )  # fmt: skip

    def _measure(self) -> Times:
        """Seconds of each launch: medians of the runs."""
        with self._executable.recording() as recording:
            self._run()
        return np.array([row.seconds for row in recording.profile().rows])

    def _seconds(self, times: Times, spec: KernelSpec) -> float:
        return float(times[self._launches[spec]].sum())
