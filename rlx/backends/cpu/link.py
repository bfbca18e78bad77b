"""Linking: gives a relocatable program memory and addresses, in tables for the native executor."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rlx.backends.bounds_checks import compiled
from rlx.backends.buffer import HOST
from rlx.backends.cpu.program import LaunchTable, Program
from rlx.backends.cpu.relocatable import (
    ABSOLUTE,
    ARENA,
    ARGS,
    CONSTANT,
    STATUS,
    External,
    HostCall,
    RelocatableProgram,
)
from rlx.ir.binding import bind_op
from rlx.ir.op import Array
from rlx.ir.shape import Shape
from rlx.llvm.jit import Kernel
from rlx.support.records import dataclass


@dataclass
class LinkedProgram:
    """A program with code, arena and constants; parameters, states and inputs come later."""

    relocatable: RelocatableProgram
    program: Program
    arena: Array
    status: Array
    addresses: list[int]  # of the relocation bases

    def externals(self) -> list[External]:
        """The externals of dynamic args, in the order in which `fill` takes their addresses."""
        used = [arg.external for arg in self.relocatable.dynamic_args]
        return list(dict.fromkeys(external for external in used if external is not None))

    def filler(self, symbols: Sequence[str]) -> Callable[..., None]:
        """`fill(dynamic, externals, *sizes)` computes every dynamic arg. It is generated as Python
        source, so that a run evaluates no expression trees."""
        externals = {external: i for i, external in enumerate(self.externals())}
        lines = [f"def fill(dynamic, externals{''.join(', ' + s for s in symbols)}):"]
        for i, (base, external, addend) in enumerate(self.relocatable.dynamic_args):
            terms = [] if external is None else [f"externals[{externals[external]}]"]
            if base != ABSOLUTE:
                terms.append(f"bases[{base}]")
            if addend != 0 or not terms:
                terms.append(f"({addend})")
            lines.append(f"    dynamic[{i}] = {' + '.join(terms)}")
        lines.append("    return")
        scope: dict[str, Any] = {"bases": self.addresses}
        exec(compiled("\n".join(lines)), scope)  # names are checked identifiers, the rest integers
        fill: Callable[..., None] = scope["fill"]
        return fill


def link(relocatable: RelocatableProgram, kernels: Mapping[str, Kernel]) -> LinkedProgram:
    """Allocate a program's arena and resolve the addresses of its kernels, arena and constants."""
    arena, status = HOST.alloc_arena(relocatable.arena_size).array, np.zeros(1, np.int64)
    code = np.array([*(kernels[k].address() for k in relocatable.kernels), 0], np.uint64)
    fns = code[relocatable.calls]  # a host call is −1: the null at the end
    table = LaunchTable(fns, relocatable.starts, relocatable.flags, relocatable.phases)
    keep, count = (kernels, relocatable.constants), len(relocatable.dynamic_args)
    program = Program(table, relocatable.patches, count, relocatable.workers, keep)
    addresses = np.zeros(CONSTANT + len(relocatable.constants), np.int64)
    addresses[ARENA], addresses[STATUS] = address_of(arena), address_of(status)
    addresses[ARGS] = program.arg_address(0)
    addresses[CONSTANT:] = [address_of(c) for c in relocatable.constants]
    args = addresses[relocatable.bases] + relocatable.addends
    program.args[: len(args)] = args
    return LinkedProgram(relocatable, program, arena, status, addresses.tolist())


def address_of(array: Any) -> int:
    return int(array.__array_interface__["data"][0])


# -- host calls ------------------------------------------------------------------------------------


def call_host(call: HostCall, addresses: Sequence[int], sizes: Mapping[str, int]) -> None:
    """Run the reference of the op on operands and results at these addresses."""
    shapes = (*call.inputs, *call.outputs)
    arrays = [_array_at(a, s.bind(sizes)) for a, s in zip(addresses, shapes, strict=True)]
    operands, targets = arrays[: len(call.inputs)], arrays[len(call.inputs) :]
    with np.errstate(all="ignore"):
        results = bind_op(call.op, sizes).reference(*operands)
    if not isinstance(results, tuple):
        results = (results,)
    for target, result in zip(targets, results, strict=True):
        target[...] = result


def _array_at(address: int, shape: Shape) -> Array:
    """A row-major array over memory at an address."""
    size = int(np.prod(shape.static_dims, dtype=np.int64)) * shape.dtype.bytes
    if not size:
        return np.empty(shape.static_dims, shape.dtype.numpy)
    raw = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))
    return raw.view(shape.dtype.numpy).reshape(shape.static_dims)
