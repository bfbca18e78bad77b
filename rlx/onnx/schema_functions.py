"""Operators that the `onnx` package defines as functions of others: their bodies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlx.errors import UnsupportedError
from rlx.formats.onnx import NUMPY_TYPES, Initializer, OnnxFunction, OnnxNode, function_of, protobuf
from rlx.onnx.values import Known, type_of
from rlx.support.optional import library

_NUMBERS = {dtype: number for number, dtype in NUMPY_TYPES.items()}
_bodies: dict[Any, OnnxFunction | None] = {}


def schema_of(domain: str, name: str, opset: int) -> Any:
    """The package's schema of an operator, or None."""
    protobuf()
    defs = library("onnx.defs", "reading ONNX files")
    try:
        return defs.get_schema(name, opset, domain)
    except Exception:  # the package's own error class differs between its versions
        return None


def has_body(node: OnnxNode, opset: int) -> bool:
    """Whether the package defines the operator as a function."""
    schema = schema_of(node.domain, node.op_type, opset)
    return schema is not None and (schema.has_function or schema.has_context_dependent_function)


def body_of(
    node: OnnxNode, attributes: Mapping[str, Any], operands: Sequence[Any], opset: int
) -> OnnxFunction:
    """The function that an operator is, for operands of these types."""
    schema = schema_of(node.domain, node.op_type, opset)
    made = None if schema is None else _made(schema, node, attributes, operands, opset)
    if made is None:
        raise UnsupportedError(
            "no such operator", where=str(node), got=f"opset {opset}",
            hint="docs/onnx.md says how to add one",
        )  # fmt: skip
    return made


def _made(
    schema: Any, node: OnnxNode, attributes: Mapping[str, Any], operands: Sequence[Any], opset: int
) -> OnnxFunction | None:
    if schema.has_function:
        key = (node.domain, node.op_type, opset)
        if key not in _bodies:
            _bodies[key] = function_of(_fitting(schema, opset))
        return _bodies[key]
    if not schema.has_context_dependent_function:
        return None
    versions = [v for v in schema.context_dependent_function_opset_versions if v <= opset]
    onnx = protobuf()
    types = [_type_proto(onnx, x).SerializeToString() for x in operands]
    proto = _node_proto(onnx, node, attributes).SerializeToString()
    version = max(versions, default=schema.since_version)
    data = schema.get_context_dependent_function_with_opset_version(version, proto, types)
    return function_of(onnx.FunctionProto.FromString(data))


def _fitting(schema: Any, opset: int) -> Any:
    versions = [v for v in schema.function_opset_versions if v <= opset]
    if not versions:
        return schema.function_body
    onnx = protobuf()
    return onnx.FunctionProto.FromString(schema.get_function_with_opset_version(max(versions)))


def _type_proto(onnx: Any, value: Any) -> Any:
    made = onnx.TypeProto()
    if value is None:
        return made
    if isinstance(value, list):
        element = type_of(value[0]) if value else None
        made.sequence_type.elem_type.tensor_type.elem_type = _NUMBERS.get(element, 1)
        return made
    made.tensor_type.elem_type = _NUMBERS[type_of(value)]
    shape = value.data.shape if isinstance(value, Known) else value.shape
    for size in shape:
        dim = made.tensor_type.shape.dim.add()
        if type(size) is int:
            dim.dim_value = size
    return made


def _node_proto(onnx: Any, node: OnnxNode, attributes: Mapping[str, Any]) -> Any:
    plain = {
        k: v for k, v in attributes.items()
        if isinstance(v, (int, float, bytes, str))
        or (isinstance(v, tuple) and v and all(isinstance(x, (int, float, bytes)) for x in v))
    }  # fmt: skip
    made = onnx.helper.make_node(
        node.op_type, node.inputs, node.outputs, domain=node.domain, **plain
    )
    for name, value in attributes.items():
        if isinstance(value, Initializer):
            tensor = onnx.numpy_helper.from_array(value.array())
            made.attribute.append(onnx.helper.make_attribute(name, tensor))
    return made
