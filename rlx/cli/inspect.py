"""`rlx inspect`: a model at every stage of the compiler, or as a report in HTML."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlx.cli import console
from rlx.cli.onnx_file import (
    inspect_onnx,
    is_onnx,
    open_onnx_file,
    sizes_of,
    write_onnx_report,
)
from rlx.cli.options import Json, Loading, model_names, spread
from rlx.cli.programs import Subject, binding_for, open_subject, parameters, weight_types
from rlx.runtime.stages import STAGES, Stages
from rlx.support import machine
from rlx.support.files import atomic_file, require_other_file
from rlx.support.records import dataclass

if TYPE_CHECKING:
    from rlx.backends.base import Backend


Page = Annotated[
    Path | None,
    typer.Option(
        "--html",
        metavar="FILE",
        help="Compile, run and measure; write a report to open in a browser.",
    ),
]


@dataclass(frozen=True)
class Wanted:
    """What is shown, and where."""

    stage: Annotated[
        str | None,
        typer.Option(
            "--stage", "-s",
            help="One of hir, mir, lir, program, llvm, asm.",
            show_default="a summary",
            autocompletion=lambda: [*STAGES],
        ),
    ] = None  # fmt: skip
    block: Annotated[
        str,
        typer.Option("--block", "-b", help="Only this block and those inside, such as blk.0."),
    ] = ""
    after: Annotated[
        str | None, typer.Option("--after", metavar="PASS", help="MIR after this pass.")
    ] = None
    diff: Annotated[
        tuple[str, str] | None,
        typer.Option("--diff", metavar="PASS PASS", help="What changed between two passes."),
    ] = None
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o",
            help="Write to a file, in a form that can be edited and read back; - is stdout.",
        ),
    ] = None  # fmt: skip
    json: Json = False

    def check(self) -> None:
        if self.stage is not None and self.stage not in STAGES:
            raise typer.BadParameter(f"no stage {self.stage!r}; there are {', '.join(STAGES)}")
        if self.json and not self.is_summary:
            raise typer.BadParameter("--json goes with the summary, not with a stage")

    @property
    def is_summary(self) -> bool:
        return not (self.stage or self.after or self.diff)

    def text(self, stages: Stages) -> str:
        """The stage, the graph after a pass, or the diff of two."""
        if self.diff is not None:
            return stages.diff(*self.diff)
        exact = self.output is not None
        color = not exact and console.screen().color_system is not None
        if self.after is not None:
            return stages.after(self.after, exact=exact, color=color)
        assert self.stage is not None
        return stages.text(self.stage, exact=exact, color=color)

    def deliver(self, text: str) -> None:
        if self.output is None or str(self.output) == "-":
            sys.stdout.write(text)
        elif self.output.exists() and not self.output.is_file():  # a device, a FIFO
            self.output.write_text(text, encoding="utf-8")
        else:
            with atomic_file(self.output.resolve()) as file:
                file.write(text.encode())


@dataclass(frozen=True)
class Sizes:
    """The variant, and the CPU to compile for."""

    variant: Annotated[
        str | None,
        typer.Option(
            "--variant", "-v",
            help="Sizes: decode:1, prefill:1, prefill:1x128 (batch x tokens).",
            show_default="decode:1, or encoder:1, for the stages after mir",
        ),
    ] = None  # fmt: skip
    bind: Annotated[
        list[str] | None,
        typer.Option(
            "--bind",
            metavar="NAME=SIZE",
            help="The size of a symbol; NAME<=BOUND leaves it dynamic. May be repeated.",
        ),
    ] = None
    cpu: Annotated[
        str | None,
        typer.Option("--cpu", help="Code for another target: x86-64-v3, or sm_90a."),
    ] = None
    beside: Annotated[
        str | None,
        typer.Option(
            "--beside",
            metavar="TARGET",
            help="Kernels for this target too, side by side: LLVM IR, and assembly or PTX.",
        ),
    ] = None

    @property
    def asked(self) -> bool:
        return self.variant is not None or bool(self.bind)


@spread
def inspect(
    name: Annotated[
        str,
        typer.Argument(
            metavar="MODEL_OR_FILE",
            help="A model, an ONNX file, or IR that was written with -o or rlx.ir.serial.save.",
            autocompletion=model_names,
        ),
    ],
    *,
    html: Page = None,
    wanted: Wanted,
    sizes: Sizes,
    loading: Loading,
) -> None:
    """Show a model at a stage of the compiler.

    hir: blocks, as the model was written. mir: tensor operations, before the passes, or after
    one of them. lir: the optimised graph with its memory plan. program: the table of kernel
    launches. llvm, asm: the code of each distinct kernel. Without a stage, a summary.
    """
    wanted.check()
    for written in (html, wanted.output):
        if written is not None and Path(name).exists():
            require_other_file(written, Path(name))
    if html is not None and wanted != Wanted():
        raise typer.BadParameter("--html is a report on everything, and goes without a stage")
    if sizes.beside is not None:
        if wanted.after or wanted.diff or wanted.json or is_onnx(name):
            raise typer.BadParameter("--beside goes with --stage llvm or asm, of no ONNX file")
        _show_beside(name, html, wanted, sizes, loading)
        return
    if is_onnx(name):
        _inspect_onnx(name, html, wanted, sizes, loading)
        return
    subject = open_subject(name, loading.context, loading.kv)
    symbolic = wanted.stage in ("hir", "mir") and not sizes.asked
    stages = _stages(subject, sizes, symbolic, wanted.block, loading)
    if html is not None:
        facts = _model_facts(subject) if subject.model is not None else {}
        write_report(html, subject, stages, [(_label(k), _shown(v)) for k, v in facts.items()])
        return
    if not wanted.is_summary:
        with console.working("compiling"):
            text = wanted.text(stages)
        wanted.deliver(text)
        return
    with console.working("compiling"):
        summary = _summary(subject, stages)
    if wanted.json:
        console.write_json(summary)
        return
    console.facts([(_label(key), _shown(v)) for key, v in summary.items()])
    wanted.deliver(f"\n{stages.result.explain()}\n")


def _show_beside(
    name: str, html: Path | None, wanted: Wanted, sizes: Sizes, loading: Loading
) -> None:
    """The kernels of two targets, as text or as a page."""
    from rlx.viz.side_by_side import as_page, as_text, pairs

    subject = open_subject(name, loading.context, loading.kv)
    left = _stages(subject, sizes, False, wanted.block, loading)
    assert sizes.beside is not None
    right = Stages(
        subject.module, _backend(loading.device, sizes.beside), left.options, wanted.block
    )
    with console.working("compiling"):
        found = pairs(left, right, wanted.stage)
    if html is not None:
        with atomic_file(html.resolve()) as file:
            file.write(as_page(subject.name, found).encode())
        console.note(f"wrote {html}: open it in a browser")
    else:
        wanted.deliver(as_text(found, None if wanted.output else console.screen().width))


def _inspect_onnx(
    name: str, html: Path | None, wanted: Wanted, sizes: Sizes, loading: Loading
) -> None:
    if wanted.after or wanted.diff or wanted.block or sizes.variant:
        raise typer.BadParameter("of an ONNX file only --stage, --bind and --html are shown")
    model = open_onnx_file(name, loading.device, loading.threads)
    chosen = sizes_of(sizes.bind)
    if html is not None:
        write_onnx_report(model, html, chosen)
    else:
        wanted.deliver(inspect_onnx(model, wanted.stage, chosen, wanted.json))


def _stages(subject: Subject, sizes: Sizes, symbolic: bool, block: str, loading: Loading) -> Stages:
    from rlx.ir.binding import DimBinding
    from rlx.specialize.options import CompileOptions

    binding = DimBinding()
    if not symbolic:
        binding = binding_for(subject, sizes.variant, sizes.bind or [])
    options = CompileOptions(binding=binding, threads=loading.threads)
    return Stages(subject.module, _backend(loading.device, sizes.cpu), options, block)


def _backend(device: str, target: str | None) -> Backend:
    from rlx.backends.registry import Device, backend_for_target

    chosen = Device.of(device)
    return chosen.backend if target is None else backend_for_target(chosen, target)


def _summary(subject: Subject, stages: Stages) -> dict[str, Any]:
    found: dict[str, Any] = {"name": subject.name}
    if subject.model is not None:
        found |= _model_facts(subject)
    hir = subject.module.as_hir()
    if hir is not None:
        found["hir_nodes"] = len(hir)
    lir = stages.lir
    found["mir_nodes"] = len(subject.module.into_graph())
    found["sizes"] = str(stages.binding)
    found["lir_nodes"] = len(lir.graph)
    found["arena_bytes"] = lir.arena_size
    if lir.prepare is not None:
        found["prepared_tensors"] = len(lir.prepare.outputs)
    if stages.backend.inspection().has_native_code:
        found["launches"] = len(stages.program.launches)
        found["kernels"] = len(stages.kernels())
    return found


def _model_facts(subject: Subject) -> dict[str, Any]:
    assert subject.model is not None
    c = subject.model.config
    found = {
        "architecture": c.arch,
        "parameters": parameters(subject.model),
        "weights": weight_types(subject.model),
        "layers": c.layers,
        "hidden": c.hidden,
        "heads": c.heads,
        "head_size": c.head_dim,
        "vocabulary": c.vocab,
        "context": subject.context,
    }
    if not subject.model.is_encoder:
        from rlx.cli.render import sampling
        from rlx.models.sampling import GenerationSettings, recommended_sampling

        found["sampling"] = sampling(GenerationSettings(**recommended_sampling(subject.model)))
    return found


def _label(key: str) -> str:
    return key.replace("_", " ")


def _shown(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{kind} {console.size(size)}" for kind, size in value.items())
    return f"{value:,}" if isinstance(value, int) else str(value)


def write_report(
    path: Path, subject: Subject, stages: Stages, facts: Sequence[tuple[str, str]]
) -> None:
    """Write the HTML report of a variant."""
    from rlx.viz.report import make_report, write_page
    from rlx.viz.report.page import charting_library

    charting_library()  # raises before the work where it is missing
    with console.working("compiling and measuring"):
        report = make_report(
            subject.module,
            stages.options,
            device=stages.backend,
            params=subject.params,
            name=subject.name,
            facts=[*facts, ("processor", machine.cpu_name())],
        )
        write_page(path, report)
    console.note(f"wrote {path}: open it in a browser")
