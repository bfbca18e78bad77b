"""Kernel specs: a kernel by its compile-time constants. Equal specs are compiled once.

    @dataclass(frozen=True)
    class Scale(KernelSpec):
        '''args: x, y, n'''
        dtype: DType

        def emit(self, m: Module) -> None:
            f = m.kernel()
            ...

The docstring lists the args that the kernel reads, in order; a launch of it must pass them.
`Operands` reads them by name, for kernels that have many.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import ClassVar

from rlx.backends.cpu.tuning import tuned_values
from rlx.llvm.builder import Function, Module, Value, i64, ptr
from rlx.llvm.jit import Kernel, Unit, compile_many, counters
from rlx.llvm.target import Target
from rlx.support.settings import debug, debug_level


class KernelSpec(ABC):
    """Base of kernels: frozen dataclasses of what is constant in their code."""

    optimizer: ClassVar[str] = "none"  # see jit.Unit: most kernels need no LLVM passes
    level: ClassVar[int] = 2

    @abstractmethod
    def emit(self, m: Module) -> None:
        """Define `kernel` in the module: void kernel(ptr args, i32 tid, i32 nth)."""

    @property
    def flushes_denormals(self) -> bool:
        """Whether numbers below the normal ones count as zeros, where that is quicker: for sums of
        products, in which they are less than a rounding of any normal term."""
        return False

    @property
    def label(self) -> str:
        """What profiles and dumps call it."""
        return type(self).__name__.lower()


_units: dict[tuple[KernelSpec, Target], Unit] = {}


def unit_of(spec: KernelSpec, target: Target) -> Unit:
    """The compilation unit of a spec; its IR is emitted once per process."""
    key = (spec, target)
    found = _units.get(key)
    if found is None:
        found = _units[key] = emit_unit(spec, target, tuned_values(spec, target))[0]
    return found


def emit_unit(
    spec: KernelSpec, target: Target, tuned: Mapping[str, int]
) -> tuple[Unit, dict[str, tuple[int, ...]]]:
    """The unit of a spec with these values of its tunables; and the tunables that it has."""
    module = Module(target, tuned)
    spec.emit(module)
    return Unit(module.text(), target, spec.optimizer, spec.level), module.tunables


def read_ahead(f: Function) -> int:
    """Software prefetch distance in bytes for weights streamed once from memory; 0: none."""
    return f.module.tunable("read_ahead", f.target.read_ahead, 0, 1024, 2048, 4096, 8192)


def compile_specs(specs: Iterable[KernelSpec], target: Target) -> dict[KernelSpec, Kernel]:
    """Machine code for every distinct spec."""
    distinct = list(dict.fromkeys(specs))
    before = counters.compilations
    units = []
    for spec in distinct:
        units.append(unit_of(spec, target))
    kernels = compile_many(units)
    debug(1, f"{len(distinct)} distinct kernels, {counters.compilations - before} compiled now")
    if debug_level() >= 5:
        for spec in distinct:
            debug(5, f"; {spec}\n{unit_of(spec, target).text}")
            if debug_level() >= 7:
                debug(7, unit_of(spec, target).assembly())
    return dict(zip(distinct, kernels, strict=True))


class Operands:
    """The args of a kernel by name: `o["name"]` is a pointer or an i64.

    They are loaded where the object is created, which must dominate all uses: usually the start of
    the function. `wanted` limits the loads to those names.
    """

    def __init__(
        self,
        f: Function,
        order: Sequence[str],
        pointers: Collection[str],
        wanted: Collection[str] | None = None,
    ) -> None:
        self.values: dict[str, Value] = {}
        for index, name in enumerate(order):
            if wanted is None or name in wanted:
                type_ = ptr if name in pointers else i64
                self.values[name] = f.arg(f["args"], index, type_)

    def __getitem__(self, name: str) -> Value:
        return self.values[name]
