"""Results in recycled memory: never in use twice, kept within bounds, aligned."""

from __future__ import annotations

import gc
import threading

import numpy as np
import pytest

import rlx.numpy as rnp
from rlx.backends import recycle
from rlx.backends.recycle import copied, result_maker

ELEMENTS = 1 << 19  # 2 MiB of f32


@pytest.fixture(scope="module", autouse=True)
def collected():
    """No cycles of earlier tests hold blocks. Once: it takes seconds where they left much."""
    gc.collect()


@pytest.fixture(autouse=True)
def empty(collected):
    recycle.release()
    yield
    recycle.release()


def address(array):
    return array.__array_interface__["data"][0]


def test_a_block_is_used_again_once_nothing_views_it():
    make = result_maker((ELEMENTS,), np.float32)
    first = make()
    at, view = address(first), first[10:20].reshape(2, 5)

    del first
    assert not recycle.free and address(make()) != at  # the view keeps the block
    recycle.release()
    del view
    assert address(make()) == at


def test_results_in_use_are_never_overwritten():
    x = rnp.asarray(np.arange(ELEMENTS, dtype=np.float32))
    kept = [x + float(i) for i in range(6)]
    for _ in range(6):
        x * 0.0  # garbage at once

    for i, found in enumerate(kept):
        np.testing.assert_array_equal(np.asarray(found), np.arange(ELEMENTS, dtype=np.float32) + i)


def test_numpy_and_dlpack_views_keep_the_block():
    x = rnp.asarray(np.zeros(ELEMENTS, np.float32))
    through = [np.asarray(x + 1.0), np.from_dlpack(x + 2.0), (x + 3.0).data.T]
    for _ in range(4):
        x + 9.0
    assert [float(v[0]) for v in through] == [1.0, 2.0, 3.0]


def test_free_blocks_are_bounded():
    blocks = [result_maker((2 * recycle.KEPT_BYTES // 8,), np.uint8)() for _ in range(8)]
    del blocks
    assert 0 < sum(b.nbytes for b in recycle.free) <= recycle.KEPT_BYTES


def test_a_much_larger_block_is_left_alone():
    result_maker((8 * ELEMENTS,), np.float32)()
    [block] = recycle.free
    made = result_maker((ELEMENTS,), np.float32)()
    assert recycle.free == [block] and made.size == ELEMENTS


def test_threads_never_share_a_block():
    failed = []

    def work(number):
        make = result_maker((ELEMENTS,), np.int32)
        for turn in range(60):
            array = make()
            array[:: ELEMENTS // 64] = 1000 * number + turn
            if (array[:: ELEMENTS // 64] != 1000 * number + turn).any():
                failed.append((number, turn))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


@pytest.mark.parametrize("size", [1, 5_000, 100_003, ELEMENTS + 1])
@pytest.mark.parametrize("dtype", [np.float32, np.complex64, np.bool_, np.int8])
def test_any_type_and_size(size, dtype):
    source = np.arange(2 * size).reshape(size, 2).astype(dtype).T  # not row-major
    made = copied(source)
    np.testing.assert_array_equal(made, source)
    assert made.flags.c_contiguous and made.flags.writeable and made.dtype == dtype
    assert made.nbytes < 1 << 14 or address(made) % 64 == 0
