"""Inputs for a model that has none at hand: drawn arrays of the declared types and sizes."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlx.errors import InputError, UnsupportedError
from rlx.formats.onnx import NUMPY_BY_NAME, Argument
from rlx.onnx.values import Data, is_number_type

USUAL = 1  # the size of a dimension that nobody gave
MOST_ELEMENTS = 2**28


def example_inputs(inputs: Sequence[Argument], sizes: Mapping[str, int]) -> dict[str, Data]:
    """Arrays by name. `sizes` has the dimensions by name, or as "input:axis" where they have
    none."""
    known = {name for a in inputs for name in _names(a)}
    unknown = [name for name in sizes if name not in known]
    if unknown:
        raise InputError(
            "no such dimension", got=", ".join(unknown), expected=", ".join(sorted(known)) or "none"
        )
    return {a.name: _drawn(a, sizes) for a in inputs if a.type.kind != "optional"}


def _names(argument: Argument) -> list[str]:
    return [
        d if isinstance(d, str) else f"{argument.name}:{i}"
        for i, d in enumerate(argument.type.dims or ())
        if not isinstance(d, int)
    ]


def _drawn(argument: Argument, sizes: Mapping[str, int]) -> Data:
    kind = argument.type
    if kind.kind != "tensor" or kind.dims is None:
        raise UnsupportedError(
            "no example of this input", where=argument.name, got=kind, hint="give the inputs"
        )
    shape = []
    for axis, dim in enumerate(kind.dims):
        name = dim if isinstance(dim, str) else f"{argument.name}:{axis}"
        shape.append(dim if isinstance(dim, int) else sizes.get(name, USUAL))
    if any(n < 0 for n in shape) or np.prod(shape, dtype=object) > MOST_ELEMENTS:
        raise InputError("not sizes of an input", where=argument.name, got=shape)
    dtype: np.dtype[Any] = NUMPY_BY_NAME.get(kind.dtype, np.dtype(np.float32))
    if dtype.kind == "O":
        return np.full(shape, "", object)
    if dtype.kind in "fV" and is_number_type(dtype):
        rng = np.random.default_rng(zlib.crc32(argument.name.encode()))
        return rng.standard_normal(shape).astype(dtype)
    return np.ones(shape, dtype)  # an index, a mask, a length
