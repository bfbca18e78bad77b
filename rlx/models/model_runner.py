"""What every engine runs a model with: executables from disk where they were made before, and the
parameters that all of them share, packed once and mapped at the next start."""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Sequence
from functools import partial
from pathlib import Path

from rlx.codegen.jit import counters
from rlx.codegen.release import release_compiler
from rlx.formats.gguf import GgufFile
from rlx.formats.hf import HfFolder
from rlx.ir.module import GraphModule
from rlx.ir.op import Array
from rlx.models.bundle import Recipe, Shipped, shipped_name
from rlx.models.packed_weights import PreparedWeights
from rlx.runtime.compiled import CompiledGraph
from rlx.runtime.params import ParamStore
from rlx.runtime.pipeline import ModelCompilePipeline, Specialized
from rlx.specialize.component import CompilationMode, ModelComponent
from rlx.specialize.options import CompileOptions

_SMALL = 1 << 16  # bytes
_MOST_VARIANTS = 32  # of a use; more than an engine asks for


class _Work(threading.Thread):
    """Something done beside this thread; `wait` raises what it raised."""

    def __init__(self, work: Callable[[], None]) -> None:
        super().__init__(name="rlx-pack")
        self._work = work
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self._error = error

    def wait(self) -> None:
        self.join()
        if self._error is not None:
            raise self._error


class Executables:
    """The executables of one model file. `settings` are what its parameters depend on beside it;
    `shipped` has executables that were made elsewhere."""

    def __init__(
        self,
        file: GgufFile | HfFolder,
        device: str,
        options: CompileOptions,
        *settings: object,
        files: Sequence[Path] = (),
        shipped: Shipped | None = None,
    ) -> None:
        """`files` are those of the weights, where there are others than the model's own."""
        self._file, self.device, self.options = file, device, options
        self.params = ParamStore()
        self._prepared = PreparedWeights(files or file.files, device, *settings)
        self._bundle = None if shipped is None else shipped.load(options, self.params)
        self._shipped = shipped
        self._uses: dict[str, tuple[ModelCompilePipeline, GraphModule]] = {}
        self._packing: _Work | None = None

    def make(self, use: str, recipe: Recipe) -> dict[str, CompiledGraph]:
        """The executables of a use by name, without passes and without a compiler where they were
        made before."""
        compiled = counters.compilations
        try:
            made = {name: self._graph(use, recipe, name) for name in recipe.variants}
        finally:
            self._await_packing()
        for graph in made.values():
            graph.prepare()
        if self._packs:
            self._prepared.keep(self.params)
        self._file.release()
        if counters.compilations > compiled:
            release_compiler()
        return made

    @property
    def _packs(self) -> bool:
        """Whether weights are packed here."""
        return self._shipped is None or not self._shipped.has_weights

    def _graph(self, use: str, recipe: Recipe, name: str) -> CompiledGraph:
        pipeline, module = self._use(use, recipe)
        if self._bundle is not None and shipped_name(use, name) in self._bundle:
            return self._bundle[shipped_name(use, name)]
        component = ModelComponent(recipe.variants[name], compilation_mode=CompilationMode.AOT)
        pack = partial(self._pack, is_last=name == [*recipe.variants][-1]) if self._packs else None
        return pipeline.get_or_specialize_aot(
            component, lambda: module, self.options, on_plan=pack
        )[0]

    def _pack(self, planned: Specialized, is_last: bool) -> None:
        """Pack the weights of what is planned, and keep them behind the last variant, while LLVM
        makes the code."""
        names, plan = planned.manifest.param_names, planned.template

        def work() -> None:
            self.params.ensure(names, plan.prepare, plan.backend)
            if is_last:
                self._prepared.keep(self.params)

        self._await_packing()
        self._packing = _Work(work)

    def _await_packing(self) -> None:
        work, self._packing = self._packing, None
        if work is not None:
            work.wait()

    def _use(self, use: str, recipe: Recipe) -> tuple[ModelCompilePipeline, GraphModule]:
        if use not in self._uses:
            if self._packs and not self._uses:
                self._prepared.load(self.params)
            described = recipe.describe()
            if self._shipped is not None:
                self._shipped.check(use, described.module)
            for name, array in described.params.items():
                if name not in self.params:
                    # a page of the file, or two MiB of it, would stay for the sake of a vector
                    self.params.set(name, array.copy() if array.nbytes <= _SMALL else array)
            pipeline = ModelCompilePipeline(self.device, _MOST_VARIANTS, params=self.params)
            self._uses[use] = pipeline, described.module
        return self._uses[use]

    def close(self) -> None:
        """Let go of executables and parameters."""
        self._uses.clear()
        self._bundle = None
        self.params = ParamStore()


def share_states(
    graph: CompiledGraph, states: dict[str, Array], besides: Container[str] = ()
) -> None:
    """Let a graph use the states that others use, and others those that it is the first to have;
    `besides` are its own."""
    for state in graph.manifest.states:
        if state.name in besides:
            continue
        if state.name in states:
            graph.bind_state(state.name, states[state.name])
        else:
            states[state.name] = graph.read_state(state.name)
