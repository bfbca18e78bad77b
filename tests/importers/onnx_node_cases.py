"""The conformance cases that the `onnx` package generates: models, operands and results."""

from __future__ import annotations

import warnings
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper
from onnx.backend.test.loader import load_model_tests

KINDS = ("node", "simple", "pytorch-operator", "pytorch-converted")


@cache
def cases() -> list[Any]:
    """All of them, by name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # NumPy's, of the edge cases that are generated
        found = [case for kind in KINDS for case in load_model_tests(kind=kind)]
    return sorted(found, key=lambda case: case.name)  # type: ignore[no-any-return]


def model_of(case: Any) -> Any:
    if case.model is not None:
        return case.model
    return onnx.load(str(Path(case.model_dir) / "model.onnx"))


def sets_of(case: Any, model: Any) -> list[tuple[list[Any], list[Any]]]:
    """Inputs and expected outputs."""
    if case.data_sets is not None:
        return [
            ([_plain(x) for x in given], [_plain(x) for x in made])
            for given, made in case.data_sets
        ]
    return [
        (_read(folder, "input", model.graph.input), _read(folder, "output", model.graph.output))
        for folder in sorted(Path(case.model_dir).glob("test_data_set_*"))
    ]


def _plain(value: Any) -> Any:
    if isinstance(value, onnx.TensorProto):
        return numpy_helper.to_array(value)
    if isinstance(value, onnx.SequenceProto):
        return numpy_helper.to_list(value)
    return np.asarray(value) if isinstance(value, np.generic) else value


def _read(folder: Path, name: str, arguments: Any) -> list[Any]:
    found = []
    for i, argument in enumerate(arguments):
        path = folder / f"{name}_{i}.pb"
        if path.exists():
            kind = argument.type.WhichOneof("value")
            made = {"tensor_type": onnx.TensorProto, "sequence_type": onnx.SequenceProto}[kind]()
            made.ParseFromString(path.read_bytes())
            found.append(_plain(made))
    return found


def require_same(found: Any, expected: Any, case: Any) -> None:
    """Equal within the tolerances of the case."""
    if isinstance(expected, list):
        assert isinstance(found, (list, tuple)) and len(found) == len(expected)
        for a, b in zip(found, expected, strict=True):
            require_same(a, b, case)
        return
    if expected is None:
        assert found is None
        return
    a, b = np.asarray(found), np.asarray(expected)
    assert a.shape == b.shape, (a.shape, b.shape)
    if b.dtype.kind in "OUS":
        assert a.astype(object).tolist() == b.astype(object).tolist()
        return
    assert a.dtype == b.dtype, (a.dtype, b.dtype)
    if b.dtype.kind not in "biufc":  # small floats and integers
        a, b = a.astype(np.float32), b.astype(np.float32)
    np.testing.assert_allclose(a, b, rtol=case.rtol, atol=case.atol)
