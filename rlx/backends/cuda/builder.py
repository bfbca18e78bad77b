"""Code for GPUs through the LLVM builder: what a kernel of many threads has beside a CPU function.

A kernel has one parameter, the address of its args in device memory, so a new size is a small
copy and no new launch. Kernels of loop nests share the elements by a grid-stride loop: any number
of threads gives the same result. Kernels of blocks have a fixed number of threads, which share
memory and multiply small matrices together. `ptx.py` has the instructions of a real GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rlx.errors import OptionError, UnsupportedError
from rlx.llvm.builder import Function, Module, Type, Value, i64
from rlx.llvm.target import Target

Place = tuple[Value, int, int]  # an address, bytes from there, and how many numbers: 1, 2 or 4
FIXED_SCALE = float(1 << 28)
FIXED_NAN, FIXED_LIMIT = float(1 << 23), float(1 << 22)  # what stands for NaN; the largest number

THREADS = 256  # of a block of a loop nest
WARP = 32  # threads that run together and can exchange values
PTX = "+ptx86"  # the PTX version that every driver from CUDA 12.7 on reads
# targets of that version; what ends in `a` uses instructions that only this GPU has
_TARGETS = {
    (8, 0): "sm_80",
    (8, 6): "sm_86",
    (8, 7): "sm_87",
    (8, 9): "sm_89",
    (9, 0): "sm_90a",
    (10, 0): "sm_100a",
}
_OLDEST = min(_TARGETS)
_MULTIPROCESSORS = {
    (8, 0): 108, (8, 6): 84, (8, 7): 16, (8, 9): 128, (9, 0): 132, (10, 0): 148,
}  # fmt: skip
_TRIPLE = "nvptx64-nvidia-cuda"


def target_for(capability: tuple[int, int]) -> Target:
    """The target of a GPU: (9, 0) is sm_90a. Unknown ones run the PTX of the newest before them."""
    major, minor = capability
    if capability < _OLDEST:
        raise UnsupportedError(
            "the GPU is too old", where="cuda", got=f"compute capability {major}.{minor}",
            expected=f"{_OLDEST[0]}.{_OLDEST[1]} (Ampere) or newer",
        )  # fmt: skip
    known = max(c for c in _TARGETS if c <= capability)
    name = _TARGETS[known] if known == capability else f"sm_{known[0]}{known[1]}"
    return Target(_TRIPLE, name, (PTX,), "nvptx64")


def gpu_of_target(name: str) -> tuple[tuple[int, int], int]:
    """Compute capability and multiprocessors of a target's largest GPU: `sm_90a` is an H100."""
    for capability, target in _TARGETS.items():
        if target == name:
            return capability, _MULTIPROCESSORS[capability]
    raise OptionError(
        "unknown target", where="target", got=repr(name),
        expected="one of " + ", ".join(_TARGETS.values()),
    )  # fmt: skip


class KernelFunction(Function):
    """A kernel that many threads run; a machine says how they are numbered."""

    def thread_index(self) -> Value:
        """The number of this thread among all of the launch, as an i64."""
        raise NotImplementedError

    def thread_count(self) -> Value:
        """How many threads the launch has, as an i64."""
        raise NotImplementedError

    def elements(self, total: Value | int, team: int = 1) -> Iterator[Value]:
        """A grid-stride loop: `for i in f.elements(n)` gives each i below n to one thread, or to
        one team of neighbouring threads."""
        first, count = self.thread_index(), self.thread_count()
        if team > 1:
            first, count = first.udiv(team), count.udiv(team)
        yield from self.range(first, self.const(total, i64), count)

    @property
    def warp(self) -> int:
        """How many neighbouring threads can exchange values."""
        return 1

    def lane(self) -> Value:
        """The number of this thread in its warp, as an i64."""
        return self.i64(0)

    def exchange(self, value: Value, distance: int) -> Value:
        """The value of the thread whose lane differs in the bit `distance`; all threads of the
        warp must take part."""
        raise NotImplementedError


class BlockFunction(KernelFunction):
    """A kernel of blocks of a fixed number of threads. Addresses of shared memory are i32."""

    first_block = 0  # of the part of a launch that is emitted
    is_part = False
    patience = 0  # clocks after which a wait ends in an error of the launch; 0: never

    @contextmanager
    def part(self, block: int, args: int) -> Iterator[None]:
        """Emit a part of a launch: its blocks begin at `block`, its args `args` bytes further."""
        saved = self.first_block, self.is_part, self.params["args"]
        self.first_block, self.is_part = block, True
        self.params["args"] = self.gep(self.params["args"], args)
        yield
        self.first_block, self.is_part, self.params["args"] = saved

    def block_number(self) -> Value:
        """The number of this block, as an i32."""
        found = self.launched_block()
        return found - self.first_block if self.first_block else found

    def launched_block(self) -> Value:
        """The number of this block in the launch, as an i32."""
        raise NotImplementedError

    def thread(self) -> Value:
        """The number of this thread in its block, as an i32."""
        raise NotImplementedError

    def lane32(self) -> Value:
        return self.thread() & WARP - 1

    # -- order ------------------------------------------------------------------------------------

    def barrier(self, threads: int = 0) -> None:
        """Wait for all threads of the block, or for the first so many, a multiple of a warp."""
        raise NotImplementedError

    def warp_barrier(self) -> None:
        """Wait for all threads of the warp."""
        raise NotImplementedError

    def meet(self, number: Value, threads: int) -> None:
        """Wait at a barrier of this number (i32, 2 to 15) until so many threads are there."""
        raise NotImplementedError

    def wait_for_previous(self) -> None:
        """Wait until the kernel in front has ended. What it wrote may be read only after this; what
        no kernel writes may be read before."""
        raise NotImplementedError

    def let_next_start(self) -> None:
        """The kernel behind may start now, up to its `wait_for_previous`."""
        raise NotImplementedError

    def is_last_block(self, counter: Value, blocks: Value, threads: int = 0) -> Value:
        """Whether this block is the last of `blocks` (i32) that call this, as an i1 for all of its
        threads, or for the first so many. What other blocks wrote before can be read then. The
        counter, an i64 in global memory, is 0 before and after. Shared memory from 0 to 4 is
        used."""
        raise NotImplementedError

    def bring_near(self, address: Value) -> None:
        """Global memory at this address will be read soon."""
        raise NotImplementedError

    # -- shared memory ----------------------------------------------------------------------------

    def load_shared(self, address: Value, type_: Type, offset: int = 0, align: int = 0) -> Value:
        raise NotImplementedError

    def load_shared_pointer(self, address: Value, offset: int = 0) -> Value:
        """An address of global memory."""
        raise NotImplementedError

    def store_shared(self, value: Value, address: Value, offset: int = 0, align: int = 0) -> None:
        raise NotImplementedError

    def add_shared(self, address: Value, value: Value) -> Value:
        """Add an i32 or i64 to shared memory, whoever else does; returns what was there."""
        raise NotImplementedError

    def copy_async(self, address: Value, source: Value, valid: Value | None = None) -> None:
        """Begin a copy of 16 bytes from global memory; those from `valid` (i32) on become 0. Both
        addresses are multiples of 16. It belongs to the next `commit_copies`."""
        raise NotImplementedError

    def commit_copies(self) -> None:
        """Close a group of copies."""
        raise NotImplementedError

    def wait_copies(self, groups: int) -> None:
        """Wait until all but the last `groups` groups are there, for this thread's copies alone."""
        raise NotImplementedError

    # -- tiles that are copied by themselves, on GPUs that can ------------------------------------
    # An mbarrier is an i64 in shared memory. Its phase ends when all arrivals and all bytes that
    # are expected are there; phases have parity 0 and 1 in turn, and count anew.

    def init_mbarrier(self, address: Value, arrivals: int) -> None:
        """Begin the first phase. All threads may use it after `fence_mbarriers` and a barrier."""
        raise NotImplementedError

    def fence_mbarriers(self) -> None:
        """What `init_mbarrier` wrote can be seen by copies."""
        raise NotImplementedError

    def arrive(self, address: Value) -> None:
        """Arrive at an mbarrier."""
        raise NotImplementedError

    def expect_bytes(self, address: Value, count: int) -> None:
        """Arrive at an mbarrier, whose phase also waits for so many bytes."""
        raise NotImplementedError

    def wait_phase(self, address: Value, parity: Value) -> None:
        """Wait until the phase of this parity (i32) has ended. That before the first has parity
        1."""
        raise NotImplementedError

    def watch_phase(self, address: Value, parity: Value) -> None:
        """As `wait_phase`, for a thread that does not read what has come."""
        raise NotImplementedError

    def copy_bytes(self, address: Value, source: Value, count: int, mbarrier: Value) -> None:
        """Begin to copy so many bytes from global to shared memory; all are multiples of 16. The
        mbarrier expects them."""
        raise NotImplementedError

    def fence_copies(self) -> None:
        """Copies that this thread begins from now on see what it can see."""
        raise NotImplementedError

    def acquire_map(self, tensor_map: Value) -> None:
        """This thread may copy by a tensor map that the host wrote."""
        raise NotImplementedError

    def copy_tile(
        self, address: Value, tensor_map: Value, column: Value, row: Value, mbarrier: Value
    ) -> None:
        """Begin to copy the tile that starts there, as `multiply_group` wants it; what is outside
        of the matrix is 0."""
        raise NotImplementedError

    def uniform(self, value: Value) -> Value:
        """An i32 that is the same in all threads of a warp, known to be so."""
        raise NotImplementedError

    def take_registers(self, count: int, more: bool) -> None:
        """The four warps that call this have so many registers from now on."""
        raise NotImplementedError

    # -- values that are handed over while a kernel runs -------------------------------------------
    # The two lowest bits of an f32 are a tag: a value says by itself that it has come, so there is
    # neither a flag nor a fence between the two sides.

    def hand_over(self, value: Value, address: Value, tag: Value) -> None:
        """Store an f32 with its tag (i32, 0 to 3), for other blocks."""
        raise NotImplementedError

    def look(self, places: Sequence[Place]) -> list[Value]:
        """What is at these places now, for `receive`: the thread may do something else until it has
        come from far away."""
        raise NotImplementedError

    def receive(self, places: Sequence[Place], tag: Value, seen: Sequence[Value]) -> list[Value]:
        """The f32 at these places once all have this tag; `seen` is what `look` has found."""
        raise NotImplementedError

    # A sum in fixed point is an i64: 56 bits of multiples of 2⁻²⁸, and 8 bits that count what was
    # added. It is the same in any order, and says by itself that it is complete.

    def add_fixed(self, value: Value, address: Value) -> None:
        """Add an f32 to a sum that other blocks add to."""
        raise NotImplementedError

    def look_at_sums(self, address: Value, offsets: Sequence[int]) -> list[Value]:
        """As `look`, for `receive_sums`."""
        raise NotImplementedError

    def receive_sums(
        self, address: Value, offsets: Sequence[int], count: Value, seen: Sequence[Value]
    ) -> list[Value]:
        """The sums so many bytes from an address, as f32, once so many numbers (i32, modulo 256)
        were added to each. What was no number, or beyond 2²², is NaN."""
        raise NotImplementedError

    # -- warps ------------------------------------------------------------------------------------

    def from_lane(self, value: Value, lane: int | Value) -> Value:
        """The value, an f32 or i32, of a lane of the warp: of one, or of that which each asks."""
        raise NotImplementedError

    def load_matrices(self, address: Value, count: int, transposed: bool = False) -> list[Value]:
        """`count` matrices of 8 x 8 16-bit elements, two of each in an i32 of a thread: element
        [lane / 4][lane % 4 * 2]. Lane 8 i + r gives the address of row r of matrix i."""
        raise NotImplementedError

    def multiply(
        self, a: Sequence[Value], b: Sequence[Value], c: Sequence[Value], element: Type
    ) -> list[Value]:
        """a [16 16] · b [16 8] + c [16 8] by a warp: 4, 2 and 4 values of each thread, as
        `load_matrices` has them (b transposed); c is f32."""
        raise NotImplementedError

    def multiply_bytes(
        self, a: Sequence[Value], b: Sequence[Value], c: Sequence[Value]
    ) -> list[Value]:
        """a [16 32] · b [32 8] + c [16 8] by a warp, of bytes with a sign: 4, 2 and 4 values of
        each thread. Value i of a holds columns 4 (lane % 4 + 4 (i / 2)) to + 3 of row lane / 4 +
        8 (i % 2), of b those rows of column lane / 4; c is i32, as in `multiply`. With half of the
        values a is [16 16]."""
        raise NotImplementedError

    def pick_bytes(self, a: Value, b: Value, order: int) -> Value:
        """An i32 of four bytes, of those of a (0 to 3) and b (4 to 7): a digit of `order` for each,
        the lowest byte last."""
        raise NotImplementedError

    def dot_bytes(self, a: Value, b: Value, c: Value) -> Value:
        """c plus the products of the four bytes of a and b, which have signs."""
        raise NotImplementedError

    def largest_of_warp(self, value: Value) -> Value:
        """The largest i32, none of which is negative, of the warp's threads."""
        raise NotImplementedError

    def sum_of_warp(self, value: Value) -> Value:
        """The sum of an i32 of the warp's threads."""
        raise NotImplementedError

    def join(self, values: Sequence[Value]) -> Value:
        """Scalars as the lanes of a vector."""
        made = self.splat(values[0], len(values))
        for i, value in enumerate(values[1:], start=1):
            made = self.insert(made, value, i)
        return made

    # -- groups of four warps, on GPUs that have them ----------------------------------------------

    def fence_shared(self) -> None:
        """What this thread has written to shared memory can be read by `multiply_group`, after a
        barrier."""
        raise NotImplementedError

    def begin_group(self) -> None:
        """Registers of sums may be changed by products from now on."""
        raise NotImplementedError

    def multiply_group(
        self, a: Value, b: Value, sums: Sequence[Value], n: int, element: Type
    ) -> list[Value]:
        """Begin to add a [64 16] · bᵀ [16 n] to the sums of four warps: n / 2 values of each
        thread, none where sums begin. Both lie in shared memory at these addresses, in rows of 128
        bytes whose 16-byte pieces are permuted: bits 4-6 of an address are xored with bits 7-9."""
        raise NotImplementedError

    def multiply_held(
        self, a: Sequence[Value], b: Value, sums: Sequence[Value], n: int, element: Type
    ) -> list[Value]:
        """As `multiply_group`, with a in registers: each warp has 16 rows of it, as for
        `multiply`."""
        raise NotImplementedError

    def multiply_weights(
        self, a: Sequence[Value], b: Value, sums: Sequence[Value], apart: int, element: Type
    ) -> list[Value]:
        """Begin to add a [64 16] · b [16 n] to the sums of four warps. Each warp has 16 rows of a
        in registers, as for `multiply`. b lies in shared memory as above: 64 columns in rows of 128
        bytes, the next 64 columns `apart` bytes further."""
        raise NotImplementedError

    def commit_group(self) -> None:
        """Close a group of products."""
        raise NotImplementedError

    def wait_group(self, groups: int) -> None:
        """Wait until all but the last `groups` groups of products are done."""
        raise NotImplementedError

    def finish_group(
        self, sums: Sequence[Value], groups: int = 0, held: Sequence[Value] = ()
    ) -> list[Value]:
        """Wait for all products but those of the last `groups` groups; the sums, to be read. What
        products have `held` in registers stays there until then."""
        raise NotImplementedError

    def move(self, value: Value, zero: Value) -> Value:
        """An i32 in a register of its own, from here on: what is made of it while products run must
        not be in a register that they read. `zero` is one that compilers do not know to be 0."""
        raise NotImplementedError

    def pack_halves(self, low: Value, high: Value, element: Type) -> Value:
        """Two f32, rounded to f16 or bf16, in an i32."""
        raise NotImplementedError

    def unpack_halves(self, pair: Value, element: Type) -> tuple[Value, Value]:
        """Two f16 or bf16 in an i32, as f32."""
        raise NotImplementedError

    # -- arithmetic -------------------------------------------------------------------------------

    def exp2_fast(self, x: Value) -> Value:
        """2ˣ to about 2 units in the last place; denormal results are 0."""
        raise NotImplementedError

    def ticks(self) -> Value:
        """A counter of the multiprocessor's clock, an i32."""
        raise NotImplementedError

    def rsqrt_fast(self, x: Value) -> Value:
        """1 / √x to about 2 units in the last place."""
        raise NotImplementedError

    def reciprocal_fast(self, x: Value) -> Value:
        """1 / x to about 2 units in the last place."""
        raise NotImplementedError

    def larger(self, a: Value, b: Value) -> Value:
        """The larger of two f32; of a NaN and a number, the number."""
        raise NotImplementedError

    def activate(self, name: str, x: Value) -> Value:
        """The activation of that name of an f32."""
        raise NotImplementedError

    def warp_sum(self, value: Value, lanes: int = WARP) -> Value:
        """The sum over groups of `lanes` neighbouring lanes, in each of them."""
        distance = lanes // 2
        while distance:
            value = value + self.exchange(value, distance)
            distance //= 2
        return value

    def warp_max(self, value: Value, lanes: int = WARP) -> Value:
        distance = lanes // 2
        while distance:
            value = self.max_fast(value, self.exchange(value, distance))
            distance //= 2
        return value


class KernelModule(Module):
    """A module whose kernel is run by many threads."""

    def begin_kernel(self) -> KernelFunction:
        """Begin the kernel; `f["args"]` is the address of its args."""
        raise NotImplementedError

    def begin_block(self, threads: int, shared: int = 0, min_blocks: int = 1) -> BlockFunction:
        """Begin a kernel of blocks with `shared` bytes of shared memory, at least `min_blocks` of
        which fit into a multiprocessor."""
        raise NotImplementedError
