"""ONNX files as checked records: `open_onnx(path)`."""

from rlx.formats.onnx.graphs import (
    Argument,
    OnnxFile,
    OnnxFunction,
    OnnxGraph,
    OnnxNode,
    Reference,
    TensorKind,
)
from rlx.formats.onnx.protobuf import bodies_of, function_of, nodes_of, open_onnx, protobuf
from rlx.formats.onnx.tensors import NUMPY_BY_NAME, NUMPY_TYPES, TYPE_NAMES, Initializer

__all__ = [
    "NUMPY_BY_NAME",
    "NUMPY_TYPES",
    "TYPE_NAMES",
    "Argument",
    "Initializer",
    "OnnxFile",
    "OnnxFunction",
    "OnnxGraph",
    "OnnxNode",
    "Reference",
    "TensorKind",
    "bodies_of",
    "function_of",
    "nodes_of",
    "open_onnx",
    "protobuf",
]
