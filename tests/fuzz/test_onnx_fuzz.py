"""Damaged ONNX files: typed errors only, in bounded time and memory for each file.

pytest tests/fuzz/test_onnx_fuzz.py -m nightly        # five thousand files
"""

from __future__ import annotations

import random
import resource
import signal
import time
import tracemalloc

import pytest
from onnx_mutations import mutated, seeds

from rlx.errors import RlxError
from rlx.onnx import OnnxModel

SECONDS = 10.0  # the compiler's time for all kernels of a small model, on a busy machine
MEMORY = 64 << 20  # of Python: traces and the compiler
MAX_ITERATIONS, MAX_BYTES = 20_000, 64 << 20  # the limits that the models are given
GROWTH = 512 << 10  # KiB of the process by one file: an arena, some tensors, and kernels


SIZES = {"height": 5, "width": 6}


def read_and_run(data: bytes) -> bool:
    """Whether the model could be run, on drawn inputs."""
    model = OnnxModel(data, max_iterations=MAX_ITERATIONS, max_bytes=MAX_BYTES)
    if any(isinstance(d, int) and d > 2**16 for a in model.inputs for d in a.type.dims or ()):
        return False
    names = {d for a in model.inputs for d in a.type.dims or () if isinstance(d, str)}
    model.run(model.example_inputs(**{n: SIZES.get(n, 2) for n in names}))
    return True


def out_of_time(*_: object) -> None:
    raise TimeoutError(f"a file takes more than {SECONDS} s")


def largest() -> int:
    """The most memory that this process has had, in KiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def check(seed: int, count: int) -> None:
    rng, whole, ran = random.Random(seed), seeds(), 0
    for model in whole:  # modules are imported, and their bytecode made, in no file's time
        assert read_and_run(model.SerializeToString())
    signal.signal(signal.SIGALRM, out_of_time)  # an endless file is a failure, not a hang
    for number in range(count):
        data, begin, before = mutated(rng, whole), time.monotonic(), largest()
        signal.setitimer(signal.ITIMER_REAL, SECONDS)
        tracemalloc.start()
        try:
            ran += read_and_run(data)
        except RlxError:
            pass
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        assert time.monotonic() - begin < SECONDS, f"file {number}"
        assert peak < MEMORY, f"file {number}"
        assert largest() - before < GROWTH, f"file {number}"
    assert 0 < ran < count  # some changes are harmless


@pytest.mark.parametrize("seed", range(4))
def test_damage_raises(seed: int) -> None:
    check(seed, 75)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(100, 150))
def test_damage_raises_in_thousands(seed: int) -> None:
    check(seed, 100)
