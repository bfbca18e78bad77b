"""What the machine gives, as `rlx inspect --html` draws it."""

from __future__ import annotations

from rlx.backends.cpu.kernels.qgemm.dot import FourWay, dot_kind
from rlx.backends.cpu.peaks import DotProbe, FmaProbe, ReadProbe, dot_peak, measure_limits
from rlx.llvm.target import Target


def test_limits_are_those_of_a_machine() -> None:
    found = measure_limits(1, seconds=0.02)
    assert found.threads == 1
    # from the slowest machine that runs this to ten times the fastest we know of
    assert 0.5 < found.gflops < 5e3
    assert 0.2 < found.memory_gb < 5e3
    # other processes may take cycles from one measurement and not from the other
    assert found.cache_gb > 0.5 * found.memory_gb


def test_bytes_are_multiplied_where_the_target_can() -> None:
    kind = dot_kind(Target.host())
    four = kind is not None and issubclass(kind, FourWay)
    assert (dot_peak(1, seconds=0.01) is not None) == four


def test_probes_know_their_work() -> None:
    lanes = Target.host().lanes(32)
    assert FmaProbe(1, iterations=10).flops == 2 * 10 * 12 * lanes
    assert ReadProbe(1, size=1 << 16, repeats=3).bytes == 3 << 16
    if dot_peak(1, seconds=0.01) is not None:
        assert DotProbe(1, iterations=10).flops == 4 * FmaProbe(1, iterations=10).flops
