"""`rlx tune`: measure tile sizes and prefetch distances of a model's kernels on this machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlx.cli import console
from rlx.cli.load_model import load_any
from rlx.cli.options import BatchSize, Json, ModelName, PromptTokens, Running, spread
from rlx.cli.run import DEFAULT_MODEL

if TYPE_CHECKING:
    from rlx.backends.inspection import TunedKernel, TunedProgram

_HEADER = ("kernel", "share", "tunable", "default", "best", "speedup")


@spread
def tune(
    name: ModelName = DEFAULT_MODEL,
    *,
    prompt: PromptTokens = None,
    batch: BatchSize = 8,
    reset: Annotated[
        bool, typer.Option("--reset", help="Forget what was measured on this CPU, for all models.")
    ] = False,
    json: Json = False,
    loading: Running,
) -> None:
    """Autotune the kernels of a model on this machine; takes a minute or so.

    Other tile sizes and prefetch distances are measured in the model's own runs, and the best are
    stored in the cache: later starts use them, of every model with the same kernels. Without
    tuning, a cost model chooses, and nothing waits. Answers stay the same, bit for bit.
    """
    from rlx.models.tune import forget_tuning, tune_model

    if reset:
        forget_tuning(loading.device)
        console.note("kernels have their defaults again")
        return
    with load_any(name, loading) as model, console.working("measuring") as status:
        found = tune_model(
            model,
            prompt=prompt,
            batch=batch,
            progress=lambda part, kernel: status(f"measuring {part}: {kernel}"),
        )
    if json:
        console.write_json({"model": name, **{part: _as_json(p) for part, p in found.items()}})
    else:
        _print(found)


def _as_json(program: TunedProgram) -> dict[str, Any]:
    return {
        "seconds_before": program.before,
        "seconds_after": program.after,
        "kernels": [kernel._asdict() for kernel in program.kernels],
    }


def _print(found: Mapping[str, TunedProgram]) -> None:
    for i, (part, program) in enumerate(found.items()):
        gain = program.before / program.after
        console.heading(
            f"{part}: {1e3 * program.before:.2f} ms with defaults, "
            f"{1e3 * program.after:.2f} ms tuned ({gain:.2f} ×)",
            first=i == 0,
        )
        rows = [row for kernel in program.kernels for row in _rows(kernel)]
        console.table(_HEADER, rows, right="share default best speedup")


def _rows(kernel: TunedKernel) -> list[tuple[object, ...]]:
    rows: list[tuple[object, ...]] = []
    for name, default in kernel.defaults.items():
        first = (kernel.label, f"{kernel.share:.1%}") if not rows else ("", "")
        speedup = "" if rows else f"{kernel.speedup:.2f} ×"
        rows.append((*first, name, default, kernel.best.get(name, default), speedup))
    return rows
