"""Blocks of a GPU on the host: kernels of blocks are executed as they are emitted.

The emitter of a kernel is Python code that calls the builder. Here every call computes instead of
writing an instruction, with an array of one number for each thread of all blocks. Memory is that of
the fake driver: an access outside an allocation, or one that is not aligned, is an error.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from rlx.backends.cuda.builder import (
    FIXED_LIMIT,
    FIXED_NAN,
    FIXED_SCALE,
    WARP,
    BlockFunction,
    KernelModule,
    Place,
)
from rlx.backends.cuda.kernel import BlockKernel
from rlx.ir.op import lookup
from rlx.llvm.builder import Type, Value, f32, i1, i32, i64, ptr, void
from rlx.llvm.target import Target

Inside = Callable[[Any, int], None]  # addresses, bytes
_NUMPY: dict[str, Any] = {
    "i1": np.bool_, "i8": np.int8, "i16": np.int16, "i32": np.int32, "i64": np.int64,
    "half": np.float16, "bfloat": ml_dtypes.bfloat16, "float": np.float32, "double": np.float64,
    "ptr": np.int64,
}  # fmt: skip
_COMPARE = {
    "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "eq": np.equal, "ne": np.not_equal,
}  # fmt: skip


class SimValue(Value):
    """A number of each thread: [threads], or [threads, lanes]."""

    __slots__ = ("data",)

    def __init__(self, data: Any, type_: Type, fn: Simulated) -> None:
        super().__init__("sim", type_, fn)
        self.data = data

    def __neg__(self) -> SimValue:
        return SimValue(-self.data, self.type, self.fn)  # type: ignore[arg-type]


def data_of(value: Value) -> Any:
    assert isinstance(value, SimValue)
    return value.data


class Simulated(BlockFunction):
    """Blocks of threads that run while the kernel is 'emitted'."""

    def __init__(
        self, module: SimulatedModule, threads: int, shared: int, args: int, inside: Inside
    ) -> None:
        super().__init__(module, "kernel", [("args", ptr)], void, False, False)
        self.threads, self.inside, self.size = threads, inside, shared
        self.scheduler = module.scheduler
        self.count = threads * module.blocks
        self.own = np.arange(self.count) // threads * shared  # where a block's shared memory is
        self.active = np.ones(self.count, bool)
        self.bytes = np.full(shared * module.blocks + 1024, 0xCD, np.uint8)
        self.pending: list[tuple[Any, list[tuple[Any, ...]]]] = []  # who has them, copies
        self.open: list[tuple[Any, ...]] = []
        self.fenced = False
        self.waits = np.zeros(self.count, bool)  # threads that wait for the kernel in front
        self.groups = 0
        self.phases: dict[int, list[tuple[int, list[tuple[Any, Any]]]]] = {}  # of mbarriers
        self.passed: dict[int, int] = {}
        self.params = {"args": self.make(args, ptr)}  # type: ignore[dict-item]

    # -- values -----------------------------------------------------------------------------------

    def make(self, data: Any, type_: Type) -> SimValue:
        dims = (self.count,) if type_.lanes == 1 else (self.count, type_.lanes)
        element = _NUMPY[type_.scalar.name]
        made = np.asarray(data).astype(element, copy=False)
        return SimValue(made if made.shape == dims else np.broadcast_to(made, dims), type_, self)

    def const(self, value: Any, type_: Type = i64) -> SimValue:
        if isinstance(value, SimValue):
            assert value.type is type_, (value.type, type_)
            return value
        if type_.is_int and isinstance(value, int) and type_.bits > 1:
            value = (value + (1 << type_.bits - 1)) % (1 << type_.bits) - (1 << type_.bits - 1)
        made = self.make(np.array(value), type_)
        if type_.is_int and isinstance(value, int):
            made.const = value
        return made

    def instr(self, text: str, type_: Type) -> Value:
        raise NotImplementedError(text)

    def effect(self, text: str) -> None:
        raise NotImplementedError(text)

    def binary(self, op: str, a: Value, b: Any) -> SimValue:
        other = self.const(b, a.type)
        x, y = narrowed(data_of(a), other.data)
        with np.errstate(all="ignore"):
            return self.make(_binary(op, a.type, x, y), a.type)

    def compare(self, predicate: str, a: Value, b: Any) -> SimValue:
        x, y = narrowed(data_of(a), self.const(b, a.type).data)
        if predicate in ("ult", "ule", "ugt", "uge") and a.type.is_int:
            x, y, predicate = _unsigned(x), _unsigned(y), predicate[1:]
        if predicate == "uno":
            return self.make(np.isnan(x) | np.isnan(y), a.type.mask)
        with np.errstate(all="ignore"):
            return self.make(_COMPARE[predicate](x, y), a.type.mask)

    def select(self, mask: Value, a: Any, b: Any) -> SimValue:
        type_ = a.type if isinstance(a, Value) else b.type
        chosen, x, y = narrowed(data_of(mask), self.const(a, type_).data, self.const(b, type_).data)
        if type_.lanes > 1 and mask.type.lanes == 1:
            chosen = chosen[:, None]
        return self.make(np.where(chosen, x, y), type_)

    def convert(self, value: Value, type_: Type, signed: bool = True) -> SimValue:
        target = type_ if type_.lanes > 1 else type_.with_lanes(value.type.lanes)
        [x] = narrowed(data_of(value))
        if target.scalar is i1:
            return self.make(x != 0, target)
        if value.type.is_int and not signed and value.type.bits > 1:
            x = _unsigned(x)
        if value.type.is_float and target.is_int:
            x = np.where(np.isfinite(x), x, 0).astype(np.float64)
        with np.errstate(all="ignore"):
            return self.make(x, target)

    def bitcast(self, value: Value, type_: Type) -> SimValue:
        if value.type is type_:
            assert isinstance(value, SimValue)
            return value
        element = _NUMPY[type_.scalar.name]
        return self.make(np.ascontiguousarray(data_of(value)).view(element).reshape(
            (self.count, -1) if type_.lanes > 1 else (self.count,)), type_)  # fmt: skip

    def fma(self, a: Value, b: Any, c: Any) -> SimValue:
        given = narrowed(*(self.const(v, a.type).data for v in (a, b, c)))
        with np.errstate(all="ignore"):
            x, y, z = (np.asarray(v, np.float64) for v in given)
            return self.make(x * y + z, a.type)

    def intrinsic(self, name: str, result: Type, *args: Value) -> Value:
        base = name.split(".")[1]
        x = narrowed(*(data_of(a) for a in args))
        simple: dict[str, Any] = {
            "smin": np.minimum, "smax": np.maximum, "fabs": np.abs, "sqrt": np.sqrt,
            "umin": lambda a, b: np.minimum(_unsigned(a), _unsigned(b)),
            "umax": lambda a, b: np.maximum(_unsigned(a), _unsigned(b)),
        }  # fmt: skip
        with np.errstate(all="ignore"):
            return self.make(simple[base](*x), result)

    def extract(self, vector: Value, lane: Any) -> SimValue:
        if vector.type.lanes == 1:
            assert isinstance(vector, SimValue)
            return vector
        return self.make(data_of(vector)[:, lane], vector.type.scalar)

    def insert(self, vector: Value, value: Value, lane: Any) -> SimValue:
        made = np.array(data_of(vector))
        made[:, lane] = data_of(value)
        return self.make(made, vector.type)

    def splat(self, value: Value, lanes: int) -> SimValue:
        return self.make(np.repeat(data_of(value)[:, None], lanes, 1), value.type.with_lanes(lanes))

    # -- memory -----------------------------------------------------------------------------------

    def gep(self, base: Value, index: Any, scale: int | Type = 1) -> SimValue:
        size = scale if isinstance(scale, int) else scale.bytes
        if isinstance(index, int):
            [start] = narrowed(data_of(base))
            return self.make(start + index * size, ptr)
        start, step = narrowed(data_of(base), data_of(index))
        return self.make(start + step.astype(np.int64) * size, ptr)

    def load(
        self, base: Value, type_: Type, offset: Any = 0, align: int = 0, nontemporal: bool = False
    ) -> SimValue:
        return self._load(data_of(self.gep(base, offset)), type_, align)

    def _load(self, address: Any, type_: Type, align: int) -> SimValue:
        element = np.dtype(_NUMPY[type_.scalar.name])
        wanted = align or element.itemsize
        alike = not address.strides[0]
        used = self._checked(address[:1] if alike else address, type_, wanted, alike)
        memory, low = bytes_at(used, type_.bytes)
        unit = min(wanted, element.itemsize)  # what is copied at a time
        index = ((used - low) // unit)[:, None] + np.arange(type_.bytes // unit)
        flat = memory.view(f"u{unit}")[index]
        if len(flat) != self.count and not alike:
            some, flat = flat, np.zeros((self.count, flat.shape[1]), flat.dtype)
            flat[self.active] = some
        numbers = flat.view(element)
        return self.make(numbers if type_.lanes > 1 else numbers[:, 0], type_)

    def _checked(self, address: Any, type_: Type, align: int, alike: bool = False) -> Any:
        """The addresses that are used; `alike`: there is one, of all threads."""
        used = address if alike else address[self.active]
        assert (used % align == 0).all(), "not aligned"
        self.inside(used, type_.bytes)
        return used

    def store(
        self, value: Value, base: Value, offset: Any = 0, align: int = 0,
        nontemporal: bool = False,
    ) -> None:  # fmt: skip
        address, type_ = data_of(self.gep(base, offset)), value.type
        used = self._checked(address, type_, align or type_.scalar.bits // 8)
        raw = np.ascontiguousarray(data_of(value)).reshape(self.count, -1).view(np.uint8)
        memory, low = bytes_at(used, type_.bytes)
        memory[(used - low)[:, None] + np.arange(type_.bytes)] = raw[self.active]

    def arg(self, args: Value, index: int, type_: Type = ptr) -> SimValue:
        if type_ is f32:
            return self.bitcast(self.load(args, i64, 8 * index).to(i32), f32)
        return self.load(args, ptr, 8 * index) if type_ is ptr else self.convert(
            self.load(args, i64, 8 * index), type_)  # fmt: skip

    def load_shared(self, address: Value, type_: Type, offset: int = 0, align: int = 0) -> SimValue:
        element = np.dtype(_NUMPY[type_.scalar.name])
        at = data_of(address).astype(np.int64) + offset
        self._check_shared(at, type_.bytes, align or element.itemsize)
        at = np.where(self.active, at + self.own, 0)
        rows = self.bytes[at[:, None] + np.arange(type_.bytes)]
        flat = np.ascontiguousarray(rows).view(element)
        return self.make(flat if type_.lanes > 1 else flat[:, 0], type_)

    def load_shared_pointer(self, address: Value, offset: int = 0) -> SimValue:
        return self.load_shared(address, ptr, offset, align=8)

    def _check_shared(self, at: Any, size: int, align: int) -> None:
        used = at[self.active]
        assert (used % align == 0).all(), "shared memory not aligned"
        assert (used >= 0).all() and (used + size <= self.size).all(), "outside shared memory"

    def store_shared(self, value: Value, address: Value, offset: int = 0, align: int = 0) -> None:
        type_, at = value.type, data_of(address).astype(np.int64) + offset
        self._check_shared(at, type_.bytes, align or type_.scalar.bits // 8)
        raw = np.ascontiguousarray(data_of(value)).reshape(self.count, -1).view(np.uint8)
        places = (at + self.own)[self.active][:, None] + np.arange(type_.bytes)
        self.bytes[places] = raw[self.active]

    def add_shared(self, address: Value, value: Value) -> SimValue:
        element = data_of(value).dtype
        at = data_of(address).astype(np.int64)
        self._check_shared(at, element.itemsize, element.itemsize)
        before = np.zeros(self.count, element)
        for t in np.flatnonzero(self.active):
            cell = self.bytes[at[t] + self.own[t] :][: element.itemsize].view(element)
            before[t] = cell[0]
            cell[0] += data_of(value)[t]
        return self.make(before, value.type)

    def copy_async(self, address: Value, source: Value, valid: Value | None = None) -> None:
        at = data_of(address).astype(np.int64)
        self._check_shared(at, 16, 16)
        size = np.full(self.count, 16) if valid is None else data_of(valid)
        start = data_of(source)
        assert (start[self.active] % 16 == 0).all(), "not aligned"
        assert ((size >= 0) & (size <= 16))[self.active].all()
        for n in np.unique(size[self.active]):
            if n:
                self.inside(start[self.active & (size == n)], int(n))
        self.open.append((self.active, at + self.own, start, size))

    def commit_copies(self) -> None:
        self._require_blocks()
        self.pending.append((self.active.copy(), self.open))
        self.open = []

    def wait_copies(self, groups: int) -> None:
        """Copies arrive no sooner than they are waited for."""
        later = np.zeros(self.count, int)
        for owners, copies in reversed(self.pending):
            done = self.active & owners & (later >= groups)
            later += owners
            for mask, at, start, size in copies:
                for t in np.flatnonzero(mask & done):
                    data = ctypes.string_at(int(start[t]), int(size[t])) + bytes(16 - size[t])
                    self.bytes[at[t] : at[t] + 16] = np.frombuffer(data, np.uint8)
            owners &= ~done
        self.pending = [p for p in self.pending if p[0].any()]

    # -- tiles that are copied by themselves ------------------------------------------------------
    # Threads that copy run to their end before those that wait for the copies: a phase is kept
    # until its parity is waited for.

    def init_mbarrier(self, address: Value, arrivals: int) -> None:
        for t in np.flatnonzero(self.active):
            self.phases[int(self.own[t] + data_of(address)[t])] = []
            self.passed[int(self.own[t] + data_of(address)[t])] = 0

    def fence_mbarriers(self) -> None:
        pass

    def arrive(self, address: Value) -> None:
        for t in np.flatnonzero(self.active):
            assert int(self.own[t] + data_of(address)[t]) in self.phases, "no mbarrier"

    def expect_bytes(self, address: Value, count: int) -> None:
        for t in np.flatnonzero(self.active):
            self.phases[int(self.own[t] + data_of(address)[t])].append((count, []))

    def wait_phase(self, address: Value, parity: Value) -> None:
        places = np.where(self.active, self.own + data_of(address), -1)
        for place in np.unique(places[places >= 0]).tolist():
            waited = self.phases[place]
            if not waited:
                continue  # one of those that are told when a stage is free
            wanted = np.unique(data_of(parity)[places == place])
            assert wanted.tolist() == [self.passed[place] % 2], "not the phase that comes next"
            count, copies = waited.pop(0)
            assert sum(data.size for _, data in copies) == count, "other bytes than expected"
            for at, data in copies:
                self.bytes[at] = data
            self.passed[place] += 1

    def watch_phase(self, address: Value, parity: Value) -> None:
        pass

    def copy_bytes(self, address: Value, source: Value, count: int, mbarrier: Value) -> None:
        at, of = data_of(address).astype(np.int64), data_of(source)
        self._check_shared(at, count, 16)
        assert count % 16 == 0 and (of[self.active] % 16 == 0).all(), "not aligned"
        self.inside(of[self.active], count)
        for t in np.flatnonzero(self.active):
            data = np.frombuffer(ctypes.string_at(int(of[t]), count), np.uint8)
            place = int(data_of(mbarrier)[t] + self.own[t])
            self.phases[place][-1][1].append((at[t] + self.own[t] + np.arange(count), data))

    def fence_copies(self) -> None:
        pass

    def acquire_map(self, tensor_map: Value) -> None:
        self.inside(data_of(tensor_map)[self.active], 128)

    def copy_tile(
        self, address: Value, tensor_map: Value, column: Value, row: Value, mbarrier: Value
    ) -> None:
        for t in np.flatnonzero(self.active):
            to, place = (int(data_of(v)[t] + self.own[t]) for v in (address, mbarrier))
            tile, is_permuted = mapped_tile(
                int(data_of(tensor_map)[t]), int(data_of(row)[t]), int(data_of(column)[t]),
                self.inside,
            )  # fmt: skip
            assert 2 * int(data_of(column)[t]) % 16 == 0, "a tile does not begin at 16 bytes"
            assert tile.shape[1] % 16 == 0 and tile.shape[0] <= 256, "no such tile"
            at = data_of(address).astype(np.int64)
            self._check_shared(at, 1, 1024 if is_permuted else 128)
            linear = int(data_of(address)[t]) + np.arange(tile.size)
            assert linear[-1] < self.size, "outside shared memory"
            permuted = linear ^ ((linear >> 7 & 7) << 4) if is_permuted else linear
            self.phases[place][-1][1].append((permuted + to - linear[0], tile.reshape(-1)))

    def uniform(self, value: Value) -> SimValue:
        self._require_warps()
        whole = data_of(value).reshape(-1, WARP)
        assert (whole == whole[:, :1]).all(), "not the same in a warp"
        return self.make(data_of(value), value.type)

    def take_registers(self, count: int, more: bool) -> None:
        self._require_warps()

    # -- flow -------------------------------------------------------------------------------------

    def if_(self, condition: Value, then: Any, orelse: Any = None) -> list[Value]:
        before, flags = self.active, data_of(condition)
        results = []
        for body, mask in ((then, flags & before), (orelse, ~flags & before)):
            if body is None or not mask.any():
                continue
            self.active = mask
            made = body()
            listed = [] if made is None else [made] if isinstance(made, Value) else list(made)
            results.append((mask, listed))
        self.active = before
        return self._merged(results)

    def when(self, condition: Value) -> Iterator[None]:
        before = self.active
        self.active = before & data_of(condition)
        if self.active.any():
            yield
        self.active = before

    def _merged(self, results: list[tuple[Any, list[Value]]]) -> list[Value]:
        if not results:
            return []
        merged = list(results[0][1])
        for mask, values in results[1:]:
            merged = [self._choose(mask, b, a) for a, b in zip(merged, values, strict=True)]
        return merged

    def _choose(self, mask: Any, a: Value, b: Value) -> SimValue:
        chosen = mask[:, None] if a.type.lanes > 1 else mask
        return self.make(np.where(chosen, data_of(a), data_of(b)), a.type)

    def loop(
        self, lo: Any, hi: Any, step: Any, carry: Sequence[Value], body: Any, guard: bool = True
    ) -> list[Value]:
        index = next((v.type for v in (lo, hi, step) if isinstance(v, Value)), i64)
        at, stop, by = (self.const(v, index).data for v in (lo, hi, step))
        before, values, first = self.active, list(carry), not guard
        while True:
            mask = before & ((at < stop) | first)
            first = False
            if not mask.any():
                break
            self.active = mask
            made = body(self.make(at, index), *values)
            listed = [] if made is None else [made] if isinstance(made, Value) else list(made)
            values = [self._choose(mask, n, o) for n, o in zip(listed, values, strict=True)]
            at = np.where(mask, at + by, at)
        self.active = before
        return values

    def range(self, lo: Any, hi: Any, step: Any = 1, guard: bool = True) -> Iterator[Value]:
        index = next((v.type for v in (lo, hi, step) if isinstance(v, Value)), i64)
        at, stop, by = (self.const(v, index).data for v in (lo, hi, step))
        before = self.active
        while (before & (at < stop)).any():
            self.active = before & (at < stop)
            yield self.make(at, index)
            at = np.where(self.active, at + by, at)
        self.active = before

    # -- the block --------------------------------------------------------------------------------

    def _require_blocks(self, threads: int = 0) -> None:
        blocks = self.active.reshape(-1, self.threads)[:, : threads or self.threads]
        assert (blocks.all(1) == blocks.any(1)).all(), "not all threads of a block are here"

    def _require_warps(self) -> None:
        warps = self.active.reshape(-1, WARP)
        assert (warps.all(1) == warps.any(1)).all(), "not all threads of a warp are here"

    @property
    def warp(self) -> int:
        return WARP

    def launched_block(self) -> SimValue:
        first = self.scheduler.block
        return self.make(first + np.arange(self.count) // self.threads, i32)

    def thread(self) -> SimValue:
        return self.make(np.arange(self.count) % self.threads, i32)

    def lane(self) -> SimValue:
        return self.make(np.arange(self.count) % WARP, i64)

    def barrier(self, threads: int = 0) -> None:
        self._require_blocks(threads)

    def warp_barrier(self) -> None:
        self._require_warps()

    def meet(self, number: Value, threads: int) -> None:
        self._require_warps()
        assert ((data_of(number) > 1) & (data_of(number) < 16))[self.active].all()

    def bring_near(self, address: Value) -> None:
        self.inside(data_of(address)[self.active], 1)

    def wait_for_previous(self) -> None:
        self.waits |= self.active

    def fetch(self, address: Value, count: int) -> None:
        starts = data_of(address)[self.active]
        assert count % 16 == 0 and (starts % 16 == 0).all(), "not aligned"
        self.inside(starts, count)

    def let_next_start(self) -> None:
        pass

    def is_last_block(self, counter: Value, blocks: Value, threads: int = 0) -> SimValue:
        self._require_blocks(threads)
        last = np.zeros(self.count, bool)
        firsts = np.flatnonzero(self.active.reshape(-1, self.threads)[:, 0]) * self.threads
        self.inside(data_of(counter)[firsts], 8)
        for t in firsts[::-1]:  # any may be the last
            cell = ctypes.c_longlong.from_address(int(data_of(counter)[t]))
            cell.value += 1
            if cell.value == int(data_of(blocks)[t]):
                cell.value = 0
                last[t : t + self.threads] = True
        return self.make(last, i1)

    # -- values that are handed over --------------------------------------------------------------

    def hand_over(self, value: Value, address: Value, tag: Value) -> None:
        words = np.ascontiguousarray(data_of(value)).view(np.int32) & ~3 | data_of(tag)
        places = self._checked(data_of(address), i32, 4)
        self.scheduler.store(places, words[self.active])

    def look(self, places: Sequence[Place]) -> list[Value]:
        return [
            self._load(data_of(address) + offset + 4 * i, i32, 4 * width if i == 0 else 4)
            for address, offset, width in places
            for i in range(width)
        ]

    def look_at_sums(self, address: Value, offsets: Sequence[int]) -> list[Value]:
        return [self._load(data_of(address) + offset, i64, 8) for offset in offsets]

    def _await(self, words: Sequence[Value], look: Any, mask: int, wanted: Value) -> list[Value]:
        """All blocks have come this far, or the scheduler lets others run until they have."""
        tags = data_of(wanted)[self.active] & mask
        found = list(words)
        while any(((data_of(w)[self.active] & mask) != tags).any() for w in found):
            self.scheduler.wait()
            found = look()
        self.scheduler.waits = 0
        return found

    def receive(self, places: Sequence[Place], tag: Value, seen: Sequence[Value]) -> list[Value]:
        words = self._await(seen, lambda: self.look(places), 3, tag)
        return [self.bitcast(w, f32) for w in words]

    def add_fixed(self, value: Value, address: Value) -> None:
        with np.errstate(all="ignore"):
            scaled = data_of(value).astype(np.float64) * FIXED_SCALE
            fine = np.abs(scaled) < FIXED_NAN * FIXED_SCALE
        whole = np.rint(np.where(fine, scaled, FIXED_NAN * FIXED_SCALE)).astype(np.int64)
        places = self._checked(data_of(address), i64, 8)
        self.scheduler.add(places, ((whole << 8) + 1)[self.active])

    def receive_sums(
        self, address: Value, offsets: Sequence[int], count: Value, seen: Sequence[Value]
    ) -> list[Value]:
        words = self._await(seen, lambda: self.look_at_sums(address, offsets), 255, count)
        made: list[Value] = []
        for word in words:
            number = (data_of(word) >> 8) / FIXED_SCALE
            made.append(self.make(np.where(np.abs(number) < FIXED_LIMIT, number, np.nan), f32))
        return made

    def from_lane(self, value: Value, lane: int | Value) -> Value:
        self._require_warps()
        place = data_of(lane) % WARP if isinstance(lane, Value) else lane
        return self.make(data_of(value)[np.arange(self.count) // WARP * WARP + place], value.type)

    def exchange(self, value: Value, distance: int) -> SimValue:
        self._require_warps()
        return self.make(data_of(value)[np.arange(self.count) ^ distance], value.type)

    def load_matrices(self, address: Value, count: int, transposed: bool = False) -> list[Value]:
        self._require_warps()
        at = data_of(address).astype(np.int64)
        lanes = np.arange(self.count)
        found: list[Value] = []
        for i in range(count):
            row = lanes % WARP // 4
            column = lanes % 4 * 2
            warp = lanes // WARP * WARP
            picked = []
            for k in range(2):
                r, c = (column + k, row) if transposed else (row, column + k)
                start = at[warp + 8 * i + r]
                used = start[self.active]
                assert (used % 16 == 0).all(), "row of a matrix not aligned"
                assert (used >= 0).all() and (used + 16 <= self.size).all()
                place = np.where(self.active, start + self.own, 0) + 2 * c
                picked.append(self.bytes[place] | self.bytes[place + 1].astype(np.uint32) << 8)
            joined = (picked[0] | picked[1] << 16).astype(np.uint32)
            found.append(self.make(joined.view(np.int32), i32))
        return found

    def multiply(
        self, a: Sequence[Value], b: Sequence[Value], c: Sequence[Value], element: Type
    ) -> list[Value]:
        self._require_warps()
        halves = _NUMPY[element.name]
        warps = self.count // WARP
        lanes = np.arange(WARP)
        row, column = lanes // 4, lanes % 4 * 2

        def parts(values: Sequence[Value]) -> list[Any]:
            """Of each value [warps, lanes, 2]."""
            raw = [np.ascontiguousarray(data_of(v)).view(halves) for v in values]
            return [r.astype(np.float64).reshape(warps, WARP, 2) for r in raw]

        left, right = np.zeros((warps, 16, 16)), np.zeros((warps, 16, 8))
        for i, part in enumerate(parts(a)):
            for k in range(2):
                left[:, row + 8 * (i % 2), column + k + 8 * (i // 2)] = part[:, :, k]
        for i, part in enumerate(parts(b)):
            for k in range(2):
                right[:, column + k + 8 * i, row] = part[:, :, k]
        with np.errstate(all="ignore"):
            product = left @ right
        result = []
        for i, value in enumerate(c):
            found = product[:, row + 8 * (i // 2), column + i % 2].reshape(-1)
            result.append(self.make(found + data_of(value), f32))
        return list(result)

    def multiply_bytes(
        self, a: Sequence[Value], b: Sequence[Value], c: Sequence[Value]
    ) -> list[Value]:
        self._require_warps()
        warps, lanes, width = self.count // WARP, np.arange(WARP), 8 * len(a)
        left, right = np.zeros((warps, 16, width)), np.zeros((warps, width, 8))

        def parts(value: Value) -> Any:
            raw = np.ascontiguousarray(data_of(value)).view(np.int8)
            return raw.astype(np.float64).reshape(warps, WARP, 4)

        for i, value in enumerate(a):
            for k in range(4):
                column = lanes % 4 * 4 + k + 16 * (i // 2)
                left[:, lanes // 4 + 8 * (i % 2), column] = parts(value)[:, :, k]
        for i, value in enumerate(b):
            for k in range(4):
                right[:, lanes % 4 * 4 + k + 16 * i, lanes // 4] = parts(value)[:, :, k]
        product, made = left @ right, list[Value]()
        for i, value in enumerate(c):
            found = product[:, lanes // 4 + 8 * (i // 2), lanes % 4 * 2 + i % 2].reshape(-1)
            made.append(self.make((found + data_of(value)).astype(np.int64), i32))
        return made

    def pick_bytes(self, a: Value, b: Value, order: int) -> Value:
        both = np.stack([data_of(a), data_of(b)], 1).astype(np.int32).view(np.uint8)
        chosen = [order >> 4 * i & 7 for i in range(4)]
        return self.make(np.ascontiguousarray(both[:, chosen]).view(np.int32)[:, 0], i32)

    def dot_bytes(self, a: Value, b: Value, c: Value) -> Value:
        left, right = (
            np.ascontiguousarray(data_of(v)).view(np.int8).reshape(-1, 4).astype(np.int64)
            for v in (a, b)
        )
        whole = (left * right).sum(1) + data_of(c)
        assert (np.abs(whole[self.active]) < 1 << 31).all(), "the sum has too many bits"
        return self.make(whole, i32)

    def largest_of_warp(self, value: Value) -> SimValue:
        self._require_warps()
        whole = data_of(value).reshape(-1, WARP)
        assert (whole >= 0).all()
        return self.make(np.repeat(whole.max(1), WARP), i32)

    def sum_of_warp(self, value: Value) -> SimValue:
        self._require_warps()
        return self.make(np.repeat(data_of(value).reshape(-1, WARP).sum(1), WARP), i32)

    def fence_shared(self) -> None:
        self.fenced = True

    def begin_group(self) -> None:
        assert self.fenced or self.phases, "shared memory may not be visible"

    def commit_group(self) -> None:
        self.groups += 1

    def wait_group(self, groups: int) -> None:
        self.groups = min(self.groups, groups)

    def finish_group(
        self, sums: Sequence[Value], groups: int = 0, held: Sequence[Value] = ()
    ) -> list[Value]:
        self.groups = min(self.groups, groups)
        return list(sums)

    def multiply_group(
        self, a: Value, b: Value, sums: Sequence[Value], n: int, element: Type
    ) -> list[Value]:
        left = self._tile(a, np.arange(64)[:, None] * 128 + np.arange(32), element)
        right = self._tile(b, np.arange(n)[:, None] * 128 + np.arange(32), element)
        return self._added(left, right.transpose(0, 2, 1), sums)

    def multiply_held(
        self, a: Sequence[Value], b: Value, sums: Sequence[Value], n: int, element: Type
    ) -> list[Value]:
        right = self._tile(b, np.arange(n)[:, None] * 128 + np.arange(32), element)
        return self._added(self._held(a, element), right.transpose(0, 2, 1), sums)

    def multiply_weights(
        self, a: Sequence[Value], b: Value, sums: Sequence[Value], apart: int, element: Type
    ) -> list[Value]:
        bytes_ = np.arange(4 * len(sums))
        columns = bytes_ // 128 * apart + bytes_ % 128
        right = self._tile(b, np.arange(16)[:, None] * 128 + columns, element)
        return self._added(self._held(a, element), right, sums)

    def _held(self, a: Sequence[Value], element: Type) -> Any:
        """Matrices [64, 16] of each four warps that lie in registers."""
        lanes = np.arange(4 * WARP)
        row, column = lanes // WARP * 16 + lanes % WARP // 4, lanes % 4 * 2
        left = np.zeros((self.count // len(lanes), 64, 16))
        for i, value in enumerate(a):
            raw = np.ascontiguousarray(data_of(value)).view(_NUMPY[element.name])
            pairs = raw.astype(np.float64).reshape(-1, len(lanes), 2)
            for k in range(2):
                left[:, row + 8 * (i % 2), column + k + 8 * (i // 2)] = pairs[:, :, k]
        return left

    def _tile(self, start: Value, places: Any, element: Type) -> Any:
        """Numbers of a tile for each four warps, at these places from its start, permuted."""
        self._require_warps()
        team = 4 * WARP
        first = data_of(start)[::team].astype(np.int64)
        linear = np.where(
            self.active[::team, None, None], first[:, None, None] + places, 0
        )  # fmt: skip
        place = linear ^ ((linear >> 7 & 7) << 4)
        assert place.max() < self.size
        raw = np.ascontiguousarray(self.bytes[place + self.own[::team, None, None]])
        with np.errstate(all="ignore"):  # what nobody wrote may be anything
            return raw.view(_NUMPY[element.name]).astype(np.float64)

    def _added(self, left: Any, right: Any, sums: Sequence[Value]) -> list[Value]:
        """Sums of products [teams, 64, n] as threads have them."""
        with np.errstate(all="ignore"):
            product = left @ right
        lanes = np.arange(4 * WARP)
        row = lanes // WARP * 16 + lanes % WARP // 4
        made: list[Value] = []
        for i in range(product.shape[2] // 2):
            column = i // 4 * 8 + lanes % 4 * 2 + i % 2
            found = product[:, row + 8 * (i // 2 % 2), column].reshape(-1)
            made.append(self.make(found + data_of(sums[i]) if sums else found, f32))
        return made

    def move(self, value: Value, zero: Value) -> Value:
        assert not data_of(zero).any()
        return value

    def pack_halves(self, low: Value, high: Value, element: Type) -> SimValue:
        with np.errstate(all="ignore"):
            pair = np.stack([data_of(low), data_of(high)], 1).astype(_NUMPY[element.name])
        return self.make(np.ascontiguousarray(pair).view(np.int32)[:, 0], i32)

    def unpack_halves(self, pair: Value, element: Type) -> tuple[Value, Value]:
        raw = np.ascontiguousarray(data_of(pair)).view(_NUMPY[element.name]).reshape(-1, 2)
        return self.make(raw[:, 0], f32), self.make(raw[:, 1], f32)

    def exp2_fast(self, x: Value) -> SimValue:
        with np.errstate(all="ignore"):
            return self.make(np.exp2(data_of(x).astype(np.float64)), f32)

    def ticks(self) -> Value:
        return self.i32(0)

    def rsqrt_fast(self, x: Value) -> Value:
        with np.errstate(all="ignore"):
            return self.make(1 / np.sqrt(data_of(x).astype(np.float64)), f32)

    def reciprocal_fast(self, x: Value) -> Value:
        with np.errstate(all="ignore"):
            return self.make(1 / data_of(x).astype(np.float64), f32)

    def larger(self, a: Value, b: Value) -> SimValue:
        return self.make(np.fmax(data_of(a), data_of(b)), f32)

    def activate(self, name: str, x: Value) -> Value:
        if name == "none":
            return x
        op: Any = lookup(name)()
        return self.make(op.reference(np.array(data_of(x))), f32)


def _unsigned(x: Any) -> Any:
    return np.asarray(x).view(f"u{x.dtype.itemsize}")


def _binary(op: str, type_: Type, x: Any, y: Any) -> Any:
    if type_.is_float:
        return {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide}[op](x, y)
    if type_ is i1:
        return {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}[op](x, y)
    if op in ("udiv", "urem", "lshr"):
        a, b = _unsigned(np.ascontiguousarray(x)), _unsigned(np.ascontiguousarray(y))
        if op == "lshr":
            return (a >> b).view(x.dtype)
        b = np.where(b == 0, 1, b).astype(a.dtype)
        return (a // b if op == "udiv" else a % b).view(x.dtype)
    if op in ("sdiv", "srem"):
        b = np.where(y == 0, 1, y)
        quotient = (np.abs(x) // np.abs(b)) * np.sign(x) * np.sign(b)
        return quotient if op == "sdiv" else x - quotient * b
    simple = {
        "add": np.add, "sub": np.subtract, "mul": np.multiply, "and": np.bitwise_and,
        "or": np.bitwise_or, "xor": np.bitwise_xor, "shl": np.left_shift, "ashr": np.right_shift,
    }  # fmt: skip
    return simple[op](x, y)


def mapped_tile(address: int, row: int, column: int, inside: Inside) -> tuple[Any, bool]:
    """The bytes of a tile by a tensor map as the fake driver writes it, 0 outside the matrix, and
    whether it is permuted."""
    numbers = np.asarray(_Memory(address, 56)).view(np.int64).tolist()
    start, rows, columns, stride, box, across, is_permuted = numbers
    assert row >= 0 and column >= 0
    tile = np.zeros((box, 2 * across), np.uint8)
    used = min(box, rows - row)
    width = 2 * min(across, columns - column)
    if used > 0 and width > 0:
        places = start + (row + np.arange(used)) * stride + 2 * column
        inside(places, width)
        memory, low = bytes_at(places, width)
        tile[:used, :width] = memory[(places - low)[:, None] + np.arange(width)]
    return tile, bool(is_permuted)


class Together:
    """All blocks run side by side: what a block waits for has come before, or never comes."""

    block = 0  # the first of those that are simulated

    def store(self, places: Any, words: Any) -> None:
        memory, low = bytes_at(places, 4)
        raw = np.ascontiguousarray(words.astype(np.int32)).view(np.uint8).reshape(-1, 4)
        memory[(places - low)[:, None] + np.arange(4)] = raw

    def add(self, places: Any, words: Any) -> None:
        for place, word in zip(places.tolist(), words.tolist(), strict=True):
            cell = ctypes.c_longlong.from_address(place)
            cell.value += word

    waits = 0

    def wait(self) -> None:
        """What was looked at early has come since, or never comes."""
        self.waits += 1
        assert self.waits < 2, "a value that never comes"


class InTurns(Together):
    """A block on its own, in a thread of its own: others run while it waits, and between any two
    values that it hands over."""

    def __init__(self, turns: Turns, block: int) -> None:
        self.turns, self.block = turns, block

    def store(self, places: Any, words: Any) -> None:
        self._in_any_order(super().store, places, words)

    def add(self, places: Any, words: Any) -> None:
        self._in_any_order(super().add, places, words)

    def _in_any_order(self, write: Callable[[Any, Any], None], places: Any, words: Any) -> None:
        order = self.turns.rng.permutation(len(places))
        for half in np.array_split(order, 2):
            if len(half):
                write(places[half], words[half])
            self.turns.progress()
            self.turns.next(self.block)

    def wait(self) -> None:
        self.turns.next(self.block, waits=True)


class Turns:
    """One block at a time runs, chosen by chance."""

    def __init__(self, blocks: int, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.locks = [threading.Semaphore(0) for _ in range(blocks)]
        self.live, self.waiting = set(range(blocks)), set[int]()
        self.error: BaseException | None = None
        self.done = threading.Event()

    def progress(self) -> None:
        self.waiting.clear()

    def next(self, block: int, waits: bool = False) -> None:
        if waits:
            self.waiting.add(block)
        chosen = self._choose()
        if chosen != block:
            self.locks[chosen].release()
            self.locks[block].acquire()
        if self.error:
            raise AssertionError("another block failed")

    def _choose(self) -> int:
        ready = sorted(self.live - self.waiting)
        if not ready:
            raise AssertionError(f"all blocks wait: {sorted(self.waiting)}")
        return int(self.rng.choice(ready))

    def run(self, block: int, body: Callable[[], None]) -> None:
        self.locks[block].acquire()
        try:
            if not self.error:
                body()
        except BaseException as error:
            self.error = self.error or error
        self.live.discard(block)
        self.waiting.clear()
        if self.live:
            self.locks[self._choose()].release()
        else:
            self.done.set()


def run_in_turns(kernel: BlockKernel, blocks: int, args: int, inside: Inside, seed: int) -> None:
    """Run a launch, its blocks one at a time, in an order that the seed gives."""
    turns = Turns(blocks, seed)

    def run(block: int) -> None:
        module = SimulatedModule(1, args, inside, InTurns(turns, block))
        turns.run(block, lambda: kernel.emit(module))

    for block in range(blocks):
        threading.Thread(target=run, args=(block,), daemon=True).start()
    turns.locks[0].release()
    assert turns.done.wait(300), "blocks that never end"
    if turns.error:
        raise turns.error


class SimulatedModule(KernelModule):
    def __init__(
        self, blocks: int, args: int, inside: Inside, scheduler: Together | None = None
    ) -> None:
        super().__init__(Target.host())
        self.blocks, self.args, self.inside = blocks, args, inside
        self.scheduler = scheduler or Together()

    def begin_block(self, threads: int, shared: int = 0, min_blocks: int = 1) -> Simulated:
        self.made = Simulated(self, threads, shared, self.args, self.inside)
        return self.made


def narrowed(*arrays: Any) -> Sequence[Any]:
    """Numbers that all threads have alike, such as args, as those of one thread, which broadcast;
    others as they are."""
    return arrays if any(x.strides[0] for x in arrays) else [x[:1] for x in arrays]


def bytes_at(addresses: Any, size: int) -> tuple[Any, int]:
    """The memory that holds `size` bytes at all addresses, and its first address."""
    low, high = int(addresses.min()), int(addresses.max()) + size
    return np.asarray(_Memory(low, high - low)), low


class _Memory:
    def __init__(self, start: int, size: int) -> None:
        self.__array_interface__ = {
            "version": 3, "shape": (size,), "typestr": "|u1", "data": (start, False),
        }  # fmt: skip


def run_kernel(kernel: BlockKernel, blocks: int, args: int, inside: Inside) -> None:
    """Run a launch, all blocks side by side."""
    module = SimulatedModule(blocks, args, inside)
    kernel.emit(module)
    assert module.made.waits.all(), "threads do not wait for the kernel in front"
    assert not module.made.open, "copies without a group"
    assert not any(module.made.phases.values()), "copies that nobody waits for"
