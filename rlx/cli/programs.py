"""What `rlx inspect` looks at: a model, or a program in a file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rlx.cli.opening import find_model
from rlx.errors import FormatError
from rlx.records import dataclass

if TYPE_CHECKING:
    from rlx.ir.module import GraphModule
    from rlx.ir.op import Array
    from rlx.models.model_file import ModelFile

_USUAL_CONTEXT = 4096


@dataclass(frozen=True)
class Subject:
    """A program, and the model it came from where it came from one."""

    name: str
    module: GraphModule
    model: ModelFile | None = None
    context: int = 0
    params: Mapping[str, Array] | None = None  # of the model

    @property
    def usual_variant(self) -> str | None:
        """What is shown where nothing else is asked for."""
        if self.model is None:
            return None
        return "decode:1" if self.generates else "encoder:1"

    @property
    def generates(self) -> bool:
        return self.model is not None and not self.model.is_encoder


def open_subject(name: str, context: int | None, kv: str) -> Subject:
    """A model by name or path, or a file that `rlx inspect -o` or `rlx.ir.serial` wrote."""
    path = Path(name).expanduser()
    if path.is_file() and not _is_model(path):
        return Subject(name, read_program(path))
    return _model_subject(name, context, kv)


def _is_model(path: Path) -> bool:
    with open(path, "rb") as file:
        return file.read(4) == b"GGUF" or path.suffix in (".gguf", ".safetensors", ".json")


def read_program(path: Path) -> GraphModule:
    """IR in a file, as text or bytes."""
    from rlx.ir import serial
    from rlx.ir.lir import Lir
    from rlx.ir.module import GraphModule
    from rlx.ir.text import is_lir, parse_graph, parse_lir

    data = path.read_bytes()
    if data.startswith(serial.MAGIC):
        held = serial.from_bytes(data, str(path))
        if isinstance(held, GraphModule):
            return held
        return GraphModule.from_lir(held) if isinstance(held, Lir) else _module(held)
    text = read_text(path)
    if text is None:
        raise FormatError(
            "neither a model nor a program", where=str(path),
            expected="a GGUF file, a model folder, or IR as text or bytes",
        )  # fmt: skip
    if is_lir(text):
        return GraphModule.from_lir(parse_lir(text, path.name))
    return _module(parse_graph(text, path.name))


def read_text(path: Path) -> str | None:
    """What a file says; None where it is no text."""
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError:
        return None


def _module(graph: object) -> GraphModule:
    from rlx.ir.graph import Graph
    from rlx.ir.module import GraphModule

    assert isinstance(graph, Graph)
    if any(node.op.is_block for node in graph.nodes):
        return GraphModule.from_hir(graph)
    return GraphModule.from_mir(graph)


def _model_subject(name: str, context: int | None, kv: str) -> Subject:
    from rlx.models.model_file import ModelFile

    model = ModelFile.open(find_model(name))
    subject = _encoder(name, model) if model.is_encoder else _language(name, model, context, kv)
    hir = subject.module.as_hir()
    for node in hir.nodes if hir is not None else ():
        # they were built by a program, not on a line of somebody's
        node.origin = node.origin._replace(file="", line=0)
    return subject


def _language(name: str, model: ModelFile, context: int | None, kv: str) -> Subject:
    from rlx.models.build_graph import SAMPLE, build_graph

    length = context or min(model.config.context, _USUAL_CONTEXT)
    made = build_graph(model, model.weights(), SAMPLE, context=length, kv=kv)
    return Subject(name, made.module, model, length, made.params)


def _encoder(name: str, model: ModelFile) -> Subject:
    from rlx.models.build_graph import EntryPoint, build_graph

    encoder = model.config.encoder
    result = "scores" if encoder is not None and encoder.labels else "embedding"
    made = build_graph(model, model.weights(), EntryPoint(result, padded=True))
    return Subject(name, made.module, model, model.config.context, made.params)
