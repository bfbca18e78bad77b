"""Helpers that run a graph as a native program and compare it with the reference."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

import rlx.ir.ops  # noqa: F401
from rlx.backends.cpu.compiler import Compiler
from rlx.backends.cpu.executor import emit
from rlx.backends.cpu.kernels import registry  # noqa: F401
from rlx.backends.cpu.kernels.spec import unit_of
from rlx.backends.cpu.lowering import TABLE, Context, lower_graph, reads_strided
from rlx.backends.cpu.program import link
from rlx.ir.binding import DimBinding, bind_graph
from rlx.ir.graph import Graph
from rlx.ir.interp import evaluate
from rlx.llvm.target import Target
from rlx.passes.plan import plan
from rlx.passes.views import insert_contiguous

V3 = Target.named("x86-64-v3")
HOST = Target.host()
WITHOUT_TILES = replace(HOST, features=tuple(f for f in HOST.features if "amx" not in f))
EMULATED = replace(WITHOUT_TILES, emulates_amx=True)
TILED = [EMULATED, HOST] if HOST.amx_int8 and HOST.amx_bf16 else [EMULATED]
"""Targets with AMX's tile registers: emulated in memory, and those of this CPU if it has any."""
TARGETS = [t for t in (HOST, V3) if t.runs_on(HOST)]
SETUPS = [(t, nth) for t in TARGETS for nth in (1, 2, 3)]
"""Every target that runs here, with 1, 2 and 3 workers."""

Arrays = Mapping[str, np.ndarray]


class Native:
    """A graph assembled for a target and some workers; memory is poisoned before each run."""

    def __init__(self, graph: Graph, target: Target, workers: int, live: Mapping[str, int]) -> None:
        binding = DimBinding()
        for symbol, bound in live.items():
            binding = binding.set_live(symbol, bound)
        bound = insert_contiguous(bind_graph(graph, binding), reads_strided)

        def scratch(node: object) -> int:
            entry = TABLE.get(node.op.name)  # type: ignore[attr-defined]
            wants = entry.scratch if entry is not None else None
            return wants(node, target, workers) if wants else 0  # type: ignore[arg-type]

        self.lir = plan(bound, scratch=scratch)
        self.launches = lower_graph(Context(self.lir, target, workers))
        self.linked = link(*Compiler(target).compile_program(self.lir, workers))
        self.workers = workers

    def prepare(
        self, inputs: Arrays, outputs: Sequence[np.ndarray], sizes: Mapping[str, int]
    ) -> None:
        """Fill in the args of one run: addresses of operands and results, and dynamic sizes."""
        addresses = {
            ("output", n): a.ctypes.data for n, a in zip(self._outputs, outputs, strict=True)
        }
        for node in [*self.lir.inputs, *self.lir.params, *self.lir.states]:
            addresses[node.op.name, node.name] = inputs[node.name].ctypes.data
        for arg, external, addend in self.linked.relocatable.relocations:
            self.linked.program.args[arg] = addresses[external] + addend
        symbols = sorted(self.lir.live)
        values = [sizes[s] for s in symbols]
        self.linked.filler(symbols)(
            memoryview(self.linked.program.dynamic_args),
            [addresses[b] for b in self.linked.externals()],
            *values,
        )
        self.linked.arena[:] = 0xFF  # NaN in every float type

    @property
    def _outputs(self) -> list[str]:
        return list(self.lir.graph.output_names)

    def run_sequentially(self) -> None:
        """Do what the executor does in one thread: a launch as every worker, then the next."""
        program = self.linked.program
        for arg, source in program.patches:
            program.args[arg] = program.dynamic_args[source]
        call = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32)
        at = 0
        while at < len(program.launches):
            launch = program.launches[at]
            workers = 1 if launch["flags"] & emit.SOLO else self.workers
            args = int(launch["args"])
            distances = {call(int(launch["fn"]))(args, tid, workers) for tid in range(workers)}
            if launch["flags"] & emit.JUMP:
                assert len(distances) == 1, "workers jump to different launches"
            at += distances.pop() if launch["flags"] & emit.JUMP else 1

    def run(
        self,
        inputs: Arrays,
        sizes: Mapping[str, int] | None = None,
        pool: Callable[[object], None] | None = None,
    ) -> list[np.ndarray]:
        """Results of one run, in the pool or in one thread, into poisoned memory."""
        given = {k: np.ascontiguousarray(v) for k, v in inputs.items()}
        shapes = [v.shape.bind(sizes or {}) for v in self.lir.outputs]
        padded = [poisoned(s.static_dims, s.dtype.numpy) for s in shapes]
        self.prepare(given, [p[1] for p in padded], sizes or {})
        if pool is None:
            self.run_sequentially()
        else:
            pool(self.linked.program)
        for whole, part in padded:
            edge = whole.view(np.uint8)[part.nbytes :]
            assert (edge == 0xFF).all(), "a kernel wrote behind its result"
        return [part for _, part in padded]


def poisoned(dims: Sequence[int], dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Memory full of NaN, and an array at its start; the rest shows writes past the end."""
    size = int(np.prod(dims)) * dtype.itemsize
    whole = np.full(size + 256, 0xFF, np.uint8)
    return whole, whole[:size].view(dtype).reshape(dims)


def reference(graph: Graph, inputs: Arrays, sizes: Mapping[str, int] | None = None) -> list:
    """What the ops' own references give."""
    bound = bind_graph(graph, DimBinding(sizes or {}))
    return evaluate(bound, dict(inputs))


def compare(
    graph: Graph,
    inputs: Arrays,
    tolerance: float,
    sizes: Mapping[str, int] | None = None,
    setups: Sequence[tuple[Target, int]] = SETUPS,
    bounds: Mapping[str, int] | None = None,
) -> None:
    """Native results against the reference: |difference| ≤ tolerance · largest magnitude.

    With `sizes` the symbols stay dynamic, planned for `bounds` (the sizes themselves unless given).
    """
    expected = reference(graph, inputs, sizes)
    for target, workers in setups:
        native = Native(graph, target, workers, bounds or sizes or {})
        for got, want in zip(native.run(inputs, sizes), expected, strict=True):
            check(got, want, tolerance)


def check(got: np.ndarray, want: np.ndarray, tolerance: float) -> None:
    assert got.shape == want.shape and got.dtype == want.dtype
    if got.size == 0:
        return
    wide = np.complex128 if got.dtype.kind == "c" else np.float64
    a, b = got.astype(wide), want.astype(wide)
    np.testing.assert_array_equal(np.isnan(a), np.isnan(b))
    kept = np.isfinite(b)
    np.testing.assert_array_equal(a[~kept & ~np.isnan(b)], b[~kept & ~np.isnan(b)])
    scale = np.abs(b[kept]).max(initial=0.0)
    worst = np.abs(a[kept] - b[kept]).max(initial=0.0)
    assert worst <= tolerance * scale, f"off by {worst / scale:.3g} of the largest"


_MACHINES = {"x86_64": 62, "aarch64": 183}  # the number an ELF header has for them


def kernels_for(graph: Graph, target_name: str) -> int:
    """Compile every kernel of the graph for a target; gives their number."""
    target = Target.named(target_name)
    lir = plan(
        insert_contiguous(bind_graph(graph, DimBinding()), reads_strided), scratch=lambda n: 64
    )
    ctx = Context(lir, target, 2)
    specs = set()
    for node in lir.graph.nodes:
        if not node.op.is_source and not node.op.is_view:
            specs |= {step.spec for step in TABLE[node.op.name].lower(node, ctx)}
    for spec in specs:
        code = unit_of(spec, target).compile()
        assert int.from_bytes(code[18:20], "little") == _MACHINES[target.arch]
    return len(specs)
