"""Helpers that compile a small module and run it over arrays."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np

from rlx.llvm.builder import Function, Module, Type, Value, i64, vec
from rlx.llvm.jit import Unit, compile_unit
from rlx.llvm.target import Target

RUNNABLE = [
    name
    for name in ("host", "x86-64", "x86-64-v2", "x86-64-v3", "aarch64")
    if Target.named(name).runs_on(Target.host())
]


def run_module(module: Module, args: list[object], tid: int = 0, nth: int = 1) -> None:
    """Compile and call `kernel` with arrays (as pointers) and integers as args."""
    kernel = compile_unit(Unit(module.text(), module.target))
    call = kernel.function("kernel", None, ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32)
    table = np.array([w.ctypes.data if isinstance(w, np.ndarray) else w for w in args], np.int64)
    call(table.ctypes.data, tid, nth)


def apply(
    target: Target,
    body: Callable[..., Value],
    out: Type,
    *arrays: np.ndarray,
    types: tuple[Type, ...],
    lanes: int = 0,
    dtype: object = None,
) -> np.ndarray:
    """body over whole vectors of the arrays; sizes are padded to a multiple of the lanes."""
    module = Module(target)
    f: Function = module.kernel()
    lanes = lanes or target.lanes(32)
    pointers = [f.arg(f["args"], i) for i in range(len(arrays) + 1)]
    count = f.arg(f["args"], len(arrays) + 1, i64)
    for i in f.range(0, count, lanes):
        loaded = [
            f.load(f.gep(p, i, t), vec(lanes, t)) for p, t in zip(pointers, types, strict=False)
        ]
        f.store(body(*loaded), f.gep(pointers[-1], i, out))
    n = len(arrays[0])
    padded = [np.concatenate([a, np.zeros(-n % lanes, a.dtype)]) for a in arrays]
    result = np.zeros(n + -n % lanes, dtype or arrays[0].dtype)
    run_module(module, [*padded, result, len(result)])
    return result[:n]
