"""Running one op of the registry on arrays, its inference checked on the way."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np

import rlx.ir.ops  # noqa: F401  registers the ops
from rlx.ir.dtype import DType
from rlx.ir.node import infer
from rlx.ir.op import Cost, make_op
from rlx.ir.shape import Shape


def run(name: str, *arrays: Any, **attributes: Any) -> Any:
    """The reference on `arrays`; its results have the inferred shapes, and nothing warns."""
    op = make_op(name, attributes)
    inputs = [np.asarray(a) for a in arrays]
    inferred = infer(op, tuple(Shape(a.shape, a.dtype) for a in inputs))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = op.reference(*inputs)
    results = found if isinstance(found, tuple) else (found,)
    for array, shape in zip(results, inferred, strict=True):
        assert isinstance(array, np.ndarray)
        assert (array.shape, array.dtype) == (shape.dims, shape.dtype.numpy)
    return found


def shape_of(name: str, *shapes: Any, **attributes: Any) -> Any:
    """The inferred shape as text, or a list of them."""
    found = infer(make_op(name, attributes), tuple(shape(s) for s in shapes))
    return str(found[0]) if len(found) == 1 else [str(s) for s in found]


def shape(text: Any) -> Shape:
    """A shape written as it prints: `[batch, 4] f32`."""
    if isinstance(text, Shape):
        return text
    dims, _, element = text.rpartition("]")
    return Shape([d for d in dims.strip("[ ").split(",") if d], element.strip() or "f32")


def cost_of(name: str, *shapes: Any, **attributes: Any) -> Cost:
    op = make_op(name, attributes)
    inputs = tuple(shape(s) for s in shapes)
    return op.cost(inputs, infer(op, inputs))


def array(values: Any, element: str = "f32") -> Any:
    return np.array(values, np.float64).astype(DType.of(element).numpy)


def same(found: Any, expected: Any) -> None:
    """Equal elements, NaN with NaN; signs of zeros are not looked at."""
    np.testing.assert_array_equal(
        np.asarray(found).astype(np.result_type(np.float64, np.asarray(expected).dtype)), expected
    )
