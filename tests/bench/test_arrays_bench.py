"""The functions of `bench arrays` compute the same here and in NumPy; peers may be missing."""

from __future__ import annotations

import functools

import numpy as np
import pytest

import rlx
from bench import arrays, results
from bench.peers import array_functions as rows

rng = np.random.default_rng(0)
SHAPES = {
    "chain_5": [(7, 5), (7, 5)], "chain_20": [(33,), (33,)], "sum": [(9, 4)], "softmax": [(4, 19)],
    "layer_norm": [(3, 17), (17,), (17,)], "mlp": [(3, 8), (8, 5), (5,), (5, 2), (2,)],
    "attention": [(1, 2, 9, rows.HEAD_DIM)] * 3, "tiny": [(16,)] * 3,
}  # fmt: skip
IN_NUMPY = {
    "sum": np.sum, "tiny": rows.tiny,
    **{n: functools.partial(getattr(rows, n), np) for n in SHAPES if n not in ("sum", "tiny")},
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
def test_rows_agree_with_numpy(name: str) -> None:
    given = [rng.standard_normal(shape).astype(np.float32) for shape in SHAPES[name]]
    found = np.asarray(rlx.jit(arrays.OURS[name])(*given))
    expected = IN_NUMPY[name](*[x.astype(np.float64) for x in given])
    # a few dozen operations and sums of at most 64 terms near 1, each rounded to 6e-8
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_a_step_of_k_means() -> None:
    points, centroids = rng.standard_normal((200, 3)), rng.standard_normal((4, 3))
    ids = ((points[:, None] - centroids[None]) ** 2).sum(-1).argmin(1)
    expected = [points[ids == i].mean(0) if (ids == i).any() else np.zeros(3) for i in range(4)]
    found = rlx.jit(arrays.kmeans)(points.astype(np.float32), centroids.astype(np.float32))
    # means of at most 200 numbers near 1
    np.testing.assert_allclose(np.asarray(found), expected, rtol=1e-5, atol=1e-5)


def test_a_convolution() -> None:
    x, w = rng.standard_normal((2, 3, 6, 5)), rng.standard_normal((4, 3, 3, 3))
    padded = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), (2, 3))
    expected = np.einsum("nchwij,ocij->nohw", windows, w)
    found = rlx.jit(arrays.conv)(x.astype(np.float32), w.astype(np.float32))
    # sums of 27 products
    np.testing.assert_allclose(np.asarray(found), expected, rtol=1e-5, atol=1e-5)


def test_every_row_has_arguments() -> None:
    assert set(rows.ROWS) | {"tiny"} == set(arrays.OURS)
    small = [name for name in rows.ROWS if name not in ("chain_5", "chain_20", "sum")]
    assert all(x.dtype == np.float32 for name in small for x in rows.arguments(name))


def test_a_missing_peer_says_what_to_install(capsys: pytest.CaptureFixture[str]) -> None:
    assert arrays.main(["--quick", "--peer-python", "/no/such/python"]) == 2
    assert "requirements-arrays.txt" in capsys.readouterr().err


def test_all_gives_it_the_peers() -> None:
    assert "arrays" in results.PEERED
