"""A device whose memory the host cannot reach, to keep the backend protocol honest.

Its bytes lie scrambled in a private store. Copies and kernels, and nothing else, read and write
them, on one in-order stream that runs beside the host: a thread. Kernels are the references of ops.
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

import rlx
from rlx.backends.base import Backend, Span
from rlx.backends.buffer import Buffer, DeviceAllocator, DeviceBuffer
from rlx.backends.reference import ReferenceExecutable
from rlx.ir.graph import Graph
from rlx.ir.interp import Hook
from rlx.ir.lir import Lir
from rlx.ir.node import Node
from rlx.specialize.options import CompileOptions

_SCRAMBLE = 0xA5
Work = Callable[[], None]


class Stream:
    """Work in order, done by a thread; an error is raised where the host next waits."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Work] = queue.SimpleQueue()
        self._error: BaseException | None = None
        threading.Thread(target=self._serve, name="opaque-stream", daemon=True).start()

    def submit(self, work: Work) -> None:
        self._queue.put(work)

    def wait(self) -> None:
        done = threading.Event()
        self._queue.put(done.set)
        assert done.wait(60), "the stream hangs"
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _serve(self) -> None:
        while True:
            try:
                self._queue.get()()
            except BaseException as error:
                self._error = self._error or error


class OpaqueMemory(DeviceAllocator):
    device = "opaque"

    def __init__(self, limit: int = 1 << 30) -> None:
        self.limit, self.used = limit, 0
        self.copied_in = self.copied_out = 0  # bytes
        self.stream = Stream()
        self._store: dict[int, np.ndarray] = {}
        self._handles = itertools.count(1)

    def _alloc(self, nbytes: int) -> int:
        if self.used + nbytes > self.limit:
            raise MemoryError
        self.used += nbytes
        handle = next(self._handles)
        self._store[handle] = np.full(nbytes, 0x5C, np.uint8)  # whatever was there before
        return handle

    def _free(self, handle: int) -> None:
        def work() -> None:
            self.used -= len(self._store.pop(handle))

        self.stream.submit(work)

    def _copy_in(self, handle: int, offset: int, data: memoryview) -> None:
        raw = np.array(data, np.uint8) ^ _SCRAMBLE
        self.copied_in += len(raw)
        self.stream.submit(lambda: self._write(handle, offset, raw))

    def _copy_out(self, data: memoryview, handle: int, offset: int) -> None:
        out = np.asarray(data)
        self.copied_out += len(out)

        def work() -> None:
            out[:] = self._store[handle][offset : offset + len(out)] ^ _SCRAMBLE

        self.stream.submit(work)
        self.stream.wait()

    def _copy(self, target: int, at: int, source: int, offset: int, nbytes: int) -> None:
        self.stream.submit(
            lambda: self._write(target, at, self._store[source][offset : offset + nbytes].copy())
        )

    def _zero(self, handle: int, offset: int, nbytes: int) -> None:
        raw = np.full(nbytes, _SCRAMBLE, np.uint8)
        self.stream.submit(lambda: self._write(handle, offset, raw))

    def _write(self, handle: int, offset: int, raw: np.ndarray) -> None:
        whole = self._store[handle]
        assert 0 <= offset <= offset + len(raw) <= len(whole), "a write outside its allocation"
        whole[offset : offset + len(raw)] = raw

    def synchronize(self) -> None:
        self.stream.wait()

    def from_dlpack(self, value: Any) -> DeviceBuffer | None:
        return value.buffer if isinstance(value, OpaqueTensor) else None

    def free_bytes(self) -> int:
        return self.limit - self.used

    # -- for kernels, on the stream ---------------------------------------------------------------

    def load(self, buffer: DeviceBuffer) -> np.ndarray:
        raw = self._store[buffer.handle][buffer.offset : buffer.offset + buffer.nbytes] ^ _SCRAMBLE
        return raw.view(buffer.dtype).reshape(buffer.shape)

    def store(self, buffer: DeviceBuffer, array: np.ndarray) -> None:
        assert (array.shape, array.dtype) == (buffer.shape, buffer.dtype)
        raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8) ^ _SCRAMBLE
        self._write(buffer.handle, buffer.offset, raw)


class OpaqueTensor:
    """An array of another library in this device's memory."""

    def __init__(self, buffer: DeviceBuffer) -> None:
        self.buffer = buffer

    def __dlpack__(self, **options: Any) -> Any:
        raise BufferError("not for the host")


class OpaqueExecutable(ReferenceExecutable):
    def __init__(self, lir: Lir, memory: OpaqueMemory) -> None:
        super().__init__(lir, memory)
        self._memory = memory

    def attach(self, params: Mapping[str, Buffer], states: Mapping[str, Buffer]) -> None:
        given, own_states, plain = dict(params), dict(states), super().attach
        self._memory.stream.submit(lambda: plain(given, own_states))

    def run(
        self, inputs: Sequence[Buffer | None], outputs: Sequence[Buffer | None],
        sizes: Mapping[str, int], span: Span | None = None, on_node: Hook | None = None,
    ) -> None:  # fmt: skip
        given, results, bound, plain = list(inputs), list(outputs), dict(sizes), super().run
        self._memory.stream.submit(lambda: plain(given, results, bound, span, on_node))

    def load(self, buffer: Any) -> np.ndarray:
        return self._memory.load(buffer)

    def store(self, buffer: Any, array: np.ndarray) -> None:
        self._memory.store(buffer, array)


class OpaqueBackend(Backend):
    name = "opaque"

    def __init__(self) -> None:
        self.memory = OpaqueMemory()

    @property
    def allocator(self) -> OpaqueMemory:
        return self.memory

    def has_native(self, node: Node) -> bool:
        return True

    def prepare(self, graph: Graph, params: Mapping[str, np.ndarray]) -> dict[str, Buffer]:
        """Prepared parameters are left in the device's memory."""
        prepared = super().prepare(graph, params)
        return {name: self.memory.put(array) for name, array in prepared.items()}

    def compile(self, lir: Lir, options: CompileOptions) -> OpaqueExecutable:
        return OpaqueExecutable(lir, self.memory)


if "opaque" not in rlx.available_devices():
    rlx.register_backend("opaque", OpaqueBackend)
