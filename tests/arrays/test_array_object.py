"""`rlx.Array` as an object: text, copies, conversion, devices, types."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import rlx
import rlx.numpy as rnp


def test_text_is_like_numpys() -> None:
    x = rnp.asarray([[1.5, -2.0], [0.0, 1e6]])
    assert repr(x) == "Array([[ 1.5e+00, -2.0e+00],\n       [ 0.0e+00,  1.0e+06]], dtype=float32)"
    assert str(rnp.arange(3)) == "[0 1 2]"
    assert repr(rnp.asarray(True)) == "Array(True, dtype=bool)"
    assert repr(rnp.zeros((0, 3))) == "Array([], shape=(0, 3), dtype=float32)"
    assert repr(rnp.ones(1, dtype=rnp.bfloat16)) == "Array([1], dtype=bfloat16)"
    assert "..." in repr(rnp.zeros(2000))
    assert f"{rnp.asarray(2.5):.2f}" == "2.50" and f"{rnp.arange(2)}" == "[0 1]"
    with pytest.raises(rlx.ArrayTypeError, match="one number"):
        f"{rnp.zeros(2):.2f}"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "complex64", "bool"])
def test_copies_and_pickles(dtype: str) -> None:
    x = rnp.asarray([[1, 0], [1, 1]], dtype=dtype).mT
    for made in (copy.copy(x), copy.deepcopy(x), pickle.loads(pickle.dumps(x))):
        assert made.dtype is x.dtype and made.tolist() == x.tolist()


def test_numbers() -> None:
    x = rnp.asarray(3)
    assert (int(x), float(x), complex(x), bool(x)) == (3, 3.0, 3 + 0j, True)
    assert [10, 20, 30, 40][x] == 40 and rnp.asarray([[7]]).item() == 7
    assert 3 in rnp.arange(4) and 5 not in rnp.arange(4)
    for wrong in (
        lambda: bool(rnp.zeros(2)), lambda: int(rnp.ones(1)), lambda: float(rnp.asarray(1j)),
        lambda: [1][rnp.asarray(0.0)], lambda: len(x), lambda: iter(x),
    ):  # fmt: skip
        with pytest.raises(rlx.ArrayTypeError) as caught:
            wrong()
        assert isinstance(caught.value, TypeError)
    with pytest.raises(rlx.ArrayValueError, match="not one element"):
        rnp.zeros(2).item()


def test_methods_are_the_functions() -> None:
    a = np.arange(24.0).reshape(2, 3, 4)
    x = rnp.asarray(a)
    for name in ("sum", "prod", "mean", "max", "min"):
        got = getattr(x, name)(axis=1, keepdims=True)
        expected = getattr(a, name)(axis=1, keepdims=True)
        np.testing.assert_allclose(np.asarray(got), expected, rtol=1e-15)
    assert x.flatten().shape == x.ravel().shape == (24,)
    assert x[:1].squeeze().shape == (3, 4) and x[:1].squeeze(0).shape == (3, 4)
    assert x.transpose().shape == (4, 3, 2) and x.transpose(1, 0, 2).shape == (3, 2, 4)
    assert x.reshape(4, -1).shape == x.reshape((4, 6)).shape and x[0].T.shape == (4, 3)
    assert (x > 3).any() and not (x > 3).all() and x.nbytes == 192 and len(x) == 2
    with pytest.raises(rlx.ArrayValueError, match="use mT"):
        _ = x.T


def test_the_default_device_runs_functions_and_jitted_functions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = np.full(4, 0.1, np.float32)

    def f(x: rlx.Array) -> rlx.Array:
        return rnp.sum(rnp.exp(x))

    with rlx.default_device("reference") as device:
        assert device.name == "reference"
        oracle, jitted = f(rnp.asarray(x)), rlx.jit(f)
        with rlx.default_device("cpu"):
            assert rlx.jit(f)(x).device == "cpu"
    assert "reference" in repr(jitted._session)
    assert float(jitted(x)) == float(oracle)
    np.testing.assert_allclose(float(f(rnp.asarray(x))), float(oracle), rtol=1e-6)
    with pytest.raises(rlx.OptionError, match="unknown device"):
        rlx.default_device("mars")
    command = "import rlx; from rlx.numpy.device import current_device; print(current_device())"
    monkeypatch.setenv("RLX_DEVICE", "reference")
    run = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True)
    assert run.stdout == "reference\n", run.stderr


def test_elements_stay_in_the_hosts_memory() -> None:
    x = rnp.zeros(2)
    assert x.to_device("cpu") is x and rnp.asarray(x, device="cpu").device == "cpu"
    with pytest.raises(ValueError, match="no such device"):
        x.to_device("cuda")
    assert x.__array_namespace__(api_version="2025.12") is rnp
    with pytest.raises(ValueError, match="no such version"):
        x.__array_namespace__(api_version="2019.01")


USE = """
import numpy as np
import rlx.numpy as rnp
from rlx import Array

x: Array = rnp.asarray([[1.0, 2.0]])
y = rnp.exp(x) + 2 * x - np.ones(2, np.float32) @ x.mT
z = (y > 0) & ~(y == 3)
first, *rest = rnp.unstack(rnp.where(z, x, 0.0))
total: float = float(rnp.sum(x, axis=(0, 1), keepdims=True).item().real)
w = x.at[0, 1:].add(1).at[rnp.asarray([0])].set(rnp.zeros(2))[..., None, ::-1]
w += rnp.einsum("ij,ij->i", x, x)[0]
v = rnp.reshape(w, (-1,)).astype("float64").sum(axis=0)
u = rnp.concat([rnp.arange(3), rnp.zeros((3,), dtype=rnp.int8)]) << 1
values, counts = rnp.finfo(x.dtype).eps, rnp.count_nonzero(x)
shapes: tuple[int, ...] = rnp.broadcast_shapes((2, 1), x.shape)
"""


def test_type_checkers_know_every_result(tmp_path: Path) -> None:
    """`--disallow-any-expr` finds any expression whose type is not known."""
    source = tmp_path / "use.py"
    source.write_text(USE, "utf-8")
    root = Path(rlx.__file__).resolve().parents[1]
    command = [sys.executable, "-m", "mypy", "--strict", "--disallow-any-expr", str(source)]
    command += ["--follow-imports=silent", "--config-file=", f"--cache-dir={root}/.mypy_cache/use"]
    run = subprocess.run(command, capture_output=True, text=True, cwd=root)
    assert run.returncode == 0, run.stdout + run.stderr
