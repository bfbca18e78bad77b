"""What `rlx inspect` shows: a model, or IR in a file, with the sizes of a variant.

`--variant decode:1`, `--bind seq=128`, `--bind 'past_seq<=4095'`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rlx.cli.load_model import find_model
from rlx.errors import FormatError, OptionError
from rlx.support.records import dataclass

if TYPE_CHECKING:
    from rlx.ir.binding import DimBinding, Size
    from rlx.ir.module import GraphModule
    from rlx.ir.op import Array
    from rlx.models.model_file import ModelFile


_USUAL_CONTEXT = 4096


@dataclass(frozen=True)
class Subject:
    """A graph, and the model it belongs to, if any."""

    name: str
    module: GraphModule
    model: ModelFile | None = None
    context: int = 0
    params: Mapping[str, Array] | None = None  # of the model

    @property
    def default_variant(self) -> str | None:
        """The variant that is shown unless one is given."""
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
            "neither a model nor IR", where=str(path),
            expected="a GGUF file, a model folder, or IR as text or bytes",
        )  # fmt: skip
    if is_lir(text):
        return GraphModule.from_lir(parse_lir(text, path.name))
    return _module(parse_graph(text, path.name))


def read_text(path: Path) -> str | None:
    """The text of a file; None if it is not UTF-8."""
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
        # built by architecture pages: no source line of the user's
        node.origin = node.origin._replace(file="", line=0)
    return subject


def _language(name: str, model: ModelFile, context: int | None, kv: str) -> Subject:
    from rlx.models.builder import SAMPLE, build_graph

    length = context or min(model.config.context, _USUAL_CONTEXT)
    made = build_graph(model, model.weights(), SAMPLE, context=length, kv=kv)
    return Subject(name, made.module, model, length, made.params)


def _encoder(name: str, model: ModelFile) -> Subject:
    from rlx.models.builder import EntryPoint, build_graph

    encoder = model.config.encoder
    result = "scores" if encoder is not None and encoder.labels else "embedding"
    made = build_graph(model, model.weights(), EntryPoint(result, padded=True))
    return Subject(name, made.module, model, model.config.context, made.params)


_VARIANT = re.compile(r"(prefill|decode|encoder|inference)(?::(\d+)(?:x(\d+))?)?")
_BIND = re.compile(r"(\w+)\s*(=|<=)\s*(\d+)")


def parse_variant(text: str, context: int, chunk: int) -> dict[str, Size]:
    """`PHASE[:BATCH[xSEQ]]` as sizes of batch, seq and past_seq.

    Without SEQ a prefill takes up to `chunk` tokens at once and a decode one; the past is as long
    as the context allows. A prefill of SEQ tokens has none before it.
    """
    from rlx.ir.binding import UpTo

    phase, batch, seq = split_variant(text)
    past = UpTo(max(context - 1, 1))
    if phase == "decode":
        return {"batch": batch, "seq": seq or 1, "past_seq": past}
    if seq:
        return {"batch": batch, "seq": seq, "past_seq": 0}
    return {"batch": batch, "seq": UpTo(min(chunk, context)), "past_seq": past}


def split_variant(text: str) -> tuple[str, int, int]:
    """Phase, batch, and tokens or 0 where they are left out."""
    match = _VARIANT.fullmatch(text)
    if match is None or match[2] == "0" or match[3] == "0":
        raise OptionError(
            "not a variant", where="--variant", got=repr(text),
            expected="PHASE:BATCH or PHASE:BATCHxSEQ, such as decode:1 or prefill:1x128",
        )  # fmt: skip
    return match[1], int(match[2] or 1), int(match[3] or 0)


def parse_bindings(texts: Iterable[str]) -> dict[str, Size]:
    """`NAME=SIZE` and `NAME<=BOUND`, the latter dynamic with a bound."""
    from rlx.ir.binding import UpTo

    found: dict[str, Size] = {}
    for text in texts:
        match = _BIND.fullmatch(text.strip())
        if match is None:
            raise OptionError(
                "not a size", where="--bind", got=repr(text), expected="NAME=SIZE or NAME<=BOUND"
            )
        found[match[1]] = int(match[3]) if match[2] == "=" else UpTo(int(match[3]))
    return found


def binding_for(subject: Subject, variant: str | None, bindings: Iterable[str]) -> DimBinding:
    """The binding of the symbols that the graph has."""
    from rlx.ir.binding import DimBinding
    from rlx.ir.dim import DERIVED
    from rlx.models.decoder_runner import CHUNK

    sizes: dict[str, Size] = {}
    asked_for = variant or subject.default_variant
    if asked_for is not None:
        sizes = parse_variant(asked_for, subject.context or 4096, CHUNK)
    if subject.generates and sizes["batch"] != 1:
        raise OptionError(
            "the model runs one sequence at a time", where="--variant", got=variant,
            expected="a batch of 1",
        )  # fmt: skip
    graph = subject.module.as_hir() or subject.module.as_graph()
    assert graph is not None
    used = {f for s in graph.symbols() for f in (DERIVED[s].symbols if s in DERIVED else {s})}
    asked = parse_bindings(bindings)
    unknown = sorted(asked.keys() - used)
    if unknown:
        raise OptionError(
            "no such symbol", where="--bind", got=", ".join(unknown),
            expected=", ".join(sorted(used)) or "none: all sizes are fixed",
        )  # fmt: skip
    return DimBinding({s: size for s, size in (sizes | asked).items() if s in used})


def parameters(model: ModelFile) -> int:
    """The number of parameters."""
    return sum(math.prod(info.shape) for info in model.file.tensors.values())


def weight_types(model: ModelFile) -> dict[str, int]:
    """Bytes of weights by quant scheme or dtype, the largest first."""
    found: dict[str, int] = {}
    for info in model.file.tensors.values():
        kind = info.scheme.name if info.scheme is not None else info.dtype.name
        found[kind] = found.get(kind, 0) + info.nbytes
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def bytes_per_run(model: ModelFile) -> int:
    """Weight bytes that a token reads: of experts only the routed ones, of embeddings only rows."""
    total = sum(info.nbytes for info in model.file.tensors.values())
    experts = model.config.experts
    if experts is not None:
        named = ((n, t.nbytes) for n, t in model.file.tensors.items())
        routed = sum(size for n, size in named if "_exps." in n or ".experts." in n)
        total -= routed - routed * experts.active // experts.count
    weights = model.weights()
    tied = not model.is_encoder and "output.weight" not in weights
    if tied:  # the embedding table is the output matrix too
        return total
    return total - int(weights.get("token_embd.weight").array.nbytes)
