"""Operators by group; importing this registers all of them."""

from importlib import import_module

_GROUPS = (
    "arithmetic",
    "flex_attention",
    "branches_and_loops",
    "cached_attention",
    "casts",
    "comparisons",
    "constants",
    "convolution",
    "features",
    "folds",
    "fused_layers",
    "gather_scatter",
    "integer_products",
    "layout",
    "linear_models",
    "matrix_products",
    "normalization",
    "pooling",
    "quantization",
    "quantized_layers",
    "random_values",
    "recurrent",
    "regions",
    "resizing",
    "sequence_values",
    "shape_values",
    "signals",
    "text",
    "training",
    "trees",
)

for _group in _GROUPS:
    import_module(f"rlx.onnx.ops.{_group}")
