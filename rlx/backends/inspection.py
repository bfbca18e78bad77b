"""What a device shows of its machine, its native code and its caches.

`Backend.inspection()` returns it. The command line and reports use nothing else of a device. A
device without native code inherits the defaults of this file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from rlx.errors import StageError
from rlx.ir.lir import Lir
from rlx.ir.node import Node
from rlx.support.records import dataclass

if TYPE_CHECKING:
    from rlx.backends.base import Backend, Executable
    from rlx.specialize.options import CompileOptions

_ROW = re.compile(r"^  #\d+ +(.*?)(?: +// .*)?$", re.MULTILINE)
_COLUMNS = re.compile(r" {2,}")
_FLAGS = re.compile(r"(?:one worker|jump|in Python)(?:, barrier)?|barrier")


class KernelCode(Protocol):
    """A kernel as LLVM IR, ready to compile."""

    @property
    def key(self) -> str: ...
    @property
    def text(self) -> str: ...
    def assembly(self) -> str: ...
    def compile(self) -> bytes:
        """Compile to an object file now, whatever is cached."""


class DistinctKernel(Protocol):
    """A kernel of a program; kernels with the same code are equal."""

    def emit(self) -> KernelCode: ...
    def __hash__(self) -> int: ...


class LaunchInfo(NamedTuple):
    """One kernel launch of a program."""

    label: str
    node: Node | None
    kernel: DistinctKernel | None  # None: Python runs the node's reference
    flags: str  # `one worker`, `jump`, `in Python`

    @property
    def about_node(self) -> str:
        if self.node is None:
            return ""
        shapes = ", ".join(str(v.shape) for v in self.node.outputs)
        return f"%{self.node.id} {self.node.op.name} {shapes}"

    @property
    def about_block(self) -> str:
        block = "" if self.node is None else self.node.origin.block
        return f"// block {block}" if block else ""


class NativeProgram:
    """The kernel launches of a planned graph, and after which of them the workers wait."""

    def __init__(
        self,
        lir: Lir,
        launches: Sequence[LaunchInfo],
        barriers: Callable[[], Sequence[bool]],
        workers: int,
        target: str,
    ) -> None:
        self.lir, self.launches, self.workers, self.target = lir, launches, workers, target
        self._insert_barriers = barriers

    @cached_property
    def barriers(self) -> Sequence[bool]:
        return self._insert_barriers()

    def kernels(
        self, wanted: Callable[[Node | None], bool]
    ) -> dict[DistinctKernel, list[LaunchInfo]]:
        """The distinct kernels of the wanted nodes, and their launches."""
        found: dict[DistinctKernel, list[LaunchInfo]] = {}
        for launch in self.launches:
            if launch.kernel is not None and wanted(launch.node):
                found.setdefault(launch.kernel, []).append(launch)
        return found

    def table(self, wanted: Callable[[Node | None], bool]) -> str:
        """A header, and a row for each launch of the wanted nodes."""
        distinct = {x.kernel for x in self.launches if x.kernel is not None}
        head = (
            f"program {self.lir.name}: {len(self.launches)} launches, {len(distinct)} kernels, "
            f"{sum(self.barriers)} barriers, {self.workers} workers, {self.target}"
        )
        rows = [
            (f"#{i}", x.label, x.about_node, _flags(x, barrier), x.about_block)
            for i, (x, barrier) in enumerate(zip(self.launches, self.barriers, strict=True))
            if wanted(x.node)
        ]
        widths = [max((len(r[c]) for r in rows), default=0) for c in range(4)]
        lines = [
            "  " + "  ".join([*(r[c].ljust(widths[c]) for c in range(4)), r[4]]).rstrip()
            for r in rows
        ]
        return "\n".join([head, *lines]) + "\n"


def _flags(launch: LaunchInfo, barrier: bool) -> str:
    return ", ".join([*filter(None, [launch.flags]), *(["barrier"] if barrier else [])])


def is_table(text: str) -> bool:
    """Whether a text is a table of launches."""
    return text.startswith("program ")


def is_native_code(text: str) -> bool:
    """Whether a text is kernels or a table of launches, and not IR."""
    return text.startswith("; kernel ") or is_table(text)


def parse_table(text: str) -> list[tuple[str, bool]]:
    """Label of each launch of a table, and whether a barrier follows it."""
    rows = [_COLUMNS.split(row) for row in _ROW.findall(text)]
    return [(r[0], bool(_FLAGS.fullmatch(r[-1])) and r[-1].endswith("barrier")) for r in rows]


@dataclass(frozen=True)
class Roof:
    """A limit of the machine in the roofline model: GFLOP/s, or GB/s."""

    name: str
    gflops: float = 0.0
    gb: float = 0.0


class TunedKernel(NamedTuple):
    """What tuning found for a kernel of a program."""

    label: str
    share: float  # of the program's time
    defaults: Mapping[str, int]  # of all its tunables
    best: Mapping[str, int]  # values that differ from the defaults
    speedup: float  # of this kernel; 1 where the defaults are best


class TunedProgram(NamedTuple):
    """What tuning found for a program."""

    kernels: list[TunedKernel]
    before: float  # seconds of a run with the defaults
    after: float  # and with the best values, measured in turns


class CachedFile(NamedTuple):
    """A file of a disk cache; what it holds can be compiled again."""

    kind: str  # kernels or artifacts
    path: Path
    num_bytes: int
    written: float  # seconds since 1970


class Inspection:
    """A device without native code has nothing to show."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend

    # -- machine --------------------------------------------------------------------------------

    @property
    def has_native_code(self) -> bool:
        """Whether `program` shows something."""
        return False

    @property
    def runs_here(self) -> bool:
        """Whether this machine can run what the device compiles."""
        return True

    def targets(self) -> list[str]:
        """Names that `Backend.for_target` takes."""
        return ["host"]

    def machine(self, threads: int | None = None) -> dict[str, Any]:
        """The target that code is compiled for, and the cores it runs on."""
        return {}

    def roofline(self, workers: int) -> list[Roof]:
        """Measured limits of the machine; takes about a second."""
        return []

    # -- native code ----------------------------------------------------------------------------

    def program(self, lir: Lir, options: CompileOptions) -> NativeProgram:
        """The kernel launches of a planned graph; nothing is compiled."""
        raise StageError(
            "this device has no native code", got=self.backend.name, expected="cpu",
            hint="every device has the stages hir, mir and lir",
        )  # fmt: skip

    def write_kernel(self, code: KernelCode, title: str, *, assembly: bool) -> str:
        """A kernel as text that `override` reads back."""
        return f"; {title}\n{code.assembly() if assembly else code.text}"

    def compile_seconds(self) -> float:
        """Time that this process has spent in the compiler so far."""
        return 0.0

    def override(self, executables: Iterable[Executable], text: str, where: str) -> None:
        """Run edited kernels, or an edited table of launches, in place of what was compiled."""
        raise StageError(
            "this device has no native code", where=where, got=self.backend.name, expected="cpu"
        )

    # -- tuning ---------------------------------------------------------------------------------

    def tune(
        self,
        executable: Executable,
        options: CompileOptions,
        run: Callable[[], None],
        progress: Callable[[str], None],
    ) -> TunedProgram:
        """Measure other values of the tunables of an executable's kernels, and store the best.
        `run` runs the executable some times; `progress` is told what is measured."""
        raise StageError(
            "nothing to tune on this device", got=self.backend.name, expected="cpu",
            hint="its kernels have no tunables",
        )  # fmt: skip

    def forget_tuning(self) -> None:
        """Delete what `tune` stored: kernels get their defaults again."""

    # -- cache ----------------------------------------------------------------------------------

    def cached_kernels(self) -> list[CachedFile]:
        """The kernels in the disk cache."""
        return []

    def damaged_kernels(self) -> dict[Path, str]:
        """Cached kernels that cannot be used, and why."""
        return {}
