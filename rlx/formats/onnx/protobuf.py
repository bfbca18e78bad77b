"""ONNX files to checked records. The file is untrusted: protobuf's parser bounds what it reads,
names, shapes and nesting are checked here, and nothing is computed."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rlx.errors import FormatError
from rlx.formats.onnx.graphs import (
    Argument,
    OnnxFile,
    OnnxFunction,
    OnnxGraph,
    OnnxNode,
    Reference,
    TensorKind,
)
from rlx.formats.onnx.tensors import (
    MAX_RANK,
    TYPE_NAMES,
    ExternalFiles,
    Initializer,
    text_of,
)
from rlx.support.files import open_regular
from rlx.support.optional import library

MAX_DEPTH = 24  # of subgraphs
MAX_BYTES = 2**31  # protobuf's limit


def protobuf() -> Any:
    """The library that parses files, or an error that says how to install it."""
    return library("onnx", "reading ONNX files")


def open_onnx(model: str | os.PathLike[str] | bytes) -> OnnxFile:
    """The records of a file, or of its bytes."""
    folder: Path | None = None
    name = "model"
    if isinstance(model, bytes):
        data = model
    else:
        path = Path(model)
        name, folder = os.fspath(path), path.parent
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size >= MAX_BYTES:
                raise FormatError(
                    "larger than a protobuf may be", where=name, got=f"{size} bytes",
                    expected=f"less than {MAX_BYTES}", hint="keep the weights in external data",
                )  # fmt: skip
            data = file.read()
    return _Parser(name, ExternalFiles(folder)).model(parse(data, name))


def parse(data: bytes, name: str) -> Any:
    """A ModelProto of bytes."""
    onnx = protobuf()
    model = onnx.ModelProto()
    try:
        model.ParseFromString(data)
    except Exception as error:  # protobuf's implementations raise different ones
        raise FormatError("not an ONNX file", where=name, got=f"{error!s:.200}") from error
    if not model.HasField("graph"):
        raise FormatError("not an ONNX file", where=name, got="no graph")
    return model


def function_of(proto: Any) -> OnnxFunction:
    """The records of a FunctionProto of the onnx package."""
    return _Parser(f"function {proto.name}", ExternalFiles(None)).function(proto)


class _Parser:
    def __init__(self, name: str, files: ExternalFiles) -> None:
        self.name, self.files = name, files

    def fault(self, what: str, got: object = None, **more: Any) -> FormatError:
        shown = None if got is None else f"{got!s:.200}"
        return FormatError(what, where=self.name, got=shown, **more)

    def model(self, proto: Any) -> OnnxFile:
        opsets = self.opsets(proto.opset_import)
        functions: dict[tuple[str, str, str], OnnxFunction] = {}
        for item in proto.functions:
            made = self.function(item)
            key = (made.domain, made.name, made.overload)
            if key in functions:
                raise self.fault("a function is defined twice", made.name)
            functions[key] = made
        self._require_no_cycles(functions)
        graph = self.graph(proto.graph, frozenset(), 0)
        metadata = {text_of(p.key): text_of(p.value) for p in proto.metadata_props}
        producer = f"{text_of(proto.producer_name)} {text_of(proto.producer_version)}".strip()
        return OnnxFile(self.name, graph, opsets, functions, metadata, producer, proto.ir_version)

    def opsets(self, rows: Iterable[Any]) -> dict[str, int]:
        found: dict[str, int] = {}
        for row in rows:
            domain = _domain(row.domain)
            if not 0 < row.version < 2**31:
                raise self.fault("not an opset version", row.version)
            found[domain] = max(row.version, found.get(domain, 0))
        return found or {"": 1}

    def function(self, proto: Any) -> OnnxFunction:
        inputs, outputs = _texts(proto.input), _texts(proto.output)
        if len(set(inputs)) != len(inputs):
            raise self.fault("two inputs of one name", f"function {proto.name}")
        nodes, _ = self.nodes(proto.node, set(inputs), frozenset(), 1)
        defaults = dict(self.attributes(proto.attribute_proto, frozenset(), 1))
        return OnnxFunction(
            text_of(proto.name), _domain(proto.domain), _overload(proto), inputs, outputs,
            nodes, defaults, self.opsets(proto.opset_import),
        )  # fmt: skip

    def _require_no_cycles(self, functions: dict[tuple[str, str, str], OnnxFunction]) -> None:
        state: dict[tuple[str, str, str], int] = {}

        def visit(key: tuple[str, str, str], depth: int) -> None:
            if state.get(key) == 1 or depth > 4 * MAX_DEPTH:
                raise self.fault("functions call each other without an end", key[1])
            if state.get(key) == 2:
                return
            state[key] = 1
            for node in _all_nodes(functions[key].nodes):
                called = (node.domain, node.op_type, node.overload)
                if called in functions:
                    visit(called, depth + 1)
            state[key] = 2

        for key in functions:
            visit(key, 0)

    # -- graphs -------------------------------------------------------------------------------

    def graph(self, proto: Any, around: frozenset[str], depth: int) -> OnnxGraph:
        if depth > MAX_DEPTH:
            raise self.fault("subgraphs nest too deep", depth, expected=f"at most {MAX_DEPTH}")
        if proto.sparse_initializer:
            raise self.fault("sparse tensors are not supported", proto.name)
        initializers: dict[str, Initializer] = {}
        for tensor in proto.initializer:
            name = text_of(tensor.name)
            if not name or name in initializers:
                raise self.fault("an initializer without a name of its own", repr(name))
            initializers[name] = Initializer(tensor, self.files)
        inputs = tuple([self.argument(p) for p in proto.input])
        names = [a.name for a in inputs]
        if len(set(names)) != len(names) or "" in names:
            raise self.fault("two inputs of one name", proto.name)
        local = {*names, *initializers}
        nodes, outer = self.nodes(proto.node, local, around, depth)
        outputs = tuple([self.argument(p) for p in proto.output])
        for node in nodes:
            local.update(node.outputs)
        wanted = [a.name for a in outputs]
        self._require_defined(wanted, local | around, text_of(proto.name))
        outer |= {n for n in wanted if n not in local}
        given = tuple([a for a in inputs if a.name not in initializers])
        types = {a.name: a.type for a in map(self.argument, proto.value_info)}
        return OnnxGraph(
            text_of(proto.name), given if depth == 0 else inputs, outputs, nodes, initializers,
            frozenset(outer), types,
        )  # fmt: skip

    def _require_defined(self, names: Iterable[str], defined: set[str] | frozenset[str],
                         where: str) -> None:  # fmt: skip
        for name in names:
            if name not in defined:
                raise self.fault("an output that nothing computes", f"{name!r} of {where}")

    def nodes(
        self, protos: Sequence[Any], local: set[str], around: frozenset[str], depth: int
    ) -> tuple[tuple[OnnxNode, ...], set[str]]:
        """The nodes, and the names of outer values that they use."""
        defined, outer, nodes = set(local), set[str](), []
        for proto in protos:
            node = self.node(proto, around | defined, depth)
            used = [*node.inputs]
            for body in _bodies(node):
                used += body.outer
            for name in used:
                if name and name not in defined:
                    if name not in around:
                        raise self.fault(
                            "a value is used before it is computed", f"{name!r} in {node}",
                            expected="nodes in topological order",
                        )  # fmt: skip
                    outer.add(name)
            for name in node.outputs:
                if name and name in defined:
                    raise self.fault("a value is computed twice", f"{name!r} by {node}")
                if name:
                    defined.add(name)
            nodes.append(node)
        return tuple(nodes), outer

    def node(self, proto: Any, around: frozenset[str], depth: int) -> OnnxNode:
        return OnnxNode(
            text_of(proto.name), _domain(proto.domain), text_of(proto.op_type), _overload(proto),
            _texts(proto.input), _texts(proto.output),
            dict(self.attributes(proto.attribute, around, depth)),
        )  # fmt: skip

    def attributes(
        self, protos: Iterable[Any], around: frozenset[str], depth: int
    ) -> Iterator[tuple[str, Any]]:
        for proto in protos:
            if proto.ref_attr_name:
                yield text_of(proto.name), Reference(text_of(proto.ref_attr_name))
            else:
                yield text_of(proto.name), self.attribute(proto, around, depth)

    def attribute(self, proto: Any, around: frozenset[str], depth: int) -> Any:
        kind = proto.type
        if kind in _PLAIN:
            return getattr(proto, _PLAIN[kind])
        if kind in _LISTS:
            return tuple(getattr(proto, _LISTS[kind]))
        if kind == 4:
            return Initializer(proto.t, self.files)
        if kind == 9:
            return tuple([Initializer(t, self.files) for t in proto.tensors])
        if kind == 5:
            return self.graph(proto.g, around, depth + 1)
        if kind == 10:
            return tuple([self.graph(g, around, depth + 1) for g in proto.graphs])
        if kind == 13:
            return self.kind(proto.tp)
        raise self.fault("an attribute of an unknown type", f"{proto.name}: {kind}")

    # -- types --------------------------------------------------------------------------------

    def argument(self, proto: Any) -> Argument:
        return Argument(text_of(proto.name), self.kind(proto.type))

    def kind(self, proto: Any, depth: int = 0) -> TensorKind:
        which = proto.WhichOneof("value")
        if which is None or depth > MAX_DEPTH:
            return TensorKind("", "undefined")
        if which in ("tensor_type", "sparse_tensor_type"):
            held = getattr(proto, which)
            dims = None
            if held.HasField("shape"):
                dims = tuple([self.dim(d) for d in held.shape.dim])
                if len(dims) > MAX_RANK:
                    raise self.fault("too many axes", len(dims))
            kind = "tensor" if which == "tensor_type" else "sparse tensor"
            return TensorKind(kind, TYPE_NAMES.get(held.elem_type, "undefined"), dims)
        held = getattr(proto, which)
        if which == "map_type":
            return TensorKind("map", TYPE_NAMES.get(held.key_type, "undefined"))
        inner = self.kind(held.elem_type, depth + 1)
        return TensorKind(which.removesuffix("_type"), inner.dtype)

    def dim(self, proto: Any) -> int | str | None:
        which = proto.WhichOneof("value")
        if which == "dim_param":
            return text_of(proto.dim_param) or None
        if which is None or proto.dim_value < 0:
            return None
        if proto.dim_value >= 2**48:
            raise self.fault("a dimension that cannot be", proto.dim_value)
        return int(proto.dim_value)


_PLAIN = {1: "f", 2: "i", 3: "s"}
_LISTS = {6: "floats", 7: "ints", 8: "strings"}


def _texts(names: Iterable[str | bytes]) -> tuple[str, ...]:
    return tuple([text_of(name) for name in names])


def _overload(proto: Any) -> str:
    return text_of(getattr(proto, "overload", ""))


def _domain(name: str | bytes) -> str:
    return "" if name == "ai.onnx" else text_of(name)


def _bodies(node: OnnxNode) -> list[OnnxGraph]:
    found: list[OnnxGraph] = []
    for value in node.attributes.values():
        items = value if isinstance(value, tuple) else (value,)
        found += [item for item in items if isinstance(item, OnnxGraph)]
    return found


def _all_nodes(nodes: Iterable[OnnxNode]) -> Iterator[OnnxNode]:
    for node in nodes:
        yield node
        for body in _bodies(node):
            yield from _all_nodes(body.nodes)


def bodies_of(node: OnnxNode) -> list[OnnxGraph]:
    """The subgraphs among the attributes of a node."""
    return _bodies(node)


def nodes_of(file: OnnxFile) -> Iterator[OnnxNode]:
    """Every node of a file: subgraphs and functions included."""
    yield from _all_nodes(file.graph.nodes)
    for function in file.functions.values():
        yield from _all_nodes(function.nodes)
