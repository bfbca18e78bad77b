"""`rlx inspect`: a model as the compiler sees it, stage by stage."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlx.cli import console
from rlx.cli.options import Json, Loading, model_names, spread
from rlx.cli.programs import Subject, open_subject
from rlx.cli.stages import STAGES, Stages
from rlx.cli.variants import binding_for
from rlx.errors import OptionError

if TYPE_CHECKING:
    from rlx.backends.base import Backend


@spread
def inspect(
    name: Annotated[
        str,
        typer.Argument(
            metavar="MODEL_OR_FILE",
            help="A model, or a program that was written with -o or rlx.ir.serial.save.",
            autocompletion=model_names,
        ),
    ],
    *,
    stage: Annotated[
        str | None,
        typer.Option(
            "--stage", "-s",
            help="One of hir, mir, lir, program, llvm, asm.",
            show_default="a summary",
            autocompletion=lambda: [*STAGES],
        ),
    ] = None,
    variant: Annotated[
        str | None,
        typer.Option(
            "--variant", "-v",
            help="Sizes: decode:1, prefill:1, prefill:1x128 (batch x tokens).",
            show_default="decode:1, or encoder:1, for the stages after mir",
        ),
    ] = None,
    bind: Annotated[
        list[str] | None,
        typer.Option(
            "--bind",
            metavar="NAME=SIZE",
            help="The size of a symbol; NAME<=BOUND leaves it live. May be repeated.",
        ),
    ] = None,
    block: Annotated[
        str,
        typer.Option("--block", "-b", help="Only this block and those inside, such as blk.0."),
    ] = "",
    after: Annotated[
        str | None, typer.Option("--after", metavar="PASS", help="MIR after this pass.")
    ] = None,
    diff: Annotated[
        tuple[str, str] | None,
        typer.Option("--diff", metavar="PASS PASS", help="What changed between two passes."),
    ] = None,
    cpu: Annotated[
        str | None, typer.Option("--cpu", help="Make code for another CPU, such as x86-64-v3.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o",
            help="Write to a file; hir and mir in a form that can be read back. - for stdout.",
        ),
    ] = None,
    json: Json = False,
    loading: Loading,
) -> None:  # fmt: skip
    """Show a model at a stage of the compiler.

    hir: blocks, as the model was written. mir: tensor operations, before the passes, or after
    one of them. lir: the optimised program with its memory plan. program: the table of kernel
    calls. llvm, asm: the code of each distinct kernel. Without a stage, a summary.
    """
    if stage is not None and stage not in STAGES:
        raise typer.BadParameter(f"no stage {stage!r}; there are {', '.join(STAGES)}")
    if json and (stage or after or diff):
        raise typer.BadParameter("--json goes with the summary, not with a stage")
    subject = open_subject(name, loading.context, loading.kv)
    stages = _stages(subject, stage, variant, bind or [], block, cpu, loading)
    with console.working("compiling"):
        if diff is not None:
            text = stages.diff(*diff)
        elif after is not None:
            text = stages.after(after, exact=output is not None, color=_colored(output))
        elif stage is not None:
            text = stages.text(stage, exact=output is not None, color=_colored(output))
        else:
            summary = _summary(subject, stages)
            text = ""
    if text:
        _deliver(text, output)
    elif json:
        console.write_json(summary)
    else:
        console.facts([(key.replace("_", " "), _shown(v)) for key, v in summary.items()])
        _deliver(f"\n{stages.result.explain()}\n", output)


def _stages(
    subject: Subject,
    stage: str | None,
    variant: str | None,
    bind: list[str],
    block: str,
    cpu: str | None,
    loading: Loading,
) -> Stages:
    from rlx.ir.binding import DimBinding
    from rlx.specialize.options import CompileOptions

    symbolic = stage in ("hir", "mir") and variant is None and not bind
    binding = DimBinding() if symbolic else binding_for(subject, variant, bind)
    options = CompileOptions(binding=binding, threads=loading.threads)
    return Stages(subject.module, _backend(loading.device, cpu), options, block)


def _backend(device: str, cpu: str | None) -> Backend:
    from rlx.backends.registry import Device

    if cpu is None:
        return Device.of(device).backend
    if device != "cpu":
        raise OptionError("--cpu goes with the device cpu", got=device)
    from rlx.backends.cpu.backend import CpuBackend
    from rlx.codegen.target import Target

    return CpuBackend(Target.named(cpu))


def _colored(output: Path | None) -> bool:
    return output is None and console.screen().color_system is not None


def _deliver(text: str, output: Path | None) -> None:
    if output is None or str(output) == "-":
        sys.stdout.write(text)
    else:
        output.write_text(text, encoding="utf-8")


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
    if stages.backend.name == "cpu":
        found["steps"] = len(stages.steps)
        found["kernels"] = len(stages.kernels())
    return found


def _model_facts(subject: Subject) -> dict[str, Any]:
    from rlx.cli.weights import parameters, weight_types

    assert subject.model is not None
    c = subject.model.config
    return {
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


def _shown(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{kind} {console.size(size)}" for kind, size in value.items())
    return f"{value:,}" if isinstance(value, int) else str(value)
