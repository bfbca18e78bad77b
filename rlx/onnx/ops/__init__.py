"""Operators by group; importing this registers all of them."""

from importlib import import_module

_GROUPS = (
    "arithmetic",
    "branches_and_loops",
    "casts",
    "comparisons",
    "constants",
    "convolution",
    "folds",
    "gather_scatter",
    "layout",
    "matrix_products",
    "normalization",
    "pooling",
    "quantization",
    "random_values",
    "recurrent",
    "regions",
    "resizing",
    "sequence_values",
    "shape_values",
    "signals",
    "text",
    "training",
)

for _group in _GROUPS:
    import_module(f"rlx.onnx.ops.{_group}")
