"""A model with an override: `rlx run edited.mir --weights model.gguf`.

The file is what `rlx inspect -o` wrote at any stage, edited by hand: HIR, MIR, LIR, the table of
launches, LLVM IR or assembly. Only executables in memory change; what is on disk stays.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rlx.cli import console
from rlx.cli.load_model import find_model, load_model
from rlx.cli.options import Loading
from rlx.cli.programs import read_program, read_text
from rlx.errors import InputError, OptionError

if TYPE_CHECKING:
    from rlx.ir.graph import Graph
    from rlx.ir.lir import Lir
    from rlx.ir.module import GraphModule
    from rlx.models.builder import BuiltGraph, EntryPoint
    from rlx.models.language_model import LanguageModel


def load_with_override(program: Path, weights: str, loading: Loading) -> LanguageModel:
    """The model of `weights`, run by the program in a file that `rlx inspect -o` wrote."""
    from rlx.backends.inspection import is_native_code

    text = read_text(program) or ""
    if is_native_code(text):
        return _load_with_code(text, str(program), weights, loading)
    module = read_program(program)
    lir = module.as_lir()
    if lir is not None:
        return _load_with_plan(lir, str(program), weights, loading)
    return _load_with_graph(module, str(program), weights, loading)


def _load_with_code(text: str, where: str, weights: str, loading: Loading) -> LanguageModel:
    """The model with edited kernels, or with barriers as an edited table of launches has them."""
    from rlx.backends.registry import Device
    from rlx.models.builder import SAMPLE

    model = load_model(weights, loading)
    graphs = model.runner.executables(SAMPLE)
    try:
        with console.working("compiling"):
            executables = [graph.executable for graph in (graphs.prefill, graphs.decode)]
            Device.of(loading.device).backend.inspection().override(executables, text, where)
    except BaseException:
        model.close()
        raise
    return model


def _load_with_plan(lir: Lir, where: str, weights: str, loading: Loading) -> LanguageModel:
    """The model with one variant (decode or prefill) run by an edited plan."""
    from rlx.models.builder import SAMPLE
    from rlx.runtime.compiled import CompiledGraph
    from rlx.specialize.options import CompileOptions

    model = load_model(weights, loading)
    graphs = model.runner.executables(SAMPLE)
    name = "decode" if lir.graph.live.keys() == {"past_seq"} else "prefill"
    own: CompiledGraph = getattr(graphs, name)
    _check(own.executable.lir.graph, lir.graph, where)
    executable = own.template.backend.compile(lir, CompileOptions(threads=loading.threads))
    planned = CompiledGraph(own.template, own.params, executable)
    for entry in executable.manifest.states:
        planned.bind_state(entry.name, own.state_buffer(entry.name))
    setattr(graphs, name, planned)
    return model


def _load_with_graph(
    module: GraphModule, where: str, weights: str, loading: Loading
) -> LanguageModel:
    """The model with an edited graph in place of its own."""
    path = find_model(weights)
    with console.working(f"loading {weights}"):
        from rlx.models.builder import SAMPLE
        from rlx.models.decoder_runner import DecoderRunner
        from rlx.models.language_model import LanguageModel
        from rlx.models.model_file import ModelFile

        class Overridden(DecoderRunner):
            """Runs the edited graph."""

            def build(self, entry_point: EntryPoint) -> BuiltGraph:
                if entry_point != SAMPLE:
                    raise OptionError(
                        "penalties, biases and logits are not in an edited program",
                        got=entry_point.name, hint="leave those options out",
                    )  # fmt: skip
                built = super().build(entry_point)
                _check(_graph(built.module), _graph(module), where)
                built.module = module
                return built

        runner = Overridden(
            ModelFile.open(path), device=loading.device, context=loading.context,
            threads=loading.threads, kv=loading.kv,
        )  # fmt: skip
        runner.progress = console.stages()
        return LanguageModel(runner.model, runner)


def _graph(module: GraphModule) -> Graph:
    found = module.as_hir() or module.as_graph()
    assert found is not None
    return found


def _check(described: Graph, edited: Graph, where: str) -> None:
    """Raise unless the edited graph has the signature of the model's own."""
    for kind in ("input", "param", "state"):
        known = {n.name: n.output.shape for n in described.sources(kind)}
        found = {n.name: n.output.shape for n in edited.sources(kind)}
        for name, shape in found.items():
            if known.get(name) is not shape:
                raise InputError(
                    f"{kind} {name!r} is not the model's", where=where, got=shape,
                    expected=known.get(name, f"one of its {kind}s"),
                    hint="states have the length of the context: give the same --context and --kv"
                    if kind == "state" and name in known else "",
                )  # fmt: skip
        missing = sorted(known.keys() - found.keys()) if kind == "input" else []
        if missing:
            raise InputError("an input is missing", where=where, expected=", ".join(missing))
    if edited.output_names != described.output_names:
        raise InputError(
            "other outputs than the model's", where=where, got=", ".join(edited.output_names),
            expected=", ".join(described.output_names),
        )  # fmt: skip
