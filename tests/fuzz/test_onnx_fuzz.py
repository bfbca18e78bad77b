"""Damaged ONNX files: typed errors only, in bounded time and memory.

pytest tests/fuzz/test_onnx_fuzz.py -m nightly        # five thousand files
"""

from __future__ import annotations

import random
import time
import tracemalloc
from typing import Any

import pytest
from onnx_mutations import mutated, seeds

from rlx.errors import InputError, RlxError
from rlx.onnx import OnnxModel

SECONDS = 20.0  # the compiler's time for all kernels of a small model, on a busy machine
MEMORY = 64 << 20  # of the interpreter: traces and the compiler; tensors are checked by the device


def read_and_run(data: bytes) -> bool:
    """Whether the model could be run, on drawn inputs."""
    try:
        model = OnnxModel(data)
        inputs: dict[str, Any] = model.example_inputs(n=2, batch=2, height=5, width=6)
    except InputError:  # sizes that the file does not have any more
        return False
    model.run(inputs)
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
