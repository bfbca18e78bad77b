"""The decode loop on a GPU: several runs are queued as one graph, and the host reads tokens.

While the host reads the tokens of some runs, the device is at the next ones. A last kernel of each
run logs the token, carries outputs to inputs, and changes the table of args
for the next position: all args grow by a constant from one position to the next. Runs behind a
token in `stop` are wasted, but harm nothing: the KV cache is written again at these positions, and
carried values are put back. States that every run replaces, those of recurrent layers, are copied
before the runs whose tokens the host reads at once; behind a stop they are put back, and the runs
up to it are done again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping
from ctypes import c_void_p
from typing import TYPE_CHECKING, Any

import numpy as np

from rlx.backends.buffer import Buffer, DeviceBuffer
from rlx.backends.cuda.builder import KernelModule
from rlx.backends.cuda.driver import Graph, Launch, Stream, launch
from rlx.backends.cuda.kernel import BlockKernel
from rlx.backends.decode_loop import DecodeLoop, LoopSpec
from rlx.llvm.builder import i32, i64
from rlx.support.records import dataclass

if TYPE_CHECKING:
    from rlx.backends.cuda.executable import CudaExecutable

TOGETHER = 8  # runs of a graph
RUNS = 32  # whose tokens the host reads at once, while as many are queued behind them
_FEW = 16  # launches of a run, of which a graph has RUNS
_UNIT = 4  # bytes


@dataclass(frozen=True)
class Advance(BlockKernel):
    """args: table of args, places in it (i32), slopes (i64), their number, log, number of runs
    logged, emitted value, carried words, the target and source of each

    A row of the log has the emitted value and the carried words, of 4 bytes each. The log has rows
    for twice RUNS, which are used in turns.
    """

    @property
    def label(self) -> str:
        return "advance"

    def emit(self, m: KernelModule) -> None:
        f = m.begin_block(self.threads)
        args = f["args"]
        table, places, slopes = (f.arg(args, i) for i in range(3))
        count = f.arg(args, 3, i32)
        log, logged, emitted = (f.arg(args, i) for i in (4, 5, 6))
        words, pairs = f.arg(args, 7, i32), f.arg(args, 8)
        f.let_next_start()
        f.wait_for_previous()
        for i in f.range(f.thread(), count, self.threads):
            place = f.load(f.gep(places, i.to(i64), 4), i32)
            to = f.gep(table, place.to(i64), 8)
            f.store(f.load(to, i64) + f.load(f.gep(slopes, i.to(i64), 8), i64), to)
        number = f.load(logged, i64)
        row = f.gep(log, (number & 2 * RUNS - 1) * (words.to(i64) + 1), _UNIT)
        f.barrier()  # all have read the number
        for i in f.range(f.thread(), words, self.threads):
            pair = f.gep(pairs, i.to(i64), 16)
            target, source = f.arg(pair, 0), f.arg(pair, 1)
            value = f.load(source, i32)
            f.store(value, target)
            f.store(value, f.gep(row, i.to(i64) + 1, _UNIT))

        def count_run() -> None:
            f.store(f.load(emitted, i32), row)
            f.store(number + 1, logged)

        f.if_(f.thread().eq(0), count_run)


ADVANCE = Advance()


class CudaDecodeLoop(DecodeLoop):
    def __init__(self, executable: CudaExecutable, spec: LoopSpec) -> None:
        super().__init__(executable, spec)
        self._cuda = executable
        self._native = self._can_queue()
        self._graphs: dict[int, Graph] = {}
        if self._native:
            self._prepare()

    def _can_queue(self) -> bool:
        """Whether runs depend on the counter alone, linearly, without the host, and may be run in
        vain."""
        program = self._cuda.program
        return (
            program.symbols in ([], [self.spec.counter])
            and program.can_repeat
            and all(t.nbytes % _UNIT == 0 and t.nbytes <= 256 for t, _ in self.carried)
        )

    def _prepare(self) -> None:
        cuda, allocator = self._cuda, self._cuda.allocator
        kernel = ADVANCE
        self._function = cuda.kernels.functions([kernel])[kernel]
        self._kernel = kernel
        counter = self.spec.counter
        tables = [cuda.program.addends({counter: n}) for n in (0, 1)]
        slope = tables[1] - tables[0]
        places = np.flatnonzero(slope)
        self._copies: list[list[Buffer]] = []  # of what runs replace, for both halves of the log
        words = [
            (_address(target) + at, _address(source) + at)
            for target, source in self.carried
            for at in range(0, target.nbytes, _UNIT)
        ]
        width = 1 + len(words)
        self._log = allocator.alloc((2 * RUNS, width), np.int32)
        half = RUNS * width * _UNIT
        self._halves = [self._log.view(half * i, (RUNS, width), np.int32) for i in range(2)]
        self._logged = allocator.alloc((1,), np.int64)
        self._keep = [
            allocator.put(np.append(places, 0).astype(np.int32)),
            allocator.put(np.append(slope[places], 0).astype(np.int64)),
            allocator.put(np.array([*words, (0, 0)], np.int64)),
        ]
        given = [_address(b) for b in (cuda.table, *self._keep[:2])]
        given += [len(places), *map(_address, (self._log, self._logged, self.emitted))]
        given += [len(words), _address(self._keep[2])]
        self._args = allocator.put(np.array(given, np.int64))

    def run(self, sizes: Mapping[str, int], count: int, stop: Collection[int]) -> list[int]:
        last = {**sizes, self.spec.counter: sizes[self.spec.counter] + count - 1}
        if not self._native or self._cuda.watched_by is not None or not self._cuda.fits(last):
            return super().run(sizes, count, stop)
        found: list[int] = []
        self._cuda.begin_slots(sizes)
        self._logged.zero()
        left = deque([min(RUNS, count - i) for i in range(0, count, RUNS)])
        waiting = deque[tuple[int, int, Callable[[], Any]]]()
        queued = 0
        while left or waiting:
            while left and len(waiting) < 2:
                half, number = queued % 2, left.popleft()
                if stop and count > 1:
                    self._keep_states(half)
                waiting.append((number, half, self._queue(number, self._halves[half])))
                queued += 1
            number, half, read = waiting.popleft()
            rows = read()[:number]
            tokens = rows[:, 0].tolist()
            ends = [i for i, token in enumerate(tokens) if token in stop]
            if ends:
                position = sizes[self.spec.counter] + len(found)
                found += tokens[: ends[0] + 1]
                is_last = ends[0] == number - 1 and not waiting
                left.clear()
                while waiting:
                    waiting.popleft()[2]()
                if is_last:
                    pass
                elif self._cuda.program.replaced:
                    self._again({**sizes, self.spec.counter: position}, ends[0] + 1, half)
                else:
                    self._restore(rows[ends[0]])  # behind what is queued
                break
            found += tokens
        self._cuda.forget_table()
        return found

    # -- states that runs replace ---------------------------------------------------------------

    def _replaced(self) -> list[Buffer]:
        """What a run replaces: states, and with them the values that it is given."""
        states = self._cuda.replaced_states()
        return [*states, *(target for target, _ in self.carried)] if states else []

    def _keep_states(self, half: int) -> None:
        """Copy what the runs of a half of the log replace."""
        now = self._replaced()
        if now and not self._copies:
            memory = self._cuda.allocator
            self._copies = [[memory.alloc(b.shape, b.dtype) for b in now] for _ in range(2)]
        for copy, buffer in zip(self._copies[half] if now else [], now, strict=True):
            copy.allocator.copy(copy, buffer)

    def _again(self, sizes: Mapping[str, int], count: int, half: int) -> None:
        """Do the first runs of a half once more, and no others."""
        for copy, buffer in zip(self._copies[half], self._replaced(), strict=True):
            copy.allocator.copy(buffer, copy)
        self._cuda.forget_table()
        self._cuda.begin_slots(sizes)
        self._queue(count, self._halves[half])()

    def _queue(self, count: int, log: Buffer) -> Callable[[], Any]:
        """Queue runs; what waits for them and reads their half of the log."""
        sizes = (RUNS, TOGETHER, 1) if len(self._cuda.program.launches) <= _FEW else (TOGETHER, 1)
        for size in sizes:
            graph = self._graph(size) if count >= size else None
            while graph is not None and count >= size:
                graph.launch(self._cuda.allocator.stream)
                count -= size
        self._cuda.check_status_later()
        return self._cuda.allocator.read_later(log)

    def _graph(self, size: int) -> Graph:
        """So many runs as a graph."""
        if size not in self._graphs:
            stream = Stream(self._cuda.allocator.gpu)
            with stream.capture() as graph:
                for _ in range(size):
                    self._cuda.launch_all(stream)
                    self._advance(stream)
            self._graphs[size] = graph
        return self._graphs[size]

    def _advance(self, stream: Stream) -> None:
        how = Launch(1, self._kernel.threads, 0, self._cuda.overlaps)
        function: c_void_p = self._function
        launch(stream, function, how, [_address(self._args)])

    def _restore(self, row: Any) -> None:
        """Carry the values of one run, instead of those of the last."""
        at = 1
        for target, _ in self.carried:
            words = target.nbytes // _UNIT
            raw = np.ascontiguousarray(row[at : at + words]).view(np.uint8)
            target.copy_in(raw.view(target.dtype).reshape(target.shape))
            at += words


def _address(buffer: Buffer) -> int:
    assert isinstance(buffer, DeviceBuffer)
    return int(buffer.handle) + buffer.offset
