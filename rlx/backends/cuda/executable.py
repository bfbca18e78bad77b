"""A program on a GPU with its memory: an arena, the table of args, and runs.

A run copies the table of args if it changed and queues the launches on the device's stream.
Launches that have run once are captured as a CUDA graph, which queues them all with one call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from ctypes import c_void_p
from functools import partial
from typing import Any

import numpy as np

from rlx.backends.base import Buffers, KernelExecutable, PlanInfo, Sizes, Span, raise_bad_index
from rlx.backends.buffer import Buffer, DeviceBuffer
from rlx.backends.cuda.builder import THREADS
from rlx.backends.cuda.decode_loop import CudaDecodeLoop
from rlx.backends.cuda.driver import Graph, Launch, Stream, launch
from rlx.backends.cuda.kernel import KernelLoader
from rlx.backends.cuda.launches import Branch, KernelLaunch, Repeat, While
from rlx.backends.cuda.memory import CudaAllocator
from rlx.backends.cuda.profile import CudaRecording
from rlx.backends.cuda.program import (
    ARENA,
    FLAG,
    NUMBER,
    STATUS,
    TABLE,
    Base,
    Program,
    place_of,
)
from rlx.backends.cuda.tensor_map import MapStore
from rlx.backends.decode_loop import DecodeLoop, LoopSpec
from rlx.errors import CodegenError
from rlx.ir.binding import bind_op
from rlx.ir.dim import evaluate
from rlx.ir.lir import Lir
from rlx.ir.node import Node, Value
from rlx.ir.op import Array
from rlx.passes.views import is_plain
from rlx.specialize.manifest import ManifestEntry

_OVERLAP = (9, 0)  # the first GPUs whose kernels may start before the one in front has ended
_TOGETHER = 16  # iterations of a loop in a graph
_MOST_SLOTS = 4096  # views of the arena that are kept
_BLOCKS_PER_MULTIPROCESSOR = 16  # beyond that, threads loop over elements


class CudaExecutable(KernelExecutable):
    def __init__(
        self, program: Program, functions: Sequence[c_void_p | None], info: PlanInfo,
        allocator: CudaAllocator, kernels: KernelLoader,
    ) -> None:  # fmt: skip
        """`functions` are those of the launches; None where the host runs the node."""
        self.program, self._functions, self._info = program, functions, info
        self.allocator, self.kernels = allocator, kernels
        super().__init__(info, program.bounds_checks, program.symbols)
        self.arena = allocator.alloc_arena(info.manifest.arena_size)
        self._status = allocator.staging((1,), np.int64)
        self._flag = allocator.staging((1,), np.int64)
        self.table = allocator.alloc((max(self.program.num_args, 1),), np.int64)
        self._uploaded = b""
        self._written: tuple[int, ...] | None = None  # sizes that the table is written for
        self._constants = {b: allocator.put(a) for b, a in self.program.constants.items()}
        self._buffers: dict[Base, Buffer] = {**self._constants, **self._lasting(program.bases)}
        self._addresses: dict[Base, int] = {
            NUMBER: 0,
            ARENA: _address(self.arena),
            STATUS: int(self._status.ctypes.data),
            FLAG: int(self._flag.ctypes.data),
            TABLE: _address(self.table),
            **{b: _address(buffer) for b, buffer in self._buffers.items()},
        }
        self._maps, self._maps_of_runs = MapStore(allocator), MapStore(allocator)
        self._run_maps = self.program.maps_of_runs()
        self._maps_are_placed = False
        most = kernels.gpu.multiprocessors * _BLOCKS_PER_MULTIPROCESSOR
        self.overlaps = kernels.gpu.capability >= _OVERLAP
        # The first kernel waits for all before it: others read args ahead of their own waits.
        self._grids = [
            _geometry(x, most, self.overlaps and i > 0 and not x.waits, self.overlaps)
            for i, x in enumerate(self.program.launches)
        ]
        self.watched_by: CudaRecording | None = None
        self._graphs: dict[tuple[int, int], Graph | None] = {}  # None: has run once
        self._loops: dict[tuple[int, int], Graph] = {}  # of some iterations
        self._at_slots = False  # whether the last run had all inputs and outputs in the arena
        self._slots: dict[tuple[Any, ...], Buffer] = {}

    def _lasting(self, bases: Sequence[Base]) -> dict[Base, Buffer]:
        """Memory that kernels keep. Their blocks wait for each other: all must have room."""
        found: dict[Base, Buffer] = {}
        for base in bases:
            if base[0] == "lasting":
                _, count, blocks = base[1]
                if blocks > self.kernels.gpu.multiprocessors:
                    raise CodegenError(
                        "code for a GPU with more multiprocessors", where="cuda", got=blocks,
                        expected=self.kernels.gpu.multiprocessors,
                    )  # fmt: skip
                found[base] = self.allocator.alloc((count,), np.uint8)
        return found

    @property
    def lir(self) -> Lir:
        return self._info.lir()

    def attach(self, params: Mapping[str, Buffer], states: Mapping[str, Buffer]) -> None:
        for entry, buffer in self.attachments_of(params, states):
            self._place((entry.role, entry.name), buffer)
        self._maps_are_placed = False

    def _place_maps(self) -> None:
        """Describe matrices where they lie now."""
        if not self._maps_are_placed:
            self._describe(self._maps, [b for b in self.program.maps if b not in self._run_maps])
            self._maps_are_placed = True
        if self._run_maps:
            self._maps_of_runs.make_room(len(self._run_maps))
            self._describe(self._maps_of_runs, self._run_maps)

    def _describe(self, store: MapStore, bases: Sequence[Base]) -> None:
        for base in bases:
            where, offset, matrix = self.program.maps[base]
            self._set_address(base, store.address(matrix, self._addresses[where] + offset))

    def _place(self, base: Base, buffer: Buffer) -> None:
        self._buffers[base] = buffer
        self._set_address(base, _address(buffer))

    def _set_address(self, base: Base, address: int) -> None:
        if self._addresses.get(base) != address:
            self._addresses[base], self._written = address, None

    def run(
        self, inputs: Buffers, outputs: Buffers, sizes: Sizes, span: Span | None = None
    ) -> None:
        self._begin(inputs, outputs, sizes)
        self._run_launches(*self.program.part(span), sizes)
        self.check_status_later()

    def slot(self, entry: ManifestEntry, sizes: Mapping[str, int] | None = None) -> Buffer:
        key = (entry.role, entry.name, *[(sizes or {}).get(s) for s in self.symbols])
        found = self._slots.get(key)
        if found is None:
            if len(self._slots) >= _MOST_SLOTS:
                self._slots.clear()
            found = self._slots[key] = super().slot(entry, sizes)
        return found

    def _begin(self, inputs: Buffers, outputs: Buffers, sizes: Sizes) -> None:
        """Check the sizes and write the args that belong to this run."""
        self.check_sizes(*[sizes[s] for s in self.symbols])
        at_slots = all(b is None for b in (*inputs, *outputs))
        if not (at_slots and self._at_slots):
            entries = [*self.manifest.inputs, *self.manifest.outputs]
            for entry, buffer in zip(entries, (*inputs, *outputs), strict=True):
                self._place(
                    (entry.role, entry.name), self.slot(entry, sizes) if buffer is None else buffer
                )
            # where the host runs nodes, it reads slots in the sizes of the run
            self._at_slots = at_slots and not any(x.on_host for x in self.program.launches)
        self._place_maps()
        wanted = tuple([sizes[s] for s in self.symbols])
        if wanted == self._written:
            return
        self._written = wanted
        table = self.program.table(self._addresses, sizes)
        if table != self._uploaded:
            self.allocator.queue_copy_in(_address(self.table), table)
            self._uploaded = table

    def check_status_later(self) -> None:
        if self.program.reports:
            self.allocator.check_later(self, self._raise_status)

    # -- the decode loop ------------------------------------------------------------------------

    def decode_loop(self, spec: LoopSpec) -> DecodeLoop:
        return CudaDecodeLoop(self, spec)

    def fits(self, sizes: Mapping[str, int]) -> bool:
        """Whether kernels stay in their memory with these sizes."""
        return self._check(*[sizes[s] for s in self.symbols]) < 0

    def begin_slots(self, sizes: Mapping[str, int]) -> None:
        """Write the args of a run on arena slots."""
        manifest = self.manifest
        self._begin([None] * len(manifest.inputs), [None] * len(manifest.outputs), sizes)

    def replaced_states(self) -> list[Buffer]:
        """The states that a run changes so that it may not be repeated in vain."""
        return [self._buffers["state", name] for name in self.program.replaced]

    def forget_table(self) -> None:
        """The table of args was changed on the device: it is written anew by the next run."""
        self._uploaded, self._written = b"", None

    def launch_all(self, stream: Stream) -> None:
        """Queue all kernels, one by one."""
        for i in range(len(self.program.launches)):
            self._launch(i, stream)

    # -- launches -------------------------------------------------------------------------------

    def _run_launches(self, first: int, last: int, sizes: Mapping[str, int]) -> None:
        """Queue launches; those between two calls of the host as one graph."""
        if self.watched_by is not None:
            self.watched_by.begin_run(sizes)
        self._walk(first, last, sizes)

    def _walk(self, first: int, last: int, sizes: Mapping[str, int]) -> None:
        at = first
        while at < last:
            end = at
            while end < last and self._functions[end] is not None:
                end += 1
            if end > at:
                self._queue(at, end)
                at = end
            elif self.program.launches[at].on_host:
                self._run_on_host(self.node_of(at), sizes)
                at += 1
            else:
                at = self._jump(at, sizes)

    def _queue(self, first: int, last: int, times: int = 1) -> None:
        """Queue kernels, some times."""
        if self.watched_by is None:
            if times > 1:
                times = self._queue_loop(first, last, times)
            for _ in range(times):
                self._queue_kernels(first, last)
            return
        stream = self.allocator.stream
        for i in (i for _ in range(times) for i in range(first, last)):
            self.watched_by.record(i, stream, partial(self._launch, i, stream))

    def _jump(self, at: int, sizes: Mapping[str, int]) -> int:
        """Take a jump; the launch behind all that it skips or repeats."""
        jump, first = self.program.launches[at].jump, at + 1
        arg = self.program.starts[at]
        if isinstance(jump, Repeat):
            count, end = int(self.program.addends(sizes)[arg]), first + jump.inside
            if all(f is not None for f in self._functions[first:end]):
                self._queue(first, end, count)
            else:
                for _ in range(count):
                    self._walk(first, end, sizes)
            return end
        if isinstance(jump, Branch):
            middle = first + jump.then
            end = middle + jump.otherwise
            self._walk(*((first, middle) if self._told() else (middle, end)), sizes)
            return end
        assert isinstance(jump, While)
        middle, end, done = first + jump.test, first + jump.test + jump.inside, 0
        while True:
            self._walk(first, middle, sizes)
            if not self._told():
                return end
            if done and done == jump.most:
                self._status[0] = self.program.addends(sizes)[arg] or self._status[0]
                return end
            self._walk(middle, end, sizes)
            done += 1

    def _told(self) -> bool:
        """What the last kernel told the host."""
        self.allocator.stream.synchronize()
        return bool(self._flag[0])

    def _queue_loop(self, first: int, last: int, times: int) -> int:
        """Queue kernels as graphs of several iterations; how many are left."""
        if times < _TOGETHER:
            return times
        if (first, last) not in self._loops:
            stream = Stream(self.allocator.gpu)
            with stream.capture() as graph:
                for i in (i for _ in range(_TOGETHER) for i in range(first, last)):
                    self._launch(i, stream)
            self._loops[first, last] = graph
        for _ in range(times // _TOGETHER):
            self._loops[first, last].launch(self.allocator.stream)
        return times % _TOGETHER

    def _queue_kernels(self, first: int, last: int) -> None:
        key = (first, last)
        graph = self._graphs.get(key)
        if graph is None and key in self._graphs and last - first > 1:
            graph = self._graphs[key] = self._captured(first, last)
        if graph is not None:
            graph.launch(self.allocator.stream)
            return
        for i in range(first, last):
            self._launch(i, self.allocator.stream)
        self._graphs[key] = None

    def _captured(self, first: int, last: int) -> Graph:
        """The launches as a graph, recorded on a stream that nothing else uses."""
        stream = Stream(self.allocator.gpu)
        with stream.capture() as graph:
            for i in range(first, last):
                self._launch(i, stream)
        return graph

    def _launch(self, i: int, stream: Stream) -> None:
        function = self._functions[i]
        assert function is not None
        launch(
            stream, function, self._grids[i], [_address(self.table) + 8 * self.program.starts[i]]
        )

    def node_of(self, i: int) -> Node:
        """The node of a launch."""
        return self.lir.graph.nodes[self.program.nodes[i]]

    # -- nodes that the host runs ---------------------------------------------------------------

    def _run_on_host(self, node: Node, sizes: Mapping[str, int]) -> None:
        """Copy the operands out, run the op's reference, copy the results in."""
        operands = [self._buffer(v, sizes).copy_out() for v in node.inputs]
        with np.errstate(all="ignore"):
            results = bind_op(node.op, dict(sizes)).reference(*operands)
        for value, result in zip(
            node.outputs, results if isinstance(results, tuple) else (results,), strict=True
        ):
            self._buffer(value, sizes).copy_in(np.asarray(result))

    def _buffer(self, value: Value, sizes: Mapping[str, int]) -> Buffer:
        """The memory of a value that lies row-major."""
        base, start = place_of(self.lir, value)
        whole = self.arena if base == ARENA else self._buffers[base]
        shape = value.shape.bind(sizes)
        return whole.view(evaluate(start, sizes), shape.static_dims, shape.dtype.numpy)

    # -- checks ---------------------------------------------------------------------------------

    def _launch_nodes(self) -> Sequence[int]:
        return self.program.nodes

    def _results(
        self, inputs: Buffers, outputs: Buffers, sizes: Sizes
    ) -> Callable[[Node], list[Array]]:
        def read(node: Node) -> list[Array]:
            """Results that lie row-major."""
            views = [(v, self.lir.slots[v].view) for v in node.outputs]
            plain = [v for v, view in views if view is None or is_plain(view, v.shape)]
            return [self._buffer(v, sizes).copy_out() for v in plain]

        return read

    def _raise_status(self) -> None:
        found, self._status[0] = int(self._status[0]), 0
        if found:
            raise_bad_index(*self.program.reports[found])

    def recording(self) -> AbstractContextManager[CudaRecording]:
        return CudaRecording(self).watch()


def _geometry(x: KernelLaunch, most: int, overlaps: bool, can_overlap: bool) -> Launch:
    """Blocks and threads; nests have at most `most` blocks."""
    if x.kernel is not None and x.kernel.by_blocks:
        early = overlaps or (can_overlap and x.kernel.starts_early)
        return Launch(x.blocks, x.kernel.threads, x.kernel.shared, early)
    shared = 0 if x.kernel is None else x.kernel.shared
    return Launch(min(-(-max(x.threads, 1) // THREADS), most), THREADS, shared, overlaps)


def _address(buffer: Buffer) -> int:
    assert isinstance(buffer, DeviceBuffer)
    return int(buffer.handle) + buffer.offset
