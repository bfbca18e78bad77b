"""`rlx profile`: time of every kernel, and a timeline of every worker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlx.cli import console
from rlx.cli.kernel_table import HEADER, kernel_rows
from rlx.cli.load_model import load_any
from rlx.cli.onnx_file import Bind, is_onnx, open_onnx_file, profile_onnx, sizes_of
from rlx.cli.options import BatchSize, Json, ModelName, PromptTokens, Running, spread
from rlx.cli.run import DEFAULT_MODEL

if TYPE_CHECKING:
    from rlx.models.benchmark import Recorded


@spread
def profile(
    name: ModelName = DEFAULT_MODEL,
    *,
    prompt: PromptTokens = None,
    new: Annotated[
        int, typer.Option("--new", "-n", min=1, help="Tokens generated after the prompt.")
    ] = 16,
    batch: BatchSize = 8,
    repeat: Annotated[
        int, typer.Option("--repeat", "-r", min=1, help="Runs of the prompt, or of the batch.")
    ] = 5,
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace",
            metavar="FILE",
            help="Write a timeline of the workers, for ui.perfetto.dev or chrome://tracing.",
        ),
    ] = None,
    bind: Bind = None,
    json: Json = False,
    loading: Running,
) -> None:
    """Profile a model: calls, time, bytes and flops of every kernel, medians of the runs.

    Language models: the prompt (prefill) and a token after it (decode). Encoders: a batch of
    texts. Bytes and flops are those that the ops need; reads from a CPU cache count too.
    """
    if is_onnx(name):
        opened = open_onnx_file(name, loading.device or "cpu", loading.threads)
        profile_onnx(opened, name, sizes_of(bind), json)
        return
    from rlx.models.benchmark import profile_model

    with load_any(name, loading) as model, console.working("measuring"):
        found = profile_model(model, prompt=prompt, new=new, batch=batch, repeat=repeat)
    if trace is not None:
        from rlx.viz.trace import write_trace

        write_trace(trace, {part: recorded.slices for part, recorded in found.items()})
        console.note(f"wrote {trace}: open it in ui.perfetto.dev or chrome://tracing")
    if json:
        console.write_json({"model": name, **{part: _as_json(r) for part, r in found.items()}})
    else:
        _print(found)


def _as_json(recorded: Recorded) -> dict[str, Any]:
    profile = recorded.profile
    return {
        "tokens": recorded.tokens,
        "seconds": profile.elapsed,
        "waiting_seconds": profile.waiting,
        "kernels": [asdict(kernel) for kernel in profile.by_kernel()],
    }


def _print(found: Mapping[str, Recorded]) -> None:
    for i, (part, recorded) in enumerate(found.items()):
        profile, workers = recorded.profile, len({s.worker for s in recorded.slices})
        tokens = f"{recorded.tokens} tokens" if recorded.tokens > 1 else "a token"
        console.heading(
            f"{part}: {tokens} in {1e3 * profile.elapsed:.2f} ms, "
            f"{recorded.tokens / profile.elapsed:.1f} tokens/s, {workers} workers",
            first=i == 0,
        )
        console.table(HEADER, kernel_rows(profile), right=" ".join(HEADER[1:7]))
