"""`rlx quantize`: a GGUF file with quantised weights."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from rlx.cli import console
from rlx.cli.load_model import find_model
from rlx.cli.options import Json, RequiredModel, Threads


def _types() -> list[str]:
    from rlx.formats.quant_presets import NAMES

    return [*NAMES]


def quantize(
    model: RequiredModel,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The GGUF file to write.")],
    type: Annotated[
        str,
        typer.Option(
            "--type",
            "-q",
            help="The quant preset: Q4_K_M, Q8_0, Q6_K, Q5_K_M, Q4_0, F16, BF16, …",
            autocompletion=_types,
        ),
    ] = "Q4_K_M",
    force: Annotated[bool, typer.Option("--force", "-f", help="Replace OUT if it exists.")] = False,
    requantize: Annotated[
        bool, typer.Option("--requantize", help="Also quantise weights that are quantised already.")
    ] = False,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Quantise the weights of a model and write them as GGUF.

    MODEL should have float weights (F32, F16, BF16). OUT appears once it is complete; every
    program that reads GGUF can use it.
    """
    from rlx.formats.quant_presets import QuantPreset
    from rlx.models.to_gguf import quantize_model

    preset = QuantPreset.parse(type)
    path = find_model(model)
    start = time.perf_counter()
    with console.transfer(str(out)) as progress:
        written = quantize_model(
            path, out, preset, threads=threads, requantize=requantize,
            overwrite=force, progress=progress,
        )  # fmt: skip
    seconds, size = time.perf_counter() - start, out.stat().st_size
    kinds: dict[str, int] = {}
    for tensor in written:
        kinds[tensor.after] = kinds.get(tensor.after, 0) + tensor.nbytes
    if json:
        console.write_json(
            {
                "path": str(out),
                "type": preset.name,
                "bytes": size,
                "seconds": seconds,
                "types": kinds,
                "tensors": [
                    {"name": t.name, "shape": list(t.shape), "before": t.before, "after": t.after}
                    for t in written
                ],
            }
        )
        return
    parts = ", ".join(f"{k} {console.size(n)}" for k, n in sorted(kinds.items(), key=_by_size))
    console.note(f"{console.size(size)} in {seconds:.1f} s: {parts}")
    print(out)


def _by_size(kind: tuple[str, int]) -> int:
    return -kind[1]
