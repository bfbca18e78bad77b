"""What every engine runs a model with: executables from disk where they were made before, and the
parameters that all of them share, packed once and mapped at the next start."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rlx.formats.gguf import GgufFile
from rlx.formats.hf import HfFolder
from rlx.ir.module import GraphModule
from rlx.models.prepared import PreparedWeights
from rlx.models.shipped import Described, Shipped, shipped_name
from rlx.runtime.compiled import CompiledGraph
from rlx.runtime.params import ParamStore
from rlx.runtime.pipeline import ModelCompilePipeline
from rlx.specialize.component import CompilationMode, ModelComponent
from rlx.specialize.options import CompileOptions
from rlx.specialize.variant import ModelVariant

_SMALL = 1 << 16  # bytes
_MOST_VARIANTS = 32  # of a use; more than an engine asks for


class Executables:
    """The executables of one model file. `settings` are what its parameters depend on beside it;
    `shipped` has executables that were made elsewhere."""

    def __init__(
        self,
        file: GgufFile | HfFolder,
        device: str,
        options: CompileOptions,
        *settings: object,
        shipped: Shipped | None = None,
    ) -> None:
        self._file, self.device, self.options = file, device, options
        self.params = ParamStore()
        self._prepared = PreparedWeights(file.files, device, *settings)
        self._bundle = None if shipped is None else shipped.load(options, self.params)
        self._shipped = shipped
        self._uses: dict[str, tuple[ModelCompilePipeline, GraphModule]] = {}

    def make(
        self,
        use: str,
        describe: Callable[[], Described],
        variants: Mapping[str, ModelVariant],
    ) -> dict[str, CompiledGraph]:
        """The executables of a use by name, without passes and without a compiler where they were
        made before."""
        made = {name: self._graph(use, describe, name, v) for name, v in variants.items()}
        for graph in made.values():
            graph.prepare()
        if self._shipped is None or not self._shipped.has_weights:
            self._prepared.keep(self.params)
        self._file.release()
        return made

    def _graph(
        self, use: str, describe: Callable[[], Described], name: str, variant: ModelVariant
    ) -> CompiledGraph:
        pipeline, module = self._use(use, describe)
        if self._bundle is not None and shipped_name(use, name) in self._bundle:
            return self._bundle[shipped_name(use, name)]
        component = ModelComponent(variant, compilation_mode=CompilationMode.AOT)
        return pipeline.get_or_compile_component(component, lambda: module, self.options)[0]

    def _use(
        self, use: str, describe: Callable[[], Described]
    ) -> tuple[ModelCompilePipeline, GraphModule]:
        if use not in self._uses:
            described = describe()
            if self._shipped is not None:
                self._shipped.check(use, described.module)
            for name, array in described.params.items():
                if name not in self.params:
                    # a page of the file, or two MiB of it, would stay for the sake of a vector
                    self.params.set(name, array.copy() if array.nbytes <= _SMALL else array)
            self._prepared.load(self.params)
            pipeline = ModelCompilePipeline(self.device, _MOST_VARIANTS, params=self.params)
            self._uses[use] = pipeline, described.module
        return self._uses[use]

    def close(self) -> None:
        """Let go of executables and parameters."""
        self._uses.clear()
        self._bundle = None
        self.params = ParamStore()
