"""`rlx compile`: ahead-of-time compilation of a model into one bundle."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from rlx.cli import console
from rlx.cli.load_model import find_model
from rlx.cli.onnx_file import Bind, compile_onnx, is_onnx, open_onnx_file
from rlx.cli.options import Json, Loading, Quant, RequiredModel, spread
from rlx.cli.programs import split_variant
from rlx.errors import OptionError


def _cpus() -> list[str]:
    from rlx.backends.registry import Device

    return Device.of("cpu").backend.inspection().targets()


@spread
def compile_(
    model: RequiredModel,
    *,
    out: Annotated[
        Path,
        typer.Option("--out", "-o", metavar="PATH", help="The file to write, or a folder for it."),
    ],
    variant: Annotated[
        list[str] | None,
        typer.Option(
            "--variant", "-v",
            metavar="PHASE:BATCHxTOKENS",
            help="decode:1, prefill:1x256, encoder:8x128. May be repeated.",
            show_default="the variants that the model uses",
        ),
    ] = None,
    cpu: Annotated[
        str,
        typer.Option(
            "--cpu",
            help="The CPU to compile for: generic, x86-64-v3, …",
            autocompletion=_cpus,
            show_default="this one",
        ),
    ] = "host",
    quant: Quant = None,
    speculate: Annotated[
        int,
        typer.Option(
            "--speculate", min=0, help="Add speculative decoding with this many draft tokens."
        ),
    ] = 0,
    requests: Annotated[
        int | None,
        typer.Option(
            "--requests", min=1, help="Add continuous batching (rlx.Engine) of so many requests."
        ),
    ] = None,
    cache_tokens: Annotated[
        int | None,
        typer.Option(
            "--cache-tokens", min=1, help="Size of the KV cache that the requests share.",
            show_default="the context for each",
        ),
    ] = None,
    weights: Annotated[
        bool, typer.Option("--weights", help="Add the prepacked weights.")
    ] = False,
    bind: Bind = None,
    json: Json = False,
    loading: Loading,
) -> None:  # fmt: skip
    """Compile a model ahead of time into one file, a bundle, that runs without llvmlite.

    Ship it with the model: `rlx run MODEL --artifact FILE` (or chat, embed, profile, bench) then
    compiles nothing. Context, KV cache type and quantisation are fixed in the bundle.
    """
    if is_onnx(model):
        opened = open_onnx_file(model, loading.device, loading.threads)
        compile_onnx(opened, out, bind, json)
        return
    from rlx.models.compile import compile_model

    path = find_model(model)
    file = out / f"{path.stem}.rlx" if out.is_dir() or not out.suffix else out
    file.parent.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    with console.counting() as counted:
        plan = compile_model(
            path, file, target=cpu, device=loading.device, context=loading.context,
            threads=loading.threads, kv=loading.kv, quant=quant, speculate=speculate,
            requests=requests, cache_tokens=cache_tokens, weights=weights, counted=counted,
            **_bounds(variant or []),
        )  # fmt: skip
    seconds, size = time.perf_counter() - start, file.stat().st_size
    if json:
        made: dict[str, Any] = {"path": str(file), "bytes": size, "seconds": seconds, "cpu": cpu}
        made |= {"model": str(path), "kind": plan.kind, **plan.settings}
        made["entry_points"] = [*plan.entry_points]
        console.write_json(made | {"variants": {n: str(v) for n, v in plan.variants.items()}})
        return
    console.note(f"{file}: {plan.count} executables, {console.size(size)}, {seconds:.1f} s")


def _bounds(variants: list[str]) -> dict[str, Any]:
    """Bounds from the variants: chunks of prompts for language models, lengths for encoders."""
    found = [split_variant(text) for text in variants]
    phases = {phase for phase, *_ in found}
    if phases == {"encoder"}:
        if any(not tokens for *_, tokens in found):
            raise OptionError("a length is missing", where="--variant", expected="encoder:8x128")
        return {"steps": {tokens: batch for _, batch, tokens in found}}
    if not phases <= {"prefill", "decode"}:
        raise OptionError(
            "not a phase of this model", where="--variant", got=", ".join(variants),
            expected="prefill and decode for a language model, encoder for an encoder",
        )  # fmt: skip
    if any(batch != 1 for _, batch, _ in found):
        raise OptionError(
            "the model runs one sequence at a time", where="--variant", got=", ".join(variants),
            expected="a batch of 1",
        )  # fmt: skip
    chunks = [tokens for phase, _, tokens in found if phase == "prefill" and tokens]
    if chunks:
        return {"chunk": max(chunks)}
    return {"chunk": 1} if phases == {"decode"} else {}
