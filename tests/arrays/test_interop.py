"""Arrays with other libraries: NumPy, DLPack, array-api-compat, scikit-learn, SciPy, torch, JAX."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import rlx
import rlx.numpy as rnp

rng = np.random.default_rng(0)
DTYPES = ["bool", "int8", "int64", "uint16", "float16", "bfloat16", "float32", "float64",
          "complex64", "complex128"]  # fmt: skip


def test_numpy_arrays_on_either_side_of_an_operator() -> None:
    a, x = rng.standard_normal((2, 3)), rnp.ones((2, 3), dtype=rnp.float64)
    for got in (a + x, x + a, np.float64(2.0) * x, a @ x.mT, a < x):
        assert isinstance(got, rlx.Array)
    x += 1  # rebinds
    assert np.array_equal(np.asarray(a - x), a - 2)
    assert np.array_equal(np.asarray(2 - x), np.zeros((2, 3)))
    assert x.__add__("text") is NotImplemented
    with pytest.raises(TypeError):
        x + "text"


def test_memory_given_to_numpy_cannot_be_written() -> None:
    x = rnp.asarray(np.arange(4.0))
    view = np.asarray(x)
    assert np.shares_memory(view, x.data) and not view.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 1
    mine = np.array(x)
    mine[0] = 9
    assert float(x[0]) == 0 and np.asarray(x, np.float32).dtype == np.float32
    with pytest.raises(rlx.ArrayValueError, match="copy is needed"):
        np.asarray(x, np.float32, copy=False)


@pytest.mark.parametrize("dtype", DTYPES)
def test_dlpack_round_trip_without_a_copy(dtype: str) -> None:
    x = rnp.asarray([[1, 0, 2], [3, 4, 5]], dtype=dtype)[:, ::2]
    back = rnp.from_dlpack(Foreign(x))
    assert back.dtype is x.dtype and back.tolist() == x.tolist()
    assert np.shares_memory(np.asarray(back), np.asarray(x))
    assert not np.shares_memory(np.asarray(rnp.from_dlpack(Foreign(x), copy=True)), np.asarray(x))
    if dtype != "bfloat16":
        shared = np.from_dlpack(x)
        assert np.shares_memory(shared, np.asarray(x)) and not shared.flags.writeable


class Foreign:
    """An array of another library: only DLPack is known of it."""

    def __init__(self, x: rlx.Array) -> None:
        self.x = x

    def __dlpack__(self, **options: Any) -> object:
        return self.x.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.x.__dlpack_device__()


class Old(Foreign):
    """One that knows DLPack before 1.0."""

    def __dlpack__(self, *, stream: object = None) -> object:
        return self.x.__dlpack__(stream=stream)


def test_consumers_without_versions_get_a_copy() -> None:
    x = rnp.asarray([1.0, 2.0])
    assert not np.shares_memory(np.asarray(rnp.from_dlpack(Old(x))), np.asarray(x))
    assert rnp.from_dlpack(Old(x)).tolist() == [1.0, 2.0]
    with pytest.raises(BufferError, match="host's memory"):
        x.__dlpack__(dl_device=(2, 0))
    with pytest.raises(rlx.InputError, match="stream"):
        x.__dlpack__(stream=1)


def test_writable_memory_that_is_given_in_is_shared() -> None:
    a = np.zeros(3)
    shared, own = rnp.asarray(a), rnp.array(a)
    a[0] = 1
    assert float(shared[0]) == 1 and float(own[0]) == 0


def test_buffers_and_nested_sequences() -> None:
    assert rnp.asarray(memoryview(b"\1\2")).tolist() == rnp.asarray(b"\1\2").tolist() == [1, 2]
    rows = [rnp.ones(2, dtype=rnp.float64), [rnp.asarray(2.0), np.float32(3)]]
    made = rnp.asarray(rows)
    assert made.dtype is rnp.float64 and made.tolist() == [[1, 1], [2, 3]]
    assert rnp.asarray([1, 2**63], dtype=rnp.uint64).tolist() == [1, 2**63]
    stacked = rlx.jit(lambda x: rnp.asarray([[x[0], 1.0], [x[1], x.shape[0]]]))
    assert stacked(np.float32([5, 6])).tolist() == [[5, 1], [6, 2]]


def test_array_api_compat_knows_the_namespace() -> None:
    compat = pytest.importorskip("array_api_compat")
    x = rnp.zeros((2, 3))
    assert compat.is_array_api_obj(x)
    assert compat.array_namespace(x, rnp.ones(2)) is rnp
    assert compat.device(x) == "cpu" and compat.to_device(x, "cpu") is x and compat.size(x) == 6


SKLEARN = """
import numpy as np, rlx, rlx.numpy as rnp, sklearn
from sklearn.decomposition import PCA
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.linear_model import Ridge
from sklearn.metrics import f1_score, pairwise, r2_score
from sklearn.preprocessing import StandardScaler
a, labels = np.random.default_rng(0).standard_normal((40, 5)), np.arange(40) % 3
functions = [
    lambda x, y: StandardScaler().fit(x).transform(x),
    lambda x, y: PCA(2, svd_solver="full").fit(x).explained_variance_,
    lambda x, y: PCA(2, svd_solver="covariance_eigh").fit(x).explained_variance_,
    lambda x, y: LinearDiscriminantAnalysis().fit(x, y).predict(x),
    lambda x, y: Ridge(solver="svd").fit(x[:, 1:], x[:, 0]).predict(x[:, 1:]),
    lambda x, y: pairwise.rbf_kernel(x, x[:9, :]),
    lambda x, y: r2_score(x[:, 0], x[:, 1]),
    lambda x, y: f1_score(y, y[::-1], average="macro"),
]
expected = [f(a, labels) for f in functions]
with sklearn.config_context(array_api_dispatch=True), rnp.item_assignment():
    for f, wanted in zip(functions, expected):
        got = f(rnp.asarray(a), rnp.asarray(labels))
        assert isinstance(got, (rlx.Array, float)), type(got)
        # f64 by other kernels, through a decomposition of a well-conditioned matrix
        np.testing.assert_allclose(np.asarray(got), wanted, rtol=1e-9, atol=1e-12)
print(len(functions))
"""


SCIPY = """
import numpy as np, rlx, rlx.numpy as rnp
from scipy import cluster, integrate, ndimage, signal, special, stats
a = np.random.default_rng(0).standard_normal((40, 5))
functions = [
    lambda x: special.logsumexp(x, axis=1), lambda x: special.softmax(x, axis=0),
    lambda x: special.gammaln(abs(x)), lambda x: special.expit(x),
    lambda x: stats.zscore(x), lambda x: stats.skew(x), lambda x: stats.kurtosis(x),
    lambda x: stats.pearsonr(x[:, 0], x[:, 1]).statistic,
    lambda x: stats.ttest_ind(x[:, 0], x[:, 1]).pvalue,
    lambda x: cluster.vq.whiten(x), lambda x: cluster.hierarchy.linkage(x),
    lambda x: integrate.trapezoid(x), lambda x: signal.detrend(x),
    lambda x: ndimage.gaussian_filter(x, 1.0),
]
expected = [f(a) for f in functions]
with rnp.item_assignment():
    for f, wanted in zip(functions, expected):
        got = f(rnp.asarray(a))
        assert isinstance(got, rlx.Array), type(got)
        # f64 by other kernels: sums of 40 numbers, divided by ones that are not small
        np.testing.assert_allclose(np.asarray(got), wanted, rtol=1e-9, atol=1e-12)
print(len(functions))
"""


@pytest.mark.parametrize(
    ("package", "script", "count"), [("sklearn", SKLEARN, 8), ("scipy", SCIPY, 14)]
)
def test_packages_compute_on_arrays(package: str, script: str, count: int) -> None:
    pytest.importorskip(package)
    environment = os.environ | {"SCIPY_ARRAY_API": "1"}  # read when SciPy is imported
    command = [sys.executable, "-W", "ignore", "-c", script]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.stdout == f"{count}\n", run.stderr


def test_item_assignment_is_allowed_within_its_context_alone() -> None:
    x = rnp.zeros(3)
    alias, copied = x[:], rnp.astype(x, x.dtype)
    with pytest.raises(TypeError, match="item_assignment"):
        x[0] = 1.0
    with rnp.item_assignment():
        x[0] = 1.0
        x[rnp.asarray([False, True, True])] = 2
        assert rlx.jit(doubled_in_place)(np.ones(2, np.float32)).tolist() == [2.0, 1.0]
    assert x.tolist() == [1, 2, 2] and alias.tolist() == copied.tolist() == [0, 0, 0]
    with pytest.raises(TypeError):
        x[0] = 1.0


def doubled_in_place(x: rlx.Array) -> rlx.Array:
    y = rnp.positive(x)
    y[0] = y[0] * 2
    return y


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64", "bool"])
def test_torch_shares_memory(dtype: str) -> None:
    torch = pytest.importorskip("torch", reason="the bench environment has torch")
    x = rnp.asarray([[1, 0, 2], [3, 4, 5]], dtype=dtype)
    t = torch.from_dlpack(x)
    assert str(t.dtype) == f"torch.{dtype}" and t.tolist() == x.tolist()
    back = rnp.asarray(t)
    assert back.dtype is x.dtype and back.tolist() == x.tolist()
    assert back.data.ctypes.data == t.data_ptr()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "bool"])
def test_jax_shares_memory(dtype: str) -> None:
    jax = pytest.importorskip("jax", reason="the bench environment has JAX")
    x = rnp.asarray([[1, 0, 2], [3, 4, 5]], dtype=dtype)
    j = jax.numpy.from_dlpack(x)
    assert str(j.dtype) == dtype and j.tolist() == x.tolist()
    assert rnp.asarray(jax.numpy.asarray(j) + j[:1]).dtype is x.dtype
