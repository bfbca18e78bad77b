"""Damaged ONNX files: typed errors only, in bounded time and memory.

pytest tests/fuzz/test_onnx_fuzz.py -m nightly        # five thousand files
"""

from __future__ import annotations

import random
import time
import tracemalloc

import pytest
from onnx_mutations import mutated, seeds

from rlx.errors import RlxError
from rlx.onnx import OnnxModel

SECONDS = 20.0  # the compiler's time for all kernels of a small model, on a busy machine
MEMORY = 64 << 20  # of the interpreter: traces and the compiler; tensors are checked by the device


SIZES = {"height": 5, "width": 6}


def read_and_run(data: bytes) -> bool:
    """Whether the model could be run, on drawn inputs."""
    model = OnnxModel(data)
    if any(isinstance(d, int) and d > 2**16 for a in model.inputs for d in a.type.dims or ()):
        return False
    names = {d for a in model.inputs for d in a.type.dims or () if isinstance(d, str)}
    model.run(model.example_inputs(**{n: SIZES.get(n, 2) for n in names}))
    return True


def check(seed: int, count: int) -> None:
    rng, whole, ran = random.Random(seed), seeds(), 0
    for _ in range(count):
        data = mutated(rng, whole)
        begin = time.monotonic()
        tracemalloc.start()
        try:
            ran += read_and_run(data)
        except RlxError:
            pass
        finally:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        assert time.monotonic() - begin < SECONDS
        assert peak < MEMORY
    assert 0 < ran < count  # some changes are harmless


@pytest.mark.parametrize("seed", range(4))
def test_damage_raises(seed: int) -> None:
    check(seed, 75)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(100, 150))
def test_damage_raises_in_thousands(seed: int) -> None:
    check(seed, 100)
