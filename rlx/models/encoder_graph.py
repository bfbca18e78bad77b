"""An encoder's file becomes one symbolic description: ids in, vectors or scores out."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import ModuleType

from rlx.errors import FormatError
from rlx.formats import open_model, tokenizer_of
from rlx.formats.gguf import GgufFile
from rlx.formats.hf import HfFolder
from rlx.formats.safetensors import SafetensorsFile
from rlx.formats.tokenizer import Tokenizer
from rlx.ir.dtype import DType
from rlx.ir.module import GraphModule
from rlx.ir.op import Array
from rlx.models import pooling as pool
from rlx.models import sentence_config as sentence
from rlx.models.arch import encoder_architecture
from rlx.models.config_encoders import GGUF_TYPES, HF_TYPES, EncoderConfig, from_gguf, from_hf
from rlx.models.encoder_builder import EncoderNet, Tensor
from rlx.models.weights import Names, Weights
from rlx.records import dataclass

# by which the names that a folder uses are known
_PROBES = ("token_embd.weight", "token_embd_norm.weight")


def is_encoder(file: GgufFile | HfFolder) -> bool:
    """Whether a model file describes an encoder."""
    if isinstance(file, GgufFile):
        kind, known = file.metadata.get("general.architecture"), GGUF_TYPES
    else:
        kind, known = file.config.get("model_type"), HF_TYPES
    return isinstance(kind, str) and kind in known


@dataclass
class EncoderFile:
    """An opened encoder: its numbers, weights, tokenizer, and what follows it."""

    path: Path
    file: GgufFile | HfFolder
    config: EncoderConfig
    sentence: sentence.SentenceConfig
    arch: ModuleType

    @staticmethod
    def open(path: Path) -> EncoderFile:
        return EncoderFile.of(path, open_model(path))

    @staticmethod
    def of(path: Path, file: GgufFile | HfFolder) -> EncoderFile:
        config = from_gguf(file) if isinstance(file, GgufFile) else from_hf(file)
        arch = encoder_architecture(config.arch)
        place = path if path.is_dir() else path.parent
        return EncoderFile(path, file, config, sentence.read(file, place), arch)

    def weights(self, dtype: str | None = None) -> Weights:
        """The weights, matrices of layers kept as `dtype`."""
        names = {} if isinstance(self.file, GgufFile) else self._names(self.file)
        return Weights(self.file, names, element=None if dtype is None else DType.of(dtype))

    def _names(self, file: HfFolder) -> Names:
        """The names in this folder: with or without a prefix, new or old."""
        arch = self.arch
        for body in (arch.BODY, getattr(arch, "FIRST_BODY", {})):
            for prefix in arch.PREFIXES:
                found = {ours: prefix + theirs for ours, theirs in body.items()} | arch.HEAD
                for names in (found, {ours: _old(theirs) for ours, theirs in found.items()}):
                    if all(names.get(probe) in file.tensors for probe in _PROBES):
                        return names
        raise FormatError(
            "no weights of this architecture", where=file.name,
            got=", ".join(list(file.tensors)[:3]) or "no tensors",
            expected=", ".join(arch.BODY[probe] for probe in _PROBES),
        )  # fmt: skip

    def steps(self) -> list[Weights | None]:
        """The weights of what follows pooling, where it has any."""
        return [_opened(step.weights) for step in self.sentence.steps]

    @property
    def files(self) -> list[Path]:
        """All files that hold weights."""
        return [*self.file.files, *(s.weights for s in self.sentence.steps if s.weights)]

    def tokenizer(self) -> Tokenizer:
        return tokenizer_of(self.file)


def _opened(path: Path | None) -> Weights | None:
    return None if path is None else Weights(SafetensorsFile(path))  # type: ignore[arg-type]


def _old(name: str) -> str:
    """Layer norms as TensorFlow named them."""
    if "LayerNorm" not in name:
        return name
    return name.replace(".weight", ".gamma").replace(".bias", ".beta")


@dataclass
class Described:
    """The graph of a use of the model, and the arrays of its parameters."""

    module: GraphModule
    params: dict[str, Array]


@dataclass(frozen=True)
class Use:
    """What a graph gives ("embedding", "scores" or "hidden"), and what it is told: whether texts
    are padded, and whether tokens are of several kinds."""

    result: str = "embedding"
    padded: bool = True
    typed: bool = False

    @property
    def name(self) -> str:
        return self.result + "-padded" * self.padded + "-typed" * self.typed


def describe(model: EncoderFile, weights: Weights, use: Use) -> Described:
    """The model for one use; sizes of batch and sequence stay open."""
    nets: list[EncoderNet] = []

    def build(g: GraphModule) -> dict[str, Tensor]:
        ids = g.input("ids", ["batch", "seq"], "i32")
        lengths = g.input("lengths", ["batch"], "i32") if use.padded else None
        types = g.input("types", ["batch", "seq"], "i32") if use.typed else None
        net = EncoderNet(g, model.config, weights, lengths)
        nets.append(net)
        net.real(ids)
        return {use.result: _result(net, model, _body(net, model, ids, types), use.result)}

    module = GraphModule.define(model.config.arch, build)
    return Described(module, nets[0].params)


def _body(net: EncoderNet, model: EncoderFile, ids: Tensor, types: Tensor | None) -> Tensor:
    x = model.arch.embed(net, ids, types)
    for i in range(model.config.layers):
        x = net.g.named(f"blk.{i}", partial(_layer, net, model, x, i))
    return model.arch.finish(net, x)


def _layer(net: EncoderNet, model: EncoderFile, x: Tensor, i: int, _: object) -> Tensor:
    return model.arch.layer(net, x, i)


def _result(net: EncoderNet, model: EncoderFile, x: Tensor, result: str) -> Tensor:
    if result == "hidden":
        return x
    if result == "scores":
        return pool.classify(net, x)
    return pool.embedding(net, x, model.sentence, model.steps())
