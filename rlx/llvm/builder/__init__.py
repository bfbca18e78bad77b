"""A typed builder of LLVM IR. Kernels are written with it as Python functions.

    from rlx.llvm.builder import Module, f32, i64, vec

    def scale_kernel(target):                     # y[i] = a * x[i]
        m = Module(target)
        f = m.kernel()                            # void kernel(ptr args, i32 tid, i32 nth)
        x, y = f.arg(f["args"], 0), f.arg(f["args"], 1)      # operand pointers
        n, a = f.arg(f["args"], 2, i64), f.arg(f["args"], 3, f32)
        lanes = target.lanes(32)
        v = vec(lanes, f32)
        lo, hi = f.split(n, lanes)                # this worker's share, in whole vectors
        wide = f.splat(a, lanes)
        full = lo + (hi - lo) // lanes * lanes
        for i in f.range(lo, full, lanes):        # the body is emitted once
            f.store(f.load(f.gep(x, i, f32), v) * wide, f.gep(y, i, f32))
        rest = f.lane_mask(hi - full, lanes)      # the tail, masked
        tail = f.masked_load(f.gep(x, full, f32), v, rest)
        f.masked_store(tail * wide, f.gep(y, full, f32), rest)
        return m

Values carry types, and operators emit instructions: `a + b`, `a < b` (a mask), `a >> 4` (logical;
`a.ashr(4)` keeps the sign), `a.eq(b)`, `a.to(f32)` (convert), `a.bits(i32)` (reinterpret). A Python
number takes the type of the value beside it. Nothing is broadcast silently: `f.splat(x, lanes)`.

Loops that carry values (accumulators) update them in `carry.values`:

    total = f.carry([zero])
    for i in total.range(lo, hi, lanes):
        total.values = [f.fma(f.load(...), w, total.values[0])]

Branches are `for _ in f.when(cond):`, `for holds in f.either(cond):` (both arms, in turn) and `for
n in f.cases(value, numbers):`. Bodies may be functions: `f.loop(lo, hi, step, values, body)`,
`f.if_(cond, then, orelse)` and `f.switch(value, {0: body, ...})` return what the bodies return.
`f.fma`, `f.min`, `f.max` (NaN kept), `f.select(mask, a, b)`, `f.shuffle`, `f.reduce("add", v)`,
`f.gather`, `f.prefetch`, `f.alloca`, `f.intrinsic("llvm...", type, *args)` are there too; functions
such as exp and tanh are in `rlx.llvm.math`. Name the exported function `kernel` in each module:
equal kernels then have equal text and are compiled once.

Code is emitted as it should run: LLVM's optimiser is normally not used. Each line costs about 25 µs
of code generation, so loop rather than unroll where it does not pay.
"""

from rlx.llvm.builder.core import Value
from rlx.llvm.builder.flow import Carry
from rlx.llvm.builder.module import Function, Module
from rlx.llvm.builder.types import Type, bf16, f16, f32, f64, i1, i8, i16, i32, i64, ptr, vec, void

__all__ = [
    "Carry",
    "Function",
    "Module",
    "Type",
    "Value",
    "bf16",
    "f16",
    "f32",
    "f64",
    "i1",
    "i8",
    "i16",
    "i32",
    "i64",
    "ptr",
    "vec",
    "void",
]
