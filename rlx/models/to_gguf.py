"""Quantises a model into a GGUF file. A Hugging Face folder becomes one first: names, metadata, and
the few weights that are stored differently."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from rlx.errors import FormatError, UnsupportedError
from rlx.formats import open_model
from rlx.formats.gguf import GgufFile
from rlx.formats.gguf.quantized import (
    QuantizeOptions,
    SourceTensor,
    WrittenTensor,
    quantize_gguf,
    write_quantized,
)
from rlx.formats.hf import HfFolder
from rlx.formats.imatrix import ImportanceMatrix
from rlx.formats.quant_presets import QuantPreset
from rlx.formats.tensor_file import scheme_of
from rlx.formats.tokenizer.to_gguf_vocabulary import tokenizer_metadata
from rlx.ir.dtype import DType, f32
from rlx.ir.op import Array
from rlx.ir.quant.scheme import GGUF_SCHEMES
from rlx.models.config import ModelConfig
from rlx.models.model_file import Changes, ModelFile, is_encoder
from rlx.models.rope_tables import frequency_factors, pairs_together
from rlx.models.sampling import sampling_metadata
from rlx.models.weights import Weight
from rlx.runtime.params import Deferred
from rlx.support.files import require_other_file
from rlx.support.machine import worker_count
from rlx.support.progress import Progress, silent

# model_type → general.architecture
_WRITTEN = {
    "gemma2": "gemma2",
    "gemma3": "gemma3",
    "gpt2": "gpt2",
    "llama": "llama",
    "mistral": "llama",
    "phi3": "phi3",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
}
_REORDERED = ("attn_q.weight", "attn_k.weight", "attn_q.bias", "attn_k.bias")
_FREQUENCIES = "rope_freqs.weight"


def quantize_model(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    preset: QuantPreset | str,
    *,
    threads: int | None = None,
    requantize: bool = False,
    overwrite: bool = False,
    imatrix: ImportanceMatrix | str | os.PathLike[str] | None = None,
    progress: Progress = silent,
) -> list[WrittenTensor]:
    """Quantise the model at `path` into the GGUF file `out`. Returns what became of each tensor.

    `imatrix`, from `calibrate` or a file, weighs the errors of weights by what they are multiplied
    with; types below 2.4 bits need one.
    """
    preset = QuantPreset.parse(preset) if isinstance(preset, str) else preset
    if isinstance(imatrix, str | os.PathLike):
        require_other_file(Path(out), Path(imatrix))
        imatrix = ImportanceMatrix.read(imatrix)
    options = QuantizeOptions(
        preset, worker_count(threads), requantize, overwrite, progress, imatrix
    )
    with open_model(Path(path)) as file:
        require_other_file(Path(out), file.path, *file.files)
        if isinstance(file, GgufFile):
            return quantize_gguf(file, out, options)
        if is_encoder(file):
            raise UnsupportedError(
                "an encoder is not written as GGUF here", where=file.name,
                hint="rlx.load(..., quant=) packs its weights",
            )  # fmt: skip
    model = ModelFile.open(file.path)
    metadata, sources = gguf_of(model)
    return write_quantized(out, metadata, sources, options, model.file.name)


def gguf_of(
    model: ModelFile, changes: Changes | None = None
) -> tuple[dict[str, Any], dict[str, SourceTensor]]:
    """Metadata and tensors of a GGUF file equal to the folder, but for `changes` of weights."""
    assert isinstance(model.file, HfFolder)
    arch = _WRITTEN.get(model.config.arch)
    if arch is None or model.config.rope.scaling == "longrope":
        what = "rope scaling" if arch else "an architecture"
        raise UnsupportedError(
            f"{what} that is not written as GGUF here", where=model.file.name,
            got=model.config.rope.scaling if arch else model.config.arch,
            expected="none, linear, llama3, yarn" if arch else ", ".join(_WRITTEN),
            hint="a GGUF file of the model can be quantised",
        )  # fmt: skip
    _require_sayable(model)
    metadata = {"general.architecture": arch, "general.name": model.path.resolve().name}
    metadata |= {f"{arch}.{key}": value for key, value in _numbers(model.config)}
    metadata |= tokenizer_metadata(model.file, model.config.vocab) | sampling_metadata(model)
    return metadata, _sources(model, arch, changes)


def _require_sayable(model: ModelFile) -> None:
    """Raise for settings that no key of the file tells: readers would take their own."""
    c, usual = model.config, model.arch
    asked = replace(
        c, activation="silu", window_layers=None, local_rope=None, deeper_is_flatter=False,
        attention_scale=None if c.arch == "gpt2" else c.attention_scale,
    )  # fmt: skip
    read: ModelConfig = usual.configure(asked) if hasattr(usual, "configure") else asked
    names = ["activation", "local_rope", "attention_scale", "deeper_is_flatter"]
    names += ["window_layers"] if c.sliding_window else []
    for name in names:
        if getattr(c, name) != getattr(read, name):
            raise UnsupportedError(
                f"{name} that a GGUF file cannot tell", where=model.file.name,
                got=getattr(c, name), expected=getattr(read, name),
            )  # fmt: skip
    if c.rope.scaling == "proportional" or not c.rope.whole_steps:
        raise UnsupportedError(
            "rope scaling that a GGUF file cannot tell", where=model.file.name,
            got=c.rope.scaling, hint="truncate=false and proportional have no key",
        )  # fmt: skip


def _numbers(c: ModelConfig) -> Iterator[tuple[str, Any]]:
    yield "block_count", c.layers
    yield "context_length", c.context
    yield "embedding_length", c.hidden
    yield "feed_forward_length", c.ffn
    yield "vocab_size", c.vocab
    yield "attention.head_count", c.heads
    yield "attention.head_count_kv", c.kv_heads
    if c.arch == "gpt2":
        yield "attention.layer_norm_epsilon", c.eps
        return
    yield "attention.layer_norm_rms_epsilon", c.eps
    yield "attention.key_length", c.head_dim
    yield "attention.value_length", c.head_dim
    if c.sliding_window:
        yield "attention.sliding_window", c.sliding_window
    if c.attention_softcap:
        yield "attn_logit_softcapping", c.attention_softcap
    if c.final_softcap:
        yield "final_logit_softcapping", c.final_softcap
    if c.attention_scale not in (None, c.head_dim**-0.5):
        yield "attention.scale", c.attention_scale
    rope = c.rope
    yield "rope.freq_base", rope.theta
    yield "rope.dimension_count", rope.n_rot or c.head_dim
    if rope.scaling in ("linear", "yarn"):
        yield "rope.scaling.type", rope.scaling
        yield "rope.scaling.factor", rope.factor
        yield "rope.scaling.original_context_length", rope.original_context
        if rope.scaling == "yarn" and (rope.beta_fast, rope.beta_slow) != (32.0, 1.0):
            yield "rope.scaling.yarn_beta_fast", rope.beta_fast
            yield "rope.scaling.yarn_beta_slow", rope.beta_slow
        usual = 0.1 * math.log(max(rope.factor, 1.0)) + 1.0
        if rope.attention_factor and not math.isclose(rope.attention_factor, usual):
            yield "rope.scaling.attn_factor", rope.attention_factor


def _sources(model: ModelFile, arch: str, changes: Changes | None) -> dict[str, SourceTensor]:
    weights, found = model.weights(changes=changes), {}
    for pattern in model.arch.HF_NAMES:
        layers = range(model.config.layers) if "{i}" in pattern else (0,)
        for name in (pattern.replace("{i}", str(i)) for i in layers):
            if name in weights:
                found[name] = _source(weights.get(name), _change(name, model.config, arch))
    if "token_embd.weight" not in found:
        raise FormatError("no token embedding", where=model.file.name)
    if model.config.rope.scaling == "llama3":
        factors = frequency_factors(model.config.rope, model.config.head_dim).astype(np.float32)
        found[_FREQUENCIES] = SourceTensor(factors.shape, GGUF_SCHEMES["F32"], lambda: factors)
    return found


def _source(weight: Weight, change: Callable[[Array], Array] | None) -> SourceTensor:
    """Vectors and position tables are f32 in GGUF."""
    wide = len(weight.shape) < 2 or weight.name == "position_embd.weight"
    dtype = f32 if wide else DType.of(weight.array.dtype)
    scheme = scheme_of(dtype)
    if scheme is None:
        raise UnsupportedError(
            "a weight that is no float", where=weight.name, got=dtype, expected="f32, f16 or bf16"
        )

    def read() -> Array:
        stored = weight.array.make() if isinstance(weight.array, Deferred) else weight.array
        array = stored.astype(np.float32) if wide else stored
        return np.ascontiguousarray(array if change is None else change(array))

    return SourceTensor(weight.shape, scheme, read)


def _change(name: str, c: ModelConfig, arch: str) -> Callable[[Array], Array] | None:
    """The function from the folder's tensor to GGUF's, where they differ."""
    if c.norm_offset and name.endswith("norm.weight"):
        return partial(np.add, np.float32(c.norm_offset))
    if arch == "llama" and name.endswith(_REORDERED):
        return partial(pairs_together, heads=c.heads if "attn_q" in name else c.kv_heads)
    return None
