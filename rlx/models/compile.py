"""`rlx compile`: a bundle of a model's executables, for machines without a compiler."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from rlx.errors import OptionError
from rlx.formats import open_model
from rlx.formats.fetch import resolve
from rlx.models.batch.kv_pool import KVPool
from rlx.models.bundle import BundlePlan, write_bundle
from rlx.models.config import KVCacheType
from rlx.models.decoder_runner import CHUNK, DecoderRunner
from rlx.models.encoder_model import EncoderModel
from rlx.models.encoder_runner import EncoderRunner
from rlx.models.model_file import ModelFile, is_encoder
from rlx.specialize.options import CompileOptions
from rlx.support.files import require_other_file


def compile_model(
    model: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    target: str = "host",
    device: str = "cpu",
    context: int | None = None,
    threads: int | None = None,
    kv: str = "f16",
    quant: str | None = None,
    chunk: int = CHUNK,
    steps: Mapping[int, int] | None = None,
    speculate: int = 0,
    requests: int | None = None,
    cache_tokens: int | None = None,
    weights: bool = False,
    counted: Callable[[str, int], Callable[[], object]] | None = None,
) -> BundlePlan:
    """Compile a language model or an encoder into a file for `rlx.load(…, artifact=…)`.

    A prompt is prefilled in chunks of `chunk` tokens. `steps` are the buckets of an encoder:
    lengths, each with the most texts of a batch. `speculate` is the number of draft tokens of
    speculative decoding. With `requests` the file also serves `rlx.Engine(…, artifact=…)`, whose
    requests share a KV cache of `cache_tokens`. With `weights` the packed weights go along.
    `counted(what, total)` gives a function that is called after each executable.
    """
    path = resolve(model)
    options = CompileOptions(threads=threads)
    file = open_model(path)
    require_other_file(Path(out), path, *file.files)
    with file:
        if is_encoder(file):
            for name, value in (("speculate", speculate), ("requests", requests)):
                if value:
                    raise OptionError("for language models only", where=name, got=value)
            encoder = _encoder(ModelFile.of(path, file), device, context, threads, quant, steps)
            plan, options = encoder.plan(), encoder.options
        else:
            if steps:
                raise OptionError("for encoders only", where="steps", got=dict(steps))
            opened = ModelFile.of(path, file, quant)
            KVCacheType.of(kv, opened.config.head_dim)
            runner = DecoderRunner(opened, device=device, context=context, kv=kv, chunk=chunk)
            plan = runner.plan(speculate)
            if requests is not None:
                pool = KVPool.of(
                    opened, requests=requests, context=context, cache_tokens=cache_tokens, kv=kv,
                    device=device,
                )  # fmt: skip
                plan = plan.joined(pool.plan(), requests=requests, cache_tokens=pool.slots)
        done = None if counted is None else counted(path.name, plan.count)
        write_bundle(
            Path(out), plan, target=target, device=device, options=options, weights=weights,
            done=done,
        )  # fmt: skip
    return plan


def _encoder(
    model: ModelFile, device: str, context: int | None, threads: int | None, quant: str | None,
    steps: Mapping[int, int] | None,
) -> EncoderRunner:  # fmt: skip
    longest = EncoderModel(model, context=context).max_tokens
    too_long = [bound for bound in steps or () if bound > longest]
    if too_long:
        raise OptionError(
            "longer than the model's texts",
            where="steps",
            got=too_long[0],
            expected=f"1 … {longest}",
        )
    return EncoderRunner(
        model, longest=longest, device=device, threads=threads, quant=quant, steps=steps
    )
