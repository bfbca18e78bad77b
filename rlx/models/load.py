"""`rlx.load`: a model of any kind from a file, a folder, or a name."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlx.backends.registry import Device
from rlx.errors import OptionError
from rlx.formats import open_model
from rlx.formats.fetch import resolve
from rlx.models.arguments import check_paths, check_progress
from rlx.models.bundle import ModelBundle
from rlx.models.config import KVCacheType
from rlx.models.encoder_model import EncoderModel
from rlx.models.model_file import ModelFile, is_encoder
from rlx.support.progress import Progress, silent

if TYPE_CHECKING:
    from rlx.models.language_model import LanguageModel
    from rlx.onnx.onnx_model import OnnxModel


def load(
    path_or_name: str | os.PathLike[str] = "smollm2-135m",
    *,
    device: str = "cpu",
    context: int | None = None,
    threads: int | None = None,
    kv: str = "f16",
    dtype: str | None = None,
    quant: str | None = None,
    strassen: bool = False,
    batch_invariant: bool = False,
    artifact: str | os.PathLike[str] | None = None,
    draft: str | os.PathLike[str] | None = None,
    adapters: Sequence[str | os.PathLike[str]] = (),
    merge: bool = False,
    warm: bool = False,
    progress: Progress | None = None,
) -> LanguageModel | EncoderModel | OnnxModel:
    """A language model or an encoder from a GGUF file, a Hugging Face folder, or the catalogue; or
    any model in an ONNX file, with `device` and `threads`.

    `context` limits the tokens of a sequence: what the model was trained for, or 4096 if that is
    less, unless given. `kv` is the element type of the KV cache. `quant` ("int8", "Q4_K_M", …)
    quantises float weights, `dtype` ("bf16", "f16") is what an encoder's are cast to. `strassen`
    lets an encoder multiply f32 matrices by Strassen's algorithm: faster, but then a text's vector
    depends on those beside it. With `batch_invariant` prompts have the same bits in any chunks on
    GPUs too. `artifact` is a bundle that `rlx compile` made of this model: then nothing is compiled
    here. It is code. `draft` is a smaller model of the same vocabulary, for speculative decoding.
    `adapters` are LoRA adapters, chosen by name in each call, or with `merge` added to the weights.
    `warm` compiles now; otherwise the first token does, or the first text of some length.
    `progress(stage, done, total)` is called meanwhile: "download" and "unpack" (bytes), and
    whenever code is made, "packing weights" (bytes) and "compiling kernels" (their number).
    """
    check_paths(adapters, artifact=artifact, draft=draft)
    check_progress(progress)
    Device.of(device)  # an unknown one is an error now, not with the first token
    path = resolve(path_or_name, progress=progress or silent)
    if is_onnx(path):
        texts = (context, kv != "f16", dtype, quant, strassen, artifact, draft, adapters, merge)
        return _open_onnx(path, device, threads, (*texts, batch_invariant))
    file = open_model(path)
    bundle = None if artifact is None else ModelBundle.open(Path(artifact))
    loaded: LanguageModel | EncoderModel
    if is_encoder(file):
        given = {"kv": None if kv == "f16" else kv, "draft": draft, "adapters": adapters}
        others = {"merge": merge, "batch_invariant": batch_invariant}
        _refuse({**given, **others}, "for language models only")
        model = ModelFile.of(path, file)
        loaded = _encoder(model, device, context, threads, dtype, quant, strassen, bundle)
    else:
        _refuse({"dtype": dtype, "strassen": strassen}, "for encoders only")
        smaller = None if draft is None else _draft(draft, device, context, threads, kv, progress)
        loaded = _language(
            path, file, device=device, context=context, threads=threads, kv=kv, quant=quant,
            bundle=bundle, draft=smaller, adapters=adapters, merge=merge, invariant=batch_invariant,
        )  # fmt: skip
    loaded.runner.progress = progress
    if warm:
        loaded.warm()
    return loaded


def is_onnx(path: str | os.PathLike[str]) -> bool:
    """Whether a path is that of an ONNX file."""
    return os.fspath(path).endswith(".onnx")


def load_text_model(
    path_or_name: str | os.PathLike[str], **options: Any
) -> LanguageModel | EncoderModel:
    """`load` of what reads text: not of an ONNX file."""
    path = resolve(path_or_name, progress=options.get("progress") or silent)
    if is_onnx(path):
        raise OptionError(
            "not a model of text",
            where="model",
            got=os.fspath(path_or_name),
            expected="a GGUF file, a Hugging Face folder, or a name",
            hint="rlx.load runs ONNX files",
        )
    found: Any = load(path, **options)
    return found  # type: ignore[no-any-return]


def _open_onnx(
    path: str | os.PathLike[str], device: str, threads: int | None, others: tuple[Any, ...]
) -> OnnxModel:
    if any(others):
        raise OptionError(
            "an option that an ONNX file does not have", where=os.fspath(path),
            expected="device, threads",
        )  # fmt: skip
    from rlx.onnx.onnx_model import OnnxModel

    return OnnxModel(path, device=device, threads=threads)


def _refuse(options: dict[str, Any], why: str) -> None:
    for name, given in options.items():
        if given:
            raise OptionError(why, where=name, got=given)


def _draft(
    path: str | os.PathLike[str], device: str, context: int | None, threads: int | None, kv: str,
    progress: Progress | None,
) -> LanguageModel:  # fmt: skip
    found = load_text_model(
        path, device=device, context=context, threads=threads, kv=kv, progress=progress
    )
    if isinstance(found, EncoderModel):
        raise OptionError("not a language model", where="draft", got=str(path))
    return found


def _language(
    path: Path,
    file: Any,
    *,
    device: str,
    context: int | None,
    threads: int | None,
    kv: str,
    quant: str | None,
    bundle: ModelBundle | None,
    draft: LanguageModel | None,
    adapters: Sequence[str | os.PathLike[str]],
    merge: bool,
    invariant: bool,
) -> LanguageModel:
    # late: an encoder starts without all of this
    from rlx.models.adapter_files import open_adapter
    from rlx.models.decoder_runner import CHUNK, DecoderRunner
    from rlx.models.language_model import LanguageModel

    chunk = CHUNK
    if bundle is not None:
        _refuse({"merge": merge}, "an artifact has weights of its own")
        _refuse({"batch_invariant": invariant}, "an artifact has code of its own")
        bundle.require_kind("language")
        context, chunk = bundle.setting("context", context), bundle.setting("chunk", None)
        kv = bundle.setting("kv", None if kv == "f16" else kv)  # f16 is also what nobody asked for
        quant = bundle.setting("quant", quant)
    model = ModelFile.of(path, file, quant)
    if merge:
        model.merged = tuple(open_adapter(adapter, model) for adapter in adapters)
    KVCacheType.of(kv, model.config.head_dim)  # an error now, not with the first token
    runner = DecoderRunner(
        model, device=device, context=context, kv=kv, threads=threads, chunk=chunk, bundle=bundle,
        batch_invariant=invariant,
    )  # fmt: skip
    made = LanguageModel(model, runner, draft)
    for adapter in () if merge else adapters:
        made.load_adapter(adapter)
    return made


def _encoder(
    model: ModelFile, device: str, context: int | None, threads: int | None, dtype: str | None,
    quant: str | None, strassen: bool, bundle: ModelBundle | None,
) -> EncoderModel:  # fmt: skip
    if bundle is not None:
        _refuse({"strassen": strassen}, "an artifact has code of its own")
        bundle.require_kind("encoder")
        context = bundle.setting("context", context)
        dtype, quant = bundle.setting("dtype", dtype), bundle.setting("quant", quant)
    return EncoderModel(
        model, device=device, context=context, threads=threads, dtype=dtype, quant=quant,
        strassen=strassen, bundle=bundle,
    )  # fmt: skip
