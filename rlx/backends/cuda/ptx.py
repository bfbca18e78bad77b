"""Functions of a GPU: the instructions of PTX that LLVM has no words for."""

from __future__ import annotations

from collections.abc import Sequence

from rlx.backends.cuda.builder import (
    THREADS,
    WARP,
    BlockFunction,
    KernelFunction,
    KernelModule,
)
from rlx.backends.cuda.ptx_exchange import ExchangeFunction
from rlx.llvm.builder import Function, Type, Value, bf16, f16, f32, i32, i64, ptr, void
from rlx.llvm.nest import elements

_SHARED = "@shared_memory"
_LOG2_E = 1.4426950408889634
_OVERLAP = 90  # the first GPUs whose kernels may start before the one in front has ended


class GpuFunction(ExchangeFunction):
    """A function of NVPTX."""

    threads = THREADS
    min_blocks = 1

    def thread_index(self) -> Value:
        block, size, thread = (self._register(n).to(i64, False) for n in ("ctaid", "ntid", "tid"))
        return block * size + thread

    def thread_count(self) -> Value:
        count, size = (self._register(n).to(i64, False) for n in ("nctaid", "ntid"))
        return count * size

    def _register(self, name: str) -> Value:
        return self.intrinsic(f"llvm.nvvm.read.ptx.sreg.{name}.x", i32)

    @property
    def warp(self) -> int:
        return WARP

    def lane(self) -> Value:
        return self.intrinsic("llvm.nvvm.read.ptx.sreg.laneid", i32).to(i64, signed=False)

    def launched_block(self) -> Value:
        return self._register("ctaid")

    def thread(self) -> Value:
        return self._register("tid")

    def exchange(self, value: Value, distance: int) -> Value:
        if value.type.bits < 32:
            wide = self.exchange(value.bits().to(i32, signed=False), distance)
            return wide.to(value.type.as_int).bits(value.type)
        if value.type.bits == 64:
            whole = value.bits()
            low, high = (
                self.exchange(part.to(i32), distance).to(i64, signed=False)
                for part in (whole, whole >> 32)
            )
            return (low | (high << 32)).bits(value.type)
        mask, width = self.i32(-1), self.i32(WARP - 1)
        there = self.intrinsic(
            "llvm.nvvm.shfl.sync.bfly.i32", i32, mask, value.bits(), self.i32(distance), width
        )
        return there.bits(value.type)

    def arg(self, args: Value, index: int, type_: Type = ptr) -> Value:
        """Arg `index` of the kernel. Pointers are marked as global: LLVM cannot know that of an
        address that comes from memory."""
        found = super().arg(args, index, type_)
        return self._global(found) if type_ is ptr else found

    def _global(self, found: Value) -> Value:
        there = self.instr(f"addrspacecast ptr {found.name} to ptr addrspace(1)", ptr)
        return self.instr(f"addrspacecast ptr addrspace(1) {there.name} to ptr", ptr)

    # -- inline PTX -------------------------------------------------------------------------------

    def _asm(
        self, text: str, results: Sequence[str], args: Sequence[Value], effect: bool = True
    ) -> list[Value]:
        """One instruction of PTX; `results` are letters of constraints: r (i32), f (f32), …"""
        inputs = [_LETTERS[a.type.name] for a in args]
        clobbers = ["~{memory}"] if effect else []
        constraints = ",".join([*(f"={r}" for r in results), *inputs, *clobbers])
        given = ", ".join(f"{a.type.name} {a.name}" for a in args)
        types = [_TYPES[r] for r in results]
        kind = "asm sideeffect" if effect else "asm"
        tail = f'{kind} "{text}", "{constraints}"({given}) convergent nounwind'
        if not types:
            self.effect(f"call void {tail}")
            return []
        if len(types) == 1:
            return [self.instr(f"call {types[0].name} {tail}", types[0])]
        record = Type(f"{{ {', '.join(t.name for t in types)} }}", "", 0, "")
        whole = self.instr(f"call {record.name} {tail}", record)
        return [
            self.instr(f"extractvalue {record.name} {whole.name}, {i}", t)
            for i, t in enumerate(types)
        ]

    # -- order ------------------------------------------------------------------------------------

    def barrier(self, threads: int = 0) -> None:
        self._asm(f"bar.sync 1, {threads};" if threads else "bar.sync 0;", [], [])

    def warp_barrier(self) -> None:
        self._asm("bar.warp.sync 0xffffffff;", [], [])

    def meet(self, number: Value, threads: int) -> None:
        self._asm(f"bar.sync $0, {threads};", [], [number])

    @property
    def overlaps(self) -> bool:
        """Whether kernels may start before the one in front has ended."""
        return generation(self.target.cpu) >= _OVERLAP

    def wait_for_previous(self) -> None:
        if self.overlaps and not self.is_part:
            self._asm("griddepcontrol.wait;", [], [])

    def let_next_start(self) -> None:
        if self.overlaps and not self.is_part:
            self._asm("griddepcontrol.launch_dependents;", [], [])

    def is_last_block(self, counter: Value, blocks: Value, threads: int = 0) -> Value:
        place = self.i32(0)

        def count() -> None:
            self._asm("fence.acq_rel.gpu;", [], [])
            found = self._asm("atom.global.add.u64 $0, [$1], 1;", ["l"], [counter])[0]
            is_last = found.eq(blocks.to(i64) - 1)
            self.if_(is_last, lambda: self.store(self.i64(0), counter))
            self._asm("fence.acq_rel.gpu;", [], [])
            self.store_shared(is_last.to(i32, signed=False), place)

        self.barrier(threads)
        self.if_(self.thread().eq(0), count)
        self.barrier(threads)
        found = self.load_shared(place, i32).ne(0)
        self.barrier(threads)
        return found

    def bring_near(self, address: Value) -> None:
        self._asm("prefetch.global.L2 [$0];", [], [address])

    # -- shared memory ----------------------------------------------------------------------------

    def _shared(self, address: Value, offset: int) -> str:
        assert isinstance(self.module, GpuModule)
        self.module.use_global(_SHARED, "external addrspace(3) global [0 x i8], align 1024")
        base = self.instr(f"getelementptr i8, ptr addrspace(3) {_SHARED}, i32 {address.name}", ptr)
        if not offset:
            return base.name
        return self.instr(f"getelementptr i8, ptr addrspace(3) {base.name}, i32 {offset}", ptr).name

    def _shared_number(self, address: Value) -> Value:
        """The address as instructions of PTX take it."""
        there = self._shared(address, 0)
        return self.instr(f"ptrtoint ptr addrspace(3) {there} to i32", i32)

    def load_shared(self, address: Value, type_: Type, offset: int = 0, align: int = 0) -> Value:
        there = self._shared(address, offset)
        tail = f"align {align or self._align(type_)}"
        return self.instr(f"load {type_.name}, ptr addrspace(3) {there}, {tail}", type_)

    def load_shared_pointer(self, address: Value, offset: int = 0) -> Value:
        return self._global(self.load_shared(address, ptr, offset, align=8))

    def store_shared(self, value: Value, address: Value, offset: int = 0, align: int = 0) -> None:
        there = self._shared(address, offset)
        tail = f"align {align or self._align(value.type)}"
        self.effect(f"store {value.type.name} {value.name}, ptr addrspace(3) {there}, {tail}")

    def add_shared(self, address: Value, value: Value) -> Value:
        bits, letter = value.type.bits, "r" if value.type.bits == 32 else "l"
        text = f"atom.shared.add.u{bits} $0, [$1], $2;"
        return self._asm(text, [letter], [self._shared_number(address), value])[0]

    def copy_async(self, address: Value, source: Value, valid: Value | None = None) -> None:
        given = [self._shared_number(address), source]
        if valid is None:
            self._asm("cp.async.cg.shared.global [$0], [$1], 16;", [], given)
        else:
            self._asm("cp.async.cg.shared.global [$0], [$1], 16, $2;", [], [*given, valid])

    def commit_copies(self) -> None:
        self._asm("cp.async.commit_group;", [], [])

    def wait_copies(self, groups: int) -> None:
        self._asm(f"cp.async.wait_group {groups};", [], [])

    # -- tiles that are copied by themselves ------------------------------------------------------

    def init_mbarrier(self, address: Value, arrivals: int) -> None:
        given = [self._shared_number(address), self.i32(arrivals)]
        self._asm("mbarrier.init.shared::cta.b64 [$0], $1;", [], given)

    def fence_mbarriers(self) -> None:
        self._asm("fence.mbarrier_init.release.cluster;", [], [])

    def arrive(self, address: Value) -> None:
        there = self._shared_number(address)
        self._asm("mbarrier.arrive.shared::cta.b64 _, [$0];", [], [there])

    def expect_bytes(self, address: Value, count: int) -> None:
        given = [self._shared_number(address), self.i32(count)]
        self._asm("mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;", [], given)

    def wait_phase(self, address: Value, parity: Value) -> None:
        again, done = "AGAIN_${:uid}", "DONE_${:uid}"
        wait = "mbarrier.try_wait.parity.shared::cta.b64 p, [$0], $1;"
        text = f"{{ .reg .pred p; {again}: {wait} @!p bra {again}; }}"
        if self.patience:
            text = (
                f"{{ .reg .pred p; .reg .u64 a, b; {wait} @p bra {done}; mov.u64 a, %clock64; "
                f"{again}: {wait} @p bra {done}; mov.u64 b, %clock64; sub.u64 b, b, a; "
                f"setp.lt.u64 p, b, {self.patience}; @p bra {again}; trap; {done}: }}"
            )
        self._asm(text, [], [self._shared_number(address), parity])

    def watch_phase(self, address: Value, parity: Value) -> None:
        self.wait_phase(address, parity)

    def copy_bytes(self, address: Value, source: Value, count: int, mbarrier: Value) -> None:
        text = (
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
            f"[$0], [$1], {count}, [$2];"
        )
        to, counted = self._shared_number(address), self._shared_number(mbarrier)
        self._asm(text, [], [to, source, counted])

    def fence_copies(self) -> None:
        self._asm("fence.proxy.async;", [], [])

    def acquire_map(self, tensor_map: Value) -> None:
        self._asm("fence.proxy.tensormap::generic.acquire.gpu [$0], 128;", [], [tensor_map])

    def copy_tile(
        self, address: Value, tensor_map: Value, column: Value, row: Value, mbarrier: Value
    ) -> None:
        text = (
            "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
            "[$0], [$1, {$2, $3}], [$4];"
        )
        to, counted = self._shared_number(address), self._shared_number(mbarrier)
        self._asm(text, [], [to, tensor_map, column, row, counted])

    def uniform(self, value: Value) -> Value:
        text = "shfl.sync.idx.b32 $0, $1, 0, 31, 0xffffffff;"
        return self._asm(text, ["r"], [value], effect=False)[0]

    def take_registers(self, count: int, more: bool) -> None:
        way = "inc" if more else "dec"
        self._asm(f"setmaxnreg.{way}.sync.aligned.u32 {count};", [], [])

    # -- warps ------------------------------------------------------------------------------------

    def from_lane(self, value: Value, lane: int | Value) -> Value:
        given = [lane] if isinstance(lane, Value) else []
        place = "$2" if given else lane
        text = f"shfl.sync.idx.b32 $0, $1, {place}, 31, 0xffffffff;"
        return self._asm(text, ["r"], [value.bits(i32), *given], effect=False)[0].bits(value.type)

    def load_matrices(self, address: Value, count: int, transposed: bool = False) -> list[Value]:
        names = ", ".join(f"${i}" for i in range(count))
        form = f"x{count}{'.trans' if transposed else ''}.shared.b16"
        text = f"ldmatrix.sync.aligned.m8n8.{form} {{{names}}}, [${count}];"
        return self._asm(text, ["r"] * count, [self._shared_number(address)])

    def multiply(
        self, a: Sequence[Value], b: Sequence[Value], c: Sequence[Value], element: Type
    ) -> list[Value]:
        kind = "bf16" if element is bf16 else "f16"
        text = (
            f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {{$0, $1, $2, $3}}, "
            "{$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
        )
        return self._asm(text, ["f"] * 4, [*a, *b, *c], effect=False)

    def multiply_bytes(
        self, a: Sequence[Value], b: Sequence[Value], c: Sequence[Value]
    ) -> list[Value]:
        numbers = iter(range(4, 8 + len(a) + len(b)))
        left, right, old = (", ".join(f"${next(numbers)}" for _ in values) for values in (a, b, c))
        text = (
            f"mma.sync.aligned.m16n8k{8 * len(a)}.row.col.s32.s8.s8.s32 {{$0, $1, $2, $3}}, "
            f"{{{left}}}, {{{right}}}, {{{old}}};"
        )
        return self._asm(text, ["r"] * 4, [*a, *b, *c], effect=False)

    def pick_bytes(self, a: Value, b: Value, order: int) -> Value:
        return self._asm(f"prmt.b32 $0, $1, $2, {order};", ["r"], [a, b], effect=False)[0]

    def dot_bytes(self, a: Value, b: Value, c: Value) -> Value:
        return self._asm("dp4a.s32.s32 $0, $1, $2, $3;", ["r"], [a, b, c], effect=False)[0]

    def largest_of_warp(self, value: Value) -> Value:
        text = "redux.sync.max.u32 $0, $1, 0xffffffff;"
        return self._asm(text, ["r"], [value], effect=False)[0]

    def sum_of_warp(self, value: Value) -> Value:
        text = "redux.sync.add.s32 $0, $1, 0xffffffff;"
        return self._asm(text, ["r"], [value], effect=False)[0]

    # -- groups of four warps ---------------------------------------------------------------------

    def fence_shared(self) -> None:
        self._asm("fence.proxy.async.shared::cta;", [], [])

    def begin_group(self) -> None:
        self._asm("wgmma.fence.sync.aligned;", [], [])

    def commit_group(self) -> None:
        self._asm("wgmma.commit_group.sync.aligned;", [], [])

    def wait_group(self, groups: int) -> None:
        self._asm(f"wgmma.wait_group.sync.aligned {groups};", [], [])

    def finish_group(
        self, sums: Sequence[Value], groups: int = 0, held: Sequence[Value] = ()
    ) -> list[Value]:
        return self._tied(f"wgmma.wait_group.sync.aligned {groups};", sums, held, len(sums))

    def multiply_group(
        self, a: Value, b: Value, sums: Sequence[Value], n: int, element: Type
    ) -> list[Value]:
        given = [self._descriptor(a, 1), self._descriptor(b, 1)]
        return self._products(n, element, sums, given, "$a, $b", "0, 0")

    def multiply_held(
        self, a: Sequence[Value], b: Value, sums: Sequence[Value], n: int, element: Type
    ) -> list[Value]:
        given = [*a, self._descriptor(b, 1)]
        return self._products(n, element, sums, given, "{$a, $b, $c, $d}, $e", "0")

    def multiply_weights(
        self, a: Sequence[Value], b: Value, sums: Sequence[Value], apart: int, element: Type
    ) -> list[Value]:
        given = [*a, self._descriptor(b, apart >> 4)]
        return self._products(2 * len(sums), element, sums, given, "{$a, $b, $c, $d}, $e", "1")

    def _products(
        self, n: int, element: Type, sums: Sequence[Value], given: Sequence[Value], places: str,
        transposed: str,
    ) -> list[Value]:  # fmt: skip
        """`places` are the operands as they stand in the instruction: `$a` is the first of the
        given ones."""
        kind, count = "bf16" if element is bf16 else "f16", n // 2
        names = ", ".join(f"${i}" for i in range(count))
        for i, letter in enumerate("abcde"):
            places = places.replace(f"${letter}", f"${count + len(sums) + i}")
        text = (
            f"{{ .reg .pred p; setp.ne.u32 p, {int(bool(sums))}, 0; "
            f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{kind}.{kind} {{{names}}}, "
            f"{places}, p, 1, 1, {transposed}; }}"
        )
        return self._tied(text, sums, given, count)

    def _descriptor(self, address: Value, apart: int) -> Value:
        """A tile of rows of 128 bytes, eight of which are 1024 bytes, permuted; `apart` (in units
        of 16 bytes) is where the next 64 columns are, if rows are not those of a sum."""
        place = (self._shared_number(address) & 0x3FFFF) >> 4
        return place.to(i64, signed=False) | (1 << 62 | 64 << 32 | apart << 16)

    def _tied(
        self, text: str, values: Sequence[Value], args: Sequence[Value], count: int
    ) -> list[Value]:
        """An instruction that changes values in place, or begins them."""
        outs = ",".join(["=f"] * count)
        given = [*map(str, range(len(values))), *(_LETTERS[a.type.name] for a in args)]
        ties = ",".join([outs, *given, "~{memory}"])
        record = Type(f"{{ {', '.join(['float'] * count)} }}", "", 0, "")
        operands = ", ".join(f"{a.type.name} {a.name}" for a in (*values, *args))
        whole = self.instr(
            f'call {record.name} asm sideeffect "{text}", "{ties}"({operands}) convergent nounwind',
            record,
        )
        return [
            self.instr(f"extractvalue {record.name} {whole.name}, {i}", f32) for i in range(count)
        ]

    def move(self, value: Value, zero: Value) -> Value:
        return self._asm("xor.b32 $0, $1, $2;", ["r"], [value, zero])[0]

    def pack_halves(self, low: Value, high: Value, element: Type) -> Value:
        kind = "bf16x2" if element is bf16 else "f16x2"
        return self._asm(f"cvt.rn.{kind}.f32 $0, $1, $2;", ["r"], [high, low], effect=False)[0]

    def unpack_halves(self, pair: Value, element: Type) -> tuple[Value, Value]:
        if element is bf16:
            return (pair << 16).bits(f32), (pair & -65536).bits(f32)
        low, high = (self.bitcast(part.to(_HALF), f16).to(f32) for part in (pair, pair >> 16))
        return low, high

    # -- arithmetic -------------------------------------------------------------------------------

    def exp2_fast(self, x: Value) -> Value:
        return self._asm("ex2.approx.ftz.f32 $0, $1;", ["f"], [x], effect=False)[0]

    def ticks(self) -> Value:
        return self._asm("mov.u32 $0, %clock;", ["r"], [])[0]

    def rsqrt_fast(self, x: Value) -> Value:
        return self._asm("rsqrt.approx.ftz.f32 $0, $1;", ["f"], [x], effect=False)[0]

    def reciprocal_fast(self, x: Value) -> Value:
        return self._asm("rcp.approx.ftz.f32 $0, $1;", ["f"], [x], effect=False)[0]

    def larger(self, a: Value, b: Value) -> Value:
        return self._asm("max.f32 $0, $1, $2;", ["f"], [a, b], effect=False)[0]

    def activate(self, name: str, x: Value) -> Value:
        if name == "silu":  # both to 2 units in the last place
            below = self.exp2_fast(x * -_LOG2_E) + 1.0
            return x * self.reciprocal_fast(below)
        return elements.activate(name, x)

    def text(self) -> str:
        head, body = super().text().split(" nounwind {\n", 1)
        if self.internal:
            return f"{head} nounwind {{\n{body}"
        head = head.replace("define ", "define ptx_kernel ", 1)
        bounds = f'"nvvm.maxntid"="{self.threads}" "nvvm.minctasm"="{self.min_blocks}"'
        return f"{head} nounwind {bounds} {{\n{body}"


_HALF = f16.as_int
_LETTERS = {"i32": "r", "float": "f", "i64": "l", "ptr": "l", "i16": "h", "double": "d"}
_TYPES = {"r": i32, "f": f32, "l": i64, "h": _HALF}


def generation(cpu: str) -> int:
    """90 of `sm_90a`."""
    return int("".join(c for c in cpu if c.isdigit()))


class GpuModule(KernelModule):
    function_class = GpuFunction

    def begin_kernel(self) -> KernelFunction:
        made = self.function("kernel", [("args", ptr)], void)
        assert isinstance(made, GpuFunction)
        made.wait_for_previous()
        return made

    def begin_block(self, threads: int, shared: int = 0, min_blocks: int = 1) -> BlockFunction:
        made = self.function("kernel", [("args", ptr)], void)
        assert isinstance(made, GpuFunction)
        made.threads, made.min_blocks = threads, min_blocks
        return made

    def table(self, fn: Function, data: bytes, align: int = 64) -> Value:
        """Constant bytes in global memory, which threads read at places of their own."""
        name, body = f"@table{len(self._globals)}", "\\" + data.hex("\\") if data else ""
        kind = f"internal addrspace(1) constant [{len(data)} x i8]"
        self._globals.append(f'{name} = {kind} c"{body}", align {align}')
        return fn.instr(f"addrspacecast ptr addrspace(1) {name} to ptr", ptr)

    def use_global(self, name: str, text: str) -> None:
        """Declare a global variable once."""
        line = f"{name} = {text}"
        if line not in self._globals:
            self._globals.append(line)
