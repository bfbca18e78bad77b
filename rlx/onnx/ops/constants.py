"""Constants, and tensors filled with one value."""

from __future__ import annotations

from typing import Any

import numpy as np

import rlx.numpy as xp
from rlx.formats.onnx import Initializer
from rlx.numpy.array import Array
from rlx.onnx.call import Call
from rlx.onnx.table import op
from rlx.onnx.values import constant_of, is_number_type, shape_of, type_of

MOST_FOLDED = 64  # elements of a filled tensor that is known, such as a shape


@op("Constant", raw=True)
def constant(node: Call) -> Any:
    for name, value in node.attributes.items():
        if isinstance(value, Initializer):
            return constant_of(value)
        if name in ("value_int", "value_ints"):
            return np.array(value, np.int64)
        if name in ("value_float", "value_floats"):
            return np.array(value, np.float32)
        if name in ("value_string", "value_strings"):
            texts = node.texts(name) if isinstance(value, tuple) else node.text(name)
            found = np.empty(len(texts) if isinstance(value, tuple) else (), object)
            found[...] = texts
            return found
    raise node.fault("a constant without a value")


@op("ConstantOfShape", known=(0,))
def constant_of_shape(node: Call, shape: Any) -> Any:
    filled = node.tensor("value", None)
    value = np.zeros(1, np.float32) if filled is None else filled
    sizes = tuple(shape)
    if all(type(n) is not object and isinstance(n, (int, np.integer)) for n in sizes):
        plain = tuple(int(n) for n in sizes)
        if any(n < 0 for n in plain):
            raise node.fault("a negative size", got=list(plain))
        if np.prod(plain, dtype=object) <= MOST_FOLDED or not is_number_type(value.dtype):
            return np.full(plain, value.reshape(-1)[0], value.dtype)
    return xp.full(sizes, Array(value.reshape(())), dtype=value.dtype)


@op("EyeLike", raw=True)
def eye_like(node: Call, x: Any) -> Array:
    dtype = node.dtype("dtype") if node.has("dtype") else xp.asarray(
        np.zeros(0, type_of(x))
    ).dtype  # fmt: skip
    rows, columns = shape_of(x)
    return xp.eye(rows, columns, k=node.int("k", 0), dtype=dtype)
