"""An opened model: its configuration, weights, tokenizer, and the page of its architecture."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import field
from pathlib import Path
from types import ModuleType

from rlx.errors import FormatError
from rlx.formats import open_model, tokenizer_of
from rlx.formats.gguf import GgufFile
from rlx.formats.hf import HfFolder
from rlx.formats.hf_quant import unquantized
from rlx.formats.quant_presets import QuantPreset
from rlx.formats.safetensors import SafetensorsFile
from rlx.formats.tokenizer import Tokenizer
from rlx.ir.dtype import DType
from rlx.ir.op import Array
from rlx.models.adapters import Adapter, merged
from rlx.models.arch import architecture, encoder_architecture
from rlx.models.config import ModelConfig
from rlx.models.config_gguf import GGUF_ENCODERS, from_gguf
from rlx.models.config_hf import HF_ENCODERS, from_hf
from rlx.models.sentence_config import SentenceConfig, read_sentence_config
from rlx.models.tensor_check import check_folder, check_gguf
from rlx.models.weights import Names, Weights
from rlx.support.records import dataclass

Changes = Mapping[str, Callable[[Array], Array]]  # functions of float weights by name
# weights that every encoder has: they tell which names a folder uses
_PROBES = ("token_embd.weight", "token_embd_norm.weight")


def is_encoder(file: GgufFile | HfFolder) -> bool:
    """Whether a model file describes an encoder."""
    if isinstance(file, GgufFile):
        kind, known = file.metadata.get("general.architecture"), GGUF_ENCODERS
    else:
        kind, known = file.config.get("model_type"), HF_ENCODERS
    return isinstance(kind, str) and kind in known


@dataclass
class ModelFile:
    """A language model or an encoder."""

    path: Path
    file: GgufFile | HfFolder
    config: ModelConfig
    arch: ModuleType
    quant: QuantPreset | None = None  # packs float weights of a language model when it is prepared
    merged: tuple[Adapter, ...] = ()  # added to float weights
    sentence: SentenceConfig = field(default_factory=SentenceConfig)  # pooling of an encoder

    @staticmethod
    def open(path: Path, quant: str | None = None) -> ModelFile:
        return ModelFile.of(path, open_model(path), quant)

    @staticmethod
    def of(path: Path, file: GgufFile | HfFolder, quant: str | None = None) -> ModelFile:
        file = file if isinstance(file, GgufFile) else unquantized(file)
        config = from_gguf(file) if isinstance(file, GgufFile) else from_hf(file)
        if config.encoder is not None:
            sentence = read_sentence_config(file, path if path.is_dir() else path.parent)
            made = ModelFile(
                path, file, config, encoder_architecture(config.arch), sentence=sentence
            )
        else:
            preset = QuantPreset.of(quant) if quant else None
            made = ModelFile(path, file, config, architecture(config.arch, str(path)), preset)
        made.check_tensors()
        return made

    def check_tensors(self) -> None:
        """Raise unless every tensor of the file is used, or known to be harmless."""
        if isinstance(self.file, GgufFile):
            check_gguf(self.file, self.arch, self.config)
        else:
            check_folder(self.file, self.arch, self.names(), self.config)

    @property
    def is_encoder(self) -> bool:
        return self.config.encoder is not None

    @property
    def packing(self) -> tuple[object, ...]:
        """What the packed weights of a language model depend on beside the file."""
        return (self.quant or "as stored", *(adapter.digest for adapter in self.merged))

    def weights(self, dtype: str | None = None, changes: Changes | None = None) -> Weights:
        """The weights; float matrices of layers are cast to `dtype`. `changes` by name go before
        those of merged adapters."""
        return Weights(
            self.file,
            self.names(),
            getattr(self.arch, "HF_TRANSPOSED", ()),
            element=None if dtype is None else DType.of(dtype),
            config=self.config,
            quant=self.quant,
            changes=(merged(self.merged) if self.merged else {}) | dict(changes or {}),
        )

    def names(self) -> Names:
        """Our names of weights → those of the folder's tensors."""
        if isinstance(self.file, GgufFile):
            return {}
        if not self.is_encoder:
            names: Names = self.arch.HF_NAMES
            return names
        return _encoder_names(self.arch, self.file)

    def module_weights(self) -> list[Weights | None]:
        """The weights of the modules after pooling, where they have any."""
        return [
            None if module.weights is None else Weights(SafetensorsFile(module.weights))  # type: ignore[arg-type]
            for module in self.sentence.modules
        ]

    @property
    def weight_files(self) -> list[Path]:
        return [*self.file.files, *(m.weights for m in self.sentence.modules if m.weights)]

    def tokenizer(self) -> Tokenizer:
        return tokenizer_of(self.file)


def _encoder_names(arch: ModuleType, file: HfFolder) -> Names:
    """The names of weights in this folder: with or without a prefix, new or old."""
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


def _old(name: str) -> str:
    """Layer norms as TensorFlow named them."""
    if "LayerNorm" not in name:
        return name
    return name.replace(".weight", ".gamma").replace(".bias", ".beta")
