"""`rlx quantize`: a GGUF file with quantised weights."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlx.cli import console
from rlx.cli.load_model import find_model
from rlx.cli.options import Json, RequiredModel, Threads
from rlx.cli.programs import read_text
from rlx.errors import InputError, OptionError
from rlx.support.files import require_other_file

if TYPE_CHECKING:
    from rlx.formats.imatrix import ImportanceMatrix


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
    imatrix: Annotated[
        Path | None,
        typer.Option("--imatrix", help="Weigh errors by this importance matrix (GGUF or .dat)."),
    ] = None,
    calibrate: Annotated[
        Path | None,
        typer.Option(
            "--calibrate",
            metavar="TEXT",
            help="Make an importance matrix first: run the model over this text file.",
        ),
    ] = None,
    imatrix_out: Annotated[
        Path | None,
        typer.Option("--imatrix-out", metavar="FILE", help="Keep what --calibrate made."),
    ] = None,
    chunks: Annotated[
        int | None,
        typer.Option(
            "--chunks", min=1, help="Calibrate with so many chunks of 512 tokens at most."
        ),
    ] = None,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Quantise the weights of a model and write them as GGUF.

    MODEL should have float weights (F32, F16, BF16). OUT appears once it is complete; every
    program that reads GGUF can use it. With an importance matrix the inputs that a weight meets
    decide how much its error counts; types below 2.4 bits need one.
    """
    from rlx.formats.quant_presets import QuantPreset
    from rlx.models.to_gguf import quantize_model

    preset = QuantPreset.parse(type)
    path = find_model(model)
    start = time.perf_counter()
    matrix = _importance(path, out, imatrix, calibrate, imatrix_out, chunks, threads, force)
    with console.transfer(str(out)) as progress:
        written = quantize_model(
            path, out, preset, threads=threads, requantize=requantize,
            overwrite=force, imatrix=matrix, progress=progress,
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


def _importance(
    model: Path, out: Path, given: Path | None, text: Path | None, keep: Path | None,
    chunks: int | None, threads: int | None, force: bool,
) -> ImportanceMatrix | None:  # fmt: skip
    """The importance matrix that the options ask for."""
    from rlx.formats.imatrix import ImportanceMatrix

    for name, value in (("--imatrix-out", keep), ("--chunks", chunks)):
        if value is not None and text is None:
            raise OptionError("only with --calibrate", where=name, got=value)
    if text is None:
        if given is not None:
            require_other_file(out, given)
        return None if given is None else ImportanceMatrix.read(given)
    if given is not None:
        raise OptionError("not both", where="--imatrix", got=given, expected="or --calibrate")
    from rlx.formats.gguf.quantized import check_output
    from rlx.models.calibrate import calibrate

    for made in (out, *([keep] if keep else [])):
        require_other_file(made, model, text)
        check_output(made, force)
    source = read_text(text)
    if source is None:
        raise InputError("not UTF-8", where=str(text), expected="a text to calibrate with")
    with console.counting() as counted:
        matrix = calibrate(
            model, source, chunks=chunks, threads=threads, dataset=text.name, counted=counted
        )
    if keep is not None:
        matrix.write(keep)
    return matrix


def _by_size(kind: tuple[str, int]) -> int:
    return -kind[1]
