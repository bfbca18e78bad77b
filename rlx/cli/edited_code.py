"""Models that run native code changed by hand: kernels in LLVM IR or assembly, and the step table.

Only the executables in memory change; what is on disk stays as the compiler made it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from rlx.cli import console
from rlx.cli.opening import load_model
from rlx.cli.options import Loading
from rlx.errors import InputError

if TYPE_CHECKING:
    from rlx.backends.cpu.executable import CpuExecutable
    from rlx.models.language_model import LanguageModel

_STEP = re.compile(r"^  #\d+ +(.*?)(?: +// .*)?$", re.MULTILINE)
_COLUMNS = re.compile(r" {2,}")
_HOW = re.compile(r"(?:one worker|jump|in Python)(?:, barrier)?|barrier")


def load_with_kernels(text: str, where: str, weights: str, loading: Loading) -> LanguageModel:
    """The model as it is, but for the kernels in the file."""
    from rlx.codegen.edited import parse_kernels
    from rlx.codegen.target import Target

    edited = parse_kernels(text, where)
    with console.working("compiling"):
        kernels = {k.key: k.compile(Target.host()) for k in edited}
    found: set[str] = set()
    model = _loaded(weights, loading, lambda e: found.update(e.replace_kernels(kernels)))
    foreign = sorted(key[:16] for key in kernels.keys() - found)
    if foreign:
        model.close()
        raise InputError(
            "kernels that the model does not run", where=where,
            got=", ".join(foreign[:3]) + (" …" if foreign[3:] else ""),
            hint="they belong to another CPU, model or version: write them again",
        )  # fmt: skip
    return model


def is_step_table(text: str) -> bool:
    return text.startswith("program ")


def load_with_steps(text: str, where: str, weights: str, loading: Loading) -> LanguageModel:
    """The model as it is, but with barriers where the table has them."""
    steps = [_COLUMNS.split(row) for row in _STEP.findall(text)]
    labels = [columns[0] for columns in steps]
    barriers = [bool(_HOW.fullmatch(c[-1])) and c[-1].endswith("barrier") for c in steps]
    done: list[CpuExecutable] = []

    def change(executable: CpuExecutable) -> None:
        if [mark.label for mark in executable.listing.marks] == labels:
            executable.set_barriers(barriers)
            done.append(executable)

    model = _loaded(weights, loading, change)
    if not done:
        model.close()
        raise InputError(
            "steps that are not the model's", where=where, got=f"{len(steps)} steps",
            hint="barriers may be put in and taken out; kernels and their order stay",
        )  # fmt: skip
    return model


def _loaded(
    weights: str, loading: Loading, change: Callable[[CpuExecutable], object]
) -> LanguageModel:
    """The model, its native executables changed."""
    from rlx.backends.cpu.executable import CpuExecutable
    from rlx.models.build_graph import SAMPLE

    model = load_model(weights, loading)
    graphs = model.runner.executables(SAMPLE)
    for graph in (graphs.prefill, graphs.decode):
        if isinstance(graph.executable, CpuExecutable):
            change(graph.executable)
    return model
