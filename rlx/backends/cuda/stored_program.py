"""Programs as parts of artifacts: tables, and machine code for one kind of GPU.

A cubin runs on the GPUs it was made for, with the driver that made it or a newer one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlx.backends.base import Parts
from rlx.backends.bounds_checks import BoundsCheck
from rlx.backends.cuda.builder import KernelModule
from rlx.backends.cuda.driver import driver_version
from rlx.backends.cuda.kernel import GpuKernel
from rlx.backends.cuda.launches import Branch, KernelLaunch, Repeat, While
from rlx.backends.cuda.program import Base, Program
from rlx.backends.cuda.tensor_map import Matrix
from rlx.errors import CodegenError, FormatError
from rlx.ir.attrs import Data
from rlx.ir.serial.reader import Reader
from rlx.ir.serial.writer import Writer
from rlx.support.records import dataclass

_FORMAT = 4
_JUMPS: dict[str, Any] = {"repeat": Repeat, "branch": Branch, "while": While}
_TARGET, _PROGRAM, _ARGS, _CUBINS = "target", "program", "args", "cubins"


@dataclass(frozen=True)
class StoredKernel(GpuKernel):
    """A kernel of which only the machine code is left."""

    digest: str  # of the machine code
    name: str
    has_blocks: bool
    block: int
    memory: int
    is_early: bool

    @property
    def by_blocks(self) -> bool:
        return self.has_blocks

    @property
    def label(self) -> str:
        return self.name

    @property
    def threads(self) -> int:
        return self.block

    @property
    def shared(self) -> int:
        return self.memory

    @property
    def starts_early(self) -> bool:
        return self.is_early

    def emit(self, m: KernelModule) -> None:
        raise CodegenError("only the machine code of a kernel is stored", where=self.name)


def write_program(
    program: Program, cubins: Mapping[GpuKernel, bytes], cpu: str, advance: GpuKernel
) -> Parts:
    """`advance` is the kernel that goes on to the next token of a decode loop."""
    digests = {hashlib.sha256(image).hexdigest(): image for image in cubins.values()}
    launches: list[tuple[Any, ...]] = []
    for x in program.launches:
        if x.kernel is None:
            numbers = () if x.jump is None else tuple(vars(x.jump).values())
            launches.append((x.label, numbers))
            continue
        k, digest = x.kernel, hashlib.sha256(cubins[x.kernel]).hexdigest()
        launches.append(
            (
                x.label,
                digest,
                k.by_blocks,
                k.threads,
                k.shared,
                k.starts_early,
                int(x.blocks),
                int(x.threads),
                x.waits,
            )
        )
    about = (
        _FORMAT, tuple(launches), tuple(program.nodes), tuple(program.symbols),
        tuple(map(tuple, program.bounds_checks)), tuple(program.reports.items()),
        tuple((base, where, offset, (m.element, m.rows, m.columns, m.stride, m.box, m.width,
               m.permuted)) for base, (where, offset, m) in program.maps.items()),
        tuple(program.starts), tuple(program.bases), tuple(program.dynamic), tuple(program.orders),
        program.can_repeat, tuple(program.replaced),
        tuple((base, Data(array)) for base, array in program.constants.items()),
        tuple((digest, len(image)) for digest, image in digests.items()),
        hashlib.sha256(cubins[advance]).hexdigest(),
    )  # fmt: skip
    return {
        _TARGET: Writer().value((cpu, driver_version())),
        _PROGRAM: Writer().value(about),
        _ARGS: program.base_of.tobytes() + program.fixed.tobytes(),
        _CUBINS: b"".join(digests.values()),
    }


class StoredProgram(Program):
    def __init__(self, parts: Parts, cpu: str) -> None:
        super().__init__()
        for name in (_TARGET, _PROGRAM, _ARGS, _CUBINS):
            if name not in parts:
                raise FormatError("a part is missing", where="artifact", expected=name)
        made_for, driver = _read(parts[_TARGET])
        _require_gpu(made_for, driver, cpu)
        version, *fields = _read(parts[_PROGRAM])
        if version != _FORMAT:
            raise FormatError("a program of another version", where="artifact", got=version)
        launches, nodes, symbols, checks, reports, maps, *rest = fields
        starts, bases, dynamic, orders, self.can_repeat, replaced, *rest = rest
        constants, sizes, self.advance = rest
        self.launches = [_launch(row) for row in launches]
        self.nodes, self.symbols = list(nodes), list(symbols)
        self.bounds_checks = [BoundsCheck(*row) for row in checks]
        self.reports = dict(reports)
        self.maps = {base: (where, offset, Matrix(*m)) for base, where, offset, m in maps}
        self.starts, self.bases, self.dynamic = list(starts), list(bases), list(dynamic)
        self.orders, self.replaced = list(orders), list(replaced)
        self.base_of, self.fixed = np.frombuffer(parts[_ARGS], np.int64).reshape(2, -1).copy()
        self.constants: dict[Base, Any] = {base: data.array for base, data in constants}
        self.cubins: dict[str, bytes] = {}
        at, code = 0, parts[_CUBINS]
        for digest, size in sizes:
            self.cubins[digest] = code[at : at + size]
            at += size
        if at != len(code):
            raise FormatError("the code does not belong to the program", where="artifact")


def _launch(row: Sequence[Any]) -> KernelLaunch:
    if len(row) == 2:
        label, numbers = row
        return KernelLaunch(None, jump=_JUMPS[label](*numbers) if numbers else None)
    label, digest, by_blocks, block, shared, early, blocks, threads, waits = row
    kernel = StoredKernel(digest, label, by_blocks, block, shared, early)
    return KernelLaunch(kernel, (), threads, blocks, waits=waits)


def _read(data: bytes) -> Any:
    reader = Reader(data)
    found = reader.value()
    reader.finish()
    return found


def _require_gpu(made_for: str, driver: int, cpu: str) -> None:
    if made_for != cpu:
        raise CodegenError(
            "code for another GPU", where="artifact", got=made_for, expected=cpu,
            hint="make the artifact on a machine with a GPU like this one",
        )  # fmt: skip
    if driver > driver_version():
        raise CodegenError(
            "code of a newer driver", where="artifact", got=f"CUDA {driver / 1000:g}",
            expected=f"CUDA {driver_version() / 1000:g} or older", hint="update the NVIDIA driver",
        )  # fmt: skip
