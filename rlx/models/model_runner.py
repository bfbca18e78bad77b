"""The base of all runners: executables, from disk where they were compiled before, and parameters,
which all of them share; packed once, and mapped from disk at the next start.

The packed-weight cache: weights packed by one process are mapped from disk by the next.
"""

from __future__ import annotations

import contextvars
import os
import shutil
import sys
import threading
from collections.abc import Callable, Container, Sequence
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path

from rlx.backends.buffer import Buffer
from rlx.backends.registry import get_backend
from rlx.errors import OptionError
from rlx.ir.module import GraphModule
from rlx.models.bundle import EntryPointSpec, ModelBundle, executable_name
from rlx.models.model_file import ModelFile
from rlx.runtime.aot import AotCache
from rlx.runtime.artifact import compiler_stamp
from rlx.runtime.compiled import CompiledGraph
from rlx.runtime.params import ParamStore
from rlx.runtime.pipeline import ModelCompilePipeline, Specialized
from rlx.specialize.compile_profile import CompileProfile
from rlx.specialize.options import CompilationMode, CompileOptions, ModelComponent
from rlx.specialize.variant import make_key
from rlx.support.progress import Progress, reporting
from rlx.support.settings import debug, mebibytes


class PackedWeightCache:
    """Packed weights of a model on disk, by its files and by `settings`. Stores nothing where the
    cache is off or the disk is nearly full."""

    def __init__(self, files: Sequence[Path], *settings: object) -> None:
        stats = [(str(p.resolve()), p.stat().st_size, p.stat().st_mtime_ns) for p in sorted(files)]
        material = {"files": stats, "settings": [str(s) for s in settings]}
        self._source = make_key("prepared", {**material, "compiler": compiler_stamp()})
        self._name = f"rlx_{make_key('prepared', material)[:16]}"
        self._disk = AotCache.default()
        self._kept: frozenset[str] = frozenset()

    def load(self, params: ParamStore) -> None:
        """Map what an earlier process stored."""
        found = self._disk.load_weights(self._name, self._source) if self._disk else None
        if found:
            params.adopt(found)
            self._kept = frozenset(found)

    def is_stored(self, params: ParamStore) -> bool:
        """Whether there is nothing to store."""
        return self._disk is None or params.prepared_names <= self._kept

    def store(self, params: ParamStore) -> None:
        """Store packed weights unless they are there, and map them from disk: such memory can be
        reclaimed by the system, and is shared between processes."""
        if self._disk is None or self.is_stored(params):
            return
        names = params.prepared_names
        self._kept, prepared = names, params.prepared
        if not self._has_room(self._disk, sum(a.nbytes for a in prepared.values())):
            return
        if self._disk.store_weights(self._name, prepared, self._source):
            mapped = self._disk.load_weights(self._name, self._source, check=False)
            params.adopt(mapped or {}, replace=True)

    def _has_room(self, disk: AotCache, size: int) -> bool:
        """Whether they neither fill the cache nor the disk."""
        most = min(mebibytes("RLX_CACHE_WEIGHTS", 0), disk.limit_bytes)
        place = next(p for p in (disk.root, *disk.root.parents) if p.exists())
        free = shutil.disk_usage(place).free
        if size <= most and 2 * size <= free:
            return True
        debug(
            1,
            f"packed weights not stored: {size >> 20} MiB, {most >> 20} allowed, {free >> 20} free",
        )
        return False


_SMALL = 1 << 16  # bytes
_LARGE = 1 << 25  # bytes of packed weights that take a while to store
_MOST_VARIANTS = 32  # of an entry point; more than a runner asks for


class _Task(threading.Thread):
    """Work in a thread, when the work before it is done; `wait` raises what it raised."""

    def __init__(self, work: Callable[[], None], before: _Task | None, nice: int = 0) -> None:
        super().__init__(name="rlx-pack")
        self._work, self._before, self._nice = work, before, nice
        self._error: BaseException | None = None
        self._context = contextvars.copy_context()  # it has who is told of the progress
        self.start()

    def run(self) -> None:
        self._context.run(self._run)

    def _run(self) -> None:
        try:
            if self._before is not None:
                self._before.wait()
                self._before = None
            if self._nice and sys.platform == "linux":  # there a thread has a priority of its own
                with suppress(OSError):
                    os.setpriority(os.PRIO_PROCESS, self.native_id or 0, self._nice)
            self._work()
        except BaseException as error:
            self._error = error

    def wait(self) -> None:
        self.join()
        if self._error is not None:
            raise self._error


def compile_options(threads: int | None, batch_invariant: bool) -> CompileOptions:
    """How the executables of a language model are compiled."""
    if not isinstance(batch_invariant, bool):
        raise OptionError(
            "neither True nor False", where="batch_invariant", got=repr(batch_invariant)[:40]
        )
    profile = CompileProfile(batch_invariant=batch_invariant)
    return CompileOptions(threads=threads, profile=profile)


class ModelRunner:
    """The executables and parameters of one model. `progress` is told when weights are packed and
    kernels compiled."""

    progress: Progress | None = None

    def __init__(
        self,
        model: ModelFile,
        *,
        device: str,
        options: CompileOptions,
        packing: tuple[object, ...],
        bundle: ModelBundle | None = None,
    ) -> None:
        """`packing` is what packed weights depend on beside the files; `bundle` has executables
        that were compiled elsewhere."""
        self.model, self.device, self.options = model, device, options
        self.params = ParamStore()
        self._packing = packing
        self._bundle = bundle
        self._bundled = None if bundle is None else bundle.load(options, self.params)
        self._pipelines: dict[str, tuple[ModelCompilePipeline, GraphModule]] = {}
        self._packing_task: _Task | None = None
        self._storing_task: _Task | None = None
        self._compiling_task: _Task | None = None

    @cached_property
    def _packed_weights(self) -> PackedWeightCache:
        return PackedWeightCache(self.model.weight_files, self.device, *self._packing)

    def compile(
        self, entry_point: str, spec: EntryPointSpec, *, store: bool = True
    ) -> dict[str, CompiledGraph]:
        """The executables of an entry point by the names of its variants, ready to run.

        Those that are on disk need neither passes nor a compiler. With `store=False` packed weights
        are stored with what is compiled next."""
        self._await_compiling()
        with reporting(self.progress):
            return self._make(entry_point, spec, store)

    def compile_behind(
        self, entry_point: str, spec: EntryPointSpec
    ) -> Callable[[], dict[str, CompiledGraph]]:
        """`compile` in a thread, while the caller goes on; what is returned waits for it."""
        self._await_compiling()
        made: dict[str, CompiledGraph] = {}
        task = _Task(lambda: made.update(self._make(entry_point, spec)), None)
        self._compiling_task = task

        def result() -> dict[str, CompiledGraph]:
            task.wait()
            return made

        return result

    def _await_compiling(self) -> None:
        """Wait for what is compiled in a thread; who asks for it hears of an error."""
        task, self._compiling_task = self._compiling_task, None
        if task is not None:
            task.join()

    def _make(
        self, entry_point: str, spec: EntryPointSpec, store: bool = True
    ) -> dict[str, CompiledGraph]:
        backend = get_backend(self.device)
        compiled = backend.compile_count
        try:
            made = dict[str, CompiledGraph]()
            for name in spec.variants:
                made[name] = self._executable(entry_point, spec, name)
        finally:
            self._await_packing()
        for graph in made.values():
            graph.prepare()
        if self._packs and store:
            self._store_packed()
        self.model.file.release()
        if backend.compile_count > compiled:
            backend.trim_memory()
        return made

    @property
    def _packs(self) -> bool:
        """Whether weights are packed here; those of a bundle may be."""
        return self._bundle is None or not self._bundle.has_weights

    def _executable(self, entry_point: str, spec: EntryPointSpec, name: str) -> CompiledGraph:
        pipeline, module = self._pipeline(entry_point, spec)
        stored = executable_name(entry_point, name)
        if self._bundled is not None and stored in self._bundled:
            return self._bundled[stored]
        component = ModelComponent(spec.variants[name], compilation_mode=CompilationMode.AOT)
        pack = self._pack if self._packs else None
        return pipeline.get_or_specialize_aot(
            component, lambda: module, self.options, on_plan=pack
        )[0]

    def _pack(self, planned: Specialized) -> None:
        """Pack weights in a thread while LLVM makes the code."""
        names, plan = planned.kernel_params, planned.template
        self._packing_task = _Task(
            lambda: self.params.ensure(names, plan.prepare, plan.backend), self._packing_task
        )

    def _await_packing(self) -> None:
        task, self._packing_task = self._packing_task, None
        if task is not None:
            task.wait()

    def _store_packed(self) -> None:
        """Store packed weights: large ones in a thread, so that the first token does not wait. The
        process does not end before that is done."""
        if self._packed_weights.is_stored(self.params):
            return
        work = partial(self._packed_weights.store, self.params)
        if sum(a.nbytes for a in self.params.prepared.values()) < _LARGE:
            work()
        else:
            self._storing_task = _Task(work, self._storing_task, nice=10)

    def _pipeline(
        self, entry_point: str, spec: EntryPointSpec
    ) -> tuple[ModelCompilePipeline, GraphModule]:
        if entry_point not in self._pipelines:
            if self._packs and not self._pipelines:
                self._packed_weights.load(self.params)
            built = spec.build()
            if self._bundle is not None:
                self._bundle.check(entry_point, built.module)
            for name, array in built.params.items():
                if name not in self.params:
                    # a view would hold a page of the file, or two MiB of it, for a small vector
                    self.params.set(name, array.copy() if array.nbytes <= _SMALL else array)
            pipeline = ModelCompilePipeline(self.device, _MOST_VARIANTS, params=self.params)
            self._pipelines[entry_point] = pipeline, built.module
        return self._pipelines[entry_point]

    def close(self) -> None:
        """Free executables and parameters, and close the file."""
        self._await_compiling()
        if self._storing_task is not None:
            self._storing_task.join()
        self._pipelines.clear()
        self._bundled = None
        self.params = ParamStore()
        self.model.file.close()


def share_states(
    graph: CompiledGraph, states: dict[str, Buffer], besides: Container[str] = ()
) -> None:
    """Bind the states of a graph to those of `states`, and add those that are new to it; `besides`
    are left alone."""
    for state in graph.manifest.states:
        if state.name in besides:
            continue
        if state.name in states:
            graph.bind_state(state.name, states[state.name])
        else:
            states[state.name] = graph.state_buffer(state.name)
