"""Operators by group; importing this registers all of them."""

from importlib import import_module

_GROUPS = (
    "arithmetic",
    "casts",
    "comparisons",
    "constants",
    "convolution",
    "layout",
    "matrix_products",
    "shape_values",
)

for _group in _GROUPS:
    import_module(f"rlx.onnx.ops.{_group}")
