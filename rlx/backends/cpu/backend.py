"""The CPU device: native kernels, linked to one program that a thread pool runs."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING

from rlx.backends.base import Backend, Parts, PlanInfo
from rlx.backends.cpu.executable import CpuExecutable
from rlx.backends.cpu.first_touch import arena_touched_ahead
from rlx.backends.cpu.program import link
from rlx.backends.cpu.relocatable import read_parts, write_parts
from rlx.backends.cpu.thread_pool import get_thread_pool
from rlx.backends.cpu.tuning import tuning_key
from rlx.backends.recycle import release
from rlx.errors import CodegenError
from rlx.ir.graph import Graph
from rlx.ir.lir import Lir
from rlx.ir.node import Node
from rlx.ir.op import Array
from rlx.llvm.jit import counters, has_compiler, trim_compiler_memory
from rlx.llvm.target import Target
from rlx.specialize.options import CompileOptions
from rlx.support.machine import usable_cores, worker_count

if TYPE_CHECKING:
    from rlx.backends.cpu.compiler import Compiler
    from rlx.backends.cpu.inspection import CpuInspection

MANY_NODES = 2000
"""Of a graph before passes, as of a training step: its kernels will keep two processes busy."""


class CpuBackend(Backend):
    name = "cpu"

    def __init__(self, target: Target | None = None) -> None:
        self.target = target or Target.host()
        self._others: dict[str, CpuBackend] = {}

    @cached_property
    def _compiler(self) -> Compiler:
        # importing all kernel families takes longer than loading an artifact
        from rlx.backends.cpu.compiler import Compiler

        return Compiler(self.target)

    # -- target and process -----------------------------------------------------------------------

    def for_target(self, name: str) -> CpuBackend:
        wanted = Target.named(name)
        if wanted.key == self.target.key:
            return self
        return self._others.setdefault(wanted.key, CpuBackend(wanted))

    @property
    def target_key(self) -> str:
        return self.target.key

    @property
    def tuning_key(self) -> str:
        return tuning_key(self.target)

    def workers(self, options: CompileOptions) -> int:
        return worker_count(options.threads)

    @property
    def compile_count(self) -> int:
        return counters.compilations

    def trim_memory(self) -> None:
        release()
        trim_compiler_memory()

    # -- compilation ------------------------------------------------------------------------------

    def expect_graph(self, nodes: int) -> None:
        if nodes >= MANY_NODES:
            from rlx.llvm.parallel_compile import start_early

            start_early()

    @property
    def updates_in_place(self) -> bool:
        return True

    def has_native(self, node: Node) -> bool:
        return self._compiler.has_native(node)

    def runs_on_host(self, node: Node) -> bool:
        return self._compiler.runs_on_host(node)

    def choose_layouts(self, graph: Graph) -> Graph:
        return self._compiler.choose_layouts(graph)

    def rewrite_template(self, graph: Graph) -> Graph:
        return self._compiler.rewrite_template(graph)

    def rewrite_variant(self, graph: Graph) -> Graph:
        return self._compiler.rewrite_variant(graph)

    def scratch(self, node: Node) -> int:
        # for the most workers that a compilation can have; pages never touched cost nothing
        return self._compiler.scratch(node, usable_cores())

    def prepare(self, graph: Graph, params: Mapping[str, Array]) -> dict[str, Array]:
        from rlx.backends.cpu.prepare import prepare_params  # prepacked weights on disk need none

        prepared = prepare_params(graph, params, native=has_compiler())
        return dict(zip(graph.output_names, prepared, strict=True))

    def compile(self, lir: Lir, options: CompileOptions) -> CpuExecutable:
        self._require_host()
        with arena_touched_ahead(lir) as arena:
            program, kernels = self._compiler.compile_program(lir, self.workers(options))
            linked = link(program, kernels, arena)
        return CpuExecutable(linked, PlanInfo.of(lir), get_thread_pool(program.workers))

    # -- programs on disk -------------------------------------------------------------------------

    def export(self, lir: Lir, options: CompileOptions) -> Parts:
        program, kernels = self._compiler.compile_program(lir, self.workers(options))
        return write_parts(program, kernels, self.target)

    def restore(self, parts: Parts, info: PlanInfo, options: CompileOptions) -> CpuExecutable:
        program, kernels = read_parts(parts)
        workers = min(program.workers, self.workers(options))
        if options.threads is not None and options.threads > program.workers:
            made = f"the program was compiled for {program.workers} workers"
            text = f"[artifact] {made}, and {options.threads} threads are asked for"
            warnings.warn(text, RuntimeWarning, stacklevel=2)
        return CpuExecutable(link(program, kernels), info, get_thread_pool(workers))

    def _require_host(self) -> None:
        if not self.target.runs_on(Target.host()):
            raise CodegenError(
                "code for another CPU cannot run here", where="target", got=self.target.key,
                expected=Target.host().key, hint="write a bundle and load it on that machine",
            )  # fmt: skip

    def inspection(self) -> CpuInspection:
        from rlx.backends.cpu.inspection import CpuInspection

        return CpuInspection(self)


def make_backend() -> Backend:
    return CpuBackend()
