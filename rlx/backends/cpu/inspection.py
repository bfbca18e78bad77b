"""The CPU's machine, native code and kernel cache, for `rlx inspect`, reports and `rlx doctor`.

Overrides are kernels edited by hand that run in place of compiled ones. Such a file has a header
line for each kernel, `; kernel KEY LANGUAGE TITLE`, and its code below. KEY is the key of the unit
that it replaces, LANGUAGE is `llvm OPT LEVEL` (as in `jit.Unit`) or `asm`.
"""

from __future__ import annotations

import pickle
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from rlx.backends.base import Executable
from rlx.backends.cpu.executable import CpuExecutable
from rlx.backends.cpu.kernels.spec import KernelSpec, unit_of
from rlx.backends.cpu.tuning import forget_tuned
from rlx.backends.inspection import (
    CachedFile,
    Inspection,
    KernelCode,
    LaunchInfo,
    NativeProgram,
    Roof,
    TunedProgram,
    is_table,
    parse_table,
)
from rlx.errors import CodegenError, InputError, ParseError
from rlx.ir.lir import Lir
from rlx.llvm.disk_cache import DiskCache
from rlx.llvm.jit import Kernel, Unit, compile_unit, counters
from rlx.llvm.target import Target
from rlx.specialize.options import CompileOptions
from rlx.support.files import cache_directory
from rlx.support.machine import physical_cores, usable_cores, worker_count
from rlx.support.settings import setting

if TYPE_CHECKING:
    from rlx.backends.cpu.backend import CpuBackend
    from rlx.backends.cpu.lowering import KernelLaunch

# those that kernels use
_FEATURES = (
    "avx2", "avx512", "vnni", "bf16", "amx_int8", "amx_bf16", "fma", "f16c",
    "neon", "dotprod", "i8mm",
)  # fmt: skip
_HEAD = re.compile(r"^; kernel ([0-9a-f]{64}) (?:(asm)|llvm (\w+) (\d))(?: .*)?$", re.MULTILINE)
_ASSEMBLE = "import pickle, sys; sys.stdout.buffer.write(pickle.load(sys.stdin.buffer).compile())"


class CpuKernel(NamedTuple):
    spec: KernelSpec
    target: Target

    def emit(self) -> Unit:
        return unit_of(self.spec, self.target)


class CpuInspection(Inspection):
    backend: CpuBackend

    # -- machine --------------------------------------------------------------------------------

    @property
    def has_native_code(self) -> bool:
        return True

    @property
    def runs_here(self) -> bool:
        return self.backend.target.runs_on(Target.host())

    def targets(self) -> list[str]:
        return Target.names()

    def machine(self, threads: int | None = None) -> dict[str, Any]:
        from rlx.backends.cpu.kernels.qgemm.amx_gemm import suits_tiles
        from rlx.backends.cpu.kernels.qgemm.dot import dot_kind

        target = self.backend.target
        kind = dot_kind(target)
        dot = kind.instruction if kind else "as floats"
        return {
            "target": target.cpu + (" (RLX_TARGET)" if setting("RLX_TARGET") else ""),
            "vector_bits": target.vector_bits,
            "features": [name for name in _FEATURES if getattr(target, name)],
            "int8_dot_product": f"AMX, one row {dot}" if suits_tiles(target) else dot,
            "cores": f"{physical_cores()} physical, {usable_cores()} usable",
            "threads": worker_count(threads),
        }

    def roofline(self, workers: int) -> list[Roof]:
        from rlx.backends.cpu.peaks import measure_limits

        found = measure_limits(workers)
        roofs = [
            Roof("memory", gb=found.memory_gb),
            Roof("cache", gb=found.cache_gb),
            Roof("f32", gflops=found.gflops),
        ]
        return roofs if found.int8_gops is None else [*roofs, Roof("int8", gflops=found.int8_gops)]

    # -- native code ----------------------------------------------------------------------------

    def program(self, lir: Lir, options: CompileOptions) -> NativeProgram:
        from rlx.backends.cpu.barriers import barriers_of
        from rlx.backends.cpu.kernels import registry  # noqa: F401  fills the table of lowerings
        from rlx.backends.cpu.lowering import Context, lower_graph

        target, workers = self.backend.target, self.backend.workers(options)
        launches = lower_graph(Context(lir, target, workers))
        shown = [_launch_info(launch, target) for launch in launches]
        return NativeProgram(lir, shown, lambda: barriers_of(launches, lir), workers, target.cpu)

    def write_kernel(self, code: KernelCode, title: str, *, assembly: bool) -> str:
        assert isinstance(code, Unit)
        kind = "asm" if assembly else f"llvm {code.opt} {code.level}"
        return f"; kernel {code.key} {kind} {title}\n{code.assembly() if assembly else code.text}"

    def compile_seconds(self) -> float:
        return counters.seconds

    def override(self, executables: Iterable[Executable], text: str, where: str) -> None:
        native = [e for e in executables if isinstance(e, CpuExecutable)]
        if is_table(text):
            _override_barriers(native, text, where)
        else:
            _override_kernels(native, text, where)

    # -- tuning ---------------------------------------------------------------------------------

    def tune(
        self,
        executable: Executable,
        options: CompileOptions,
        run: Callable[[], None],
        progress: Callable[[str], None],
    ) -> TunedProgram:
        from rlx.backends.cpu.autotune import Autotuner

        assert isinstance(executable, CpuExecutable)
        program = self.program(executable.lir, options)
        kernels = [cast(CpuKernel | None, launch.kernel) for launch in program.launches]
        specs = [None if kernel is None else kernel.spec for kernel in kernels]
        return Autotuner(executable, specs, self.backend.target, run, progress).tune()

    def forget_tuning(self) -> None:
        forget_tuned(self.backend.target)

    # -- cache ----------------------------------------------------------------------------------

    def cached_kernels(self) -> list[CachedFile]:
        root = cache_directory("kernels")
        found = []
        for path in [] if root is None else root.glob("??/*.rlxk"):
            info = path.stat()
            found.append(CachedFile("kernels", path, info.st_size, info.st_mtime))
        return found

    def damaged_kernels(self) -> dict[Path, str]:
        root = cache_directory("kernels")
        if root is None:
            return {}
        disk = DiskCache(root)
        faults = {f.path: _fault(disk, f.path.stem) for f in self.cached_kernels()}
        return {path: why for path, why in faults.items() if why}


def _launch_info(launch: KernelLaunch, target: Target) -> LaunchInfo:
    flags = (
        "one worker" * launch.solo,
        "jump" * launch.jump,
        "in Python" * (launch.host is not None),
    )
    kernel = None if launch.spec is None else CpuKernel(launch.spec, target)
    return LaunchInfo(launch.label, launch.node, kernel, ", ".join(filter(None, flags)))


def _fault(disk: DiskCache, key: str) -> str:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if disk.load(key) is not None:
            return ""
    return str(caught[0].message).rpartition("compiled again: ")[2] if caught else "gone"


# -- overrides ------------------------------------------------------------------------------------


def _override_barriers(executables: list[CpuExecutable], text: str, where: str) -> None:
    """Set the barriers of an edited table, in the executables that have its launches."""
    rows = parse_table(text)
    labels = [label for label, _ in rows]
    same = [e for e in executables if [m.label for m in e.relocatable.metadata] == labels]
    for executable in same:
        executable.set_barriers([barrier for _, barrier in rows])
    if not same:
        raise InputError(
            "launches that the model does not have", where=where, got=f"{len(rows)} launches",
            hint="barriers may be added and removed; kernels and their order stay",
        )  # fmt: skip


def _override_kernels(executables: list[CpuExecutable], text: str, where: str) -> None:
    kernels = {k.key: k.compile(Target.host()) for k in parse_kernels(text, where)}
    found: set[str] = set()
    for executable in executables:
        found |= executable.replace_kernels(kernels)
    foreign = sorted(key[:16] for key in kernels.keys() - found)
    if foreign:
        raise InputError(
            "kernels that the model does not run", where=where,
            got=", ".join(foreign[:3]) + (" …" if foreign[3:] else ""),
            hint="they belong to another CPU, model or version: write them again",
        )  # fmt: skip


class KernelOverride(NamedTuple):
    """Code that replaces the unit of this key."""

    key: str
    text: str
    is_assembly: bool
    opt: str = "none"
    level: int = 2

    def compile(self, target: Target) -> Kernel:
        if not self.is_assembly:
            return compile_unit(Unit(self.text, target, self.opt, self.level))
        unit = Unit(_as_module(self.text), target)
        return Kernel(unit.key, _assemble(unit))


def parse_kernels(text: str, where: str) -> list[KernelOverride]:
    heads = [*_HEAD.finditer(text)]
    if not heads or heads[0].start() != 0 or len(heads) != len(re.findall("(?m)^; kernel ", text)):
        raise ParseError(
            "a kernel without its header line", where=where,
            expected="; kernel KEY llvm OPT LEVEL, or ; kernel KEY asm",
            hint="leave the lines that begin with `; kernel` as they are",
        )  # fmt: skip
    ends = [*(h.start() for h in heads[1:]), len(text)]
    return [
        KernelOverride(
            h[1], text[h.end() + 1 : end], h[2] is not None, h[3] or "none", int(h[4] or 2)
        )
        for h, end in zip(heads, ends, strict=True)
    ]


def _as_module(assembly: str) -> str:
    """An LLVM module of module-level inline assembly."""

    def quoted(line: str) -> str:
        return re.sub(r'[\\"\x00-\x1f\x7f-\U0010ffff]', _escaped, line)

    return "".join(f'module asm "{quoted(line)}"\n' for line in assembly.splitlines())


def _escaped(match: re.Match[str]) -> str:
    return "".join(f"\\{byte:02X}" for byte in match[0].encode())


def _assemble(unit: Unit) -> bytes:
    """Assemble in another process: LLVM exits on a syntax error in assembly."""
    done = subprocess.run(
        [sys.executable, "-c", _ASSEMBLE],
        input=pickle.dumps(unit),
        capture_output=True,
        check=False,
    )
    if done.returncode != 0:
        raise CodegenError(
            "LLVM rejects the assembly", where="llvm", got=done.stderr.decode().strip()
        )
    return done.stdout
