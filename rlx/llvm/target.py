"""The target of code generation: a CPU with its features, vector width and registers.

`Target.host()` reads the operating system's list of features, so a start from cached objects needs
no LLVM; RLX_TARGET restricts it. `Target.named("x86-64-v3")` is a target whose objects can be
shipped.
"""

from __future__ import annotations

import platform
import sys
from functools import cache, cached_property

from rlx.errors import CodegenError, OptionError
from rlx.llvm.cpus import NAMED, linux_cpu
from rlx.support.records import dataclass
from rlx.support.settings import setting

_RESERVE = "reserve-x18"  # not a CPU feature: a register that the ABI reserves
# What follows the architecture in the triple. Objects are ELF everywhere, because `elf` links them.
# Apple's calls are Linux's as far as kernels have them (no variable arguments, x18 untouched); the
# vendor tells its code apart.
_LINUX = "unknown-linux-gnu"
_SYSTEMS = {"darwin": "apple-linux-gnu", "win32": "pc-windows-msvc-elf"}

_INTEL_SERVERS = {"icelake-server", "sapphirerapids", "emeraldrapids", "graniterapids"}

_LEVELS = ("x86-64", "x86-64-v2", "x86-64-v3", "x86-64-v4", "generic")  # not one CPU's names
_UNUSED = ("rdrnd", "rdseed")  # no code has them; a system switches them off where a CPU errs


def _triple(arch: str) -> str:
    """Code of an architecture for this system."""
    return f"{arch}-{_SYSTEMS.get(sys.platform, _LINUX)}"


@dataclass(frozen=True)
class Target:
    """One CPU model with its features; targets of equal `key` give the same machine code."""

    triple: str
    cpu: str
    features: tuple[str, ...]
    arch: str
    emulates_amx: bool = False
    """Whether code does in memory what AMX would do: for tests."""
    paced_for: str = ""
    """The CPU whose memory sets the prefetch distance, where `cpu` is a level of many CPUs."""

    @staticmethod
    def host() -> Target:
        """This machine's CPU, or the subset of it that RLX_TARGET names."""
        return _host()

    @staticmethod
    def named(name: str) -> Target:
        """A target from the table, for this system; or the host for "host"."""
        if name == "host":
            return _host()
        entry = NAMED.get(name)
        if entry is None:
            raise OptionError(
                "unknown target",
                where="target",
                got=repr(name),
                expected="one of " + ", ".join(Target.names()),
                hint="use 'host' for this machine",
            )
        arch, cpu, features = entry
        if arch == "aarch64" and sys.platform == "darwin":
            features |= {_RESERVE}
        return Target(_triple(arch), cpu, tuple(sorted(f"+{f}" for f in features)), arch)

    @staticmethod
    def names() -> list[str]:
        return ["host", *NAMED]

    @cached_property
    def _present(self) -> frozenset[str]:
        return frozenset(f[1:] for f in self.features if f[0] == "+")

    @cached_property
    def key(self) -> str:
        """Everything about the target that can change machine code, as text."""
        text = f"{self.triple};{self.cpu};{','.join(self.features)}"
        text += ";emulates_amx" if self.emulates_amx else ""
        return f"{text};paced_for={self.paced_for}" if self.paced_for else text

    def has(self, feature: str) -> bool:
        """Is this LLVM feature (such as "avx2") present?"""
        return feature in self._present

    def runs_on(self, host: Target) -> bool:
        """Can code made for this target run on `host`?"""
        if self.arch != host.arch or self.system != host.system:
            return False
        if host.has(_RESERVE) and not self.has(_RESERVE):
            return False
        return self._present - {_RESERVE, *_UNUSED} <= host._present

    @cached_property
    def system(self) -> str:
        """The system whose calls and functions code uses, as `sys.platform` has it."""
        rest = self.triple.split("-", 1)[1]
        return next((name for name, found in _SYSTEMS.items() if found == rest), "linux")

    @property
    def is_windows(self) -> bool:
        return self.system == "win32"

    @property
    def is_x86(self) -> bool:
        return self.arch == "x86_64"

    @property
    def vector_bits(self) -> int:
        if self.avx512:
            return 512
        return 256 if self.avx2 else 128

    def lanes(self, bits: int) -> int:
        """Elements of `bits` bits in one vector register."""
        return self.vector_bits // bits

    @property
    def num_vector_registers(self) -> int:
        return 32 if self.avx512 or not self.is_x86 else 16

    @property
    def read_ahead(self) -> int:
        """Software prefetch distance in bytes for data streamed once from memory; 0: no prefetch.
        With 512-bit vectors the loop is short enough for the prefetcher of Zen 4, and software
        prefetch costs 5 to 15 % there; Intel's leaves a sixth to a third of the bandwidth unused,
        and reads most with a shorter distance than Zen 3's. A core of Zen 5 reads 40 GB/s, and has
        that much more on its way. Other CPUs: not measured."""
        cpu = self.paced_for or self.cpu
        if cpu == "znver5":
            return 8192
        if self.avx512:
            return 1024 if cpu in _INTEL_SERVERS else 0
        return 2048 if self.is_x86 and not cpu.startswith("znver") else 4096

    @property
    def avx2(self) -> bool:
        return self.has("avx2")

    @property
    def fma(self) -> bool:
        return self.has("fma") or not self.is_x86

    @property
    def f16c(self) -> bool:
        """Whether the CPU converts between f16 and f32 in hardware."""
        return self.has("f16c") or self.has("avx512f") or not self.is_x86

    @property
    def avx512(self) -> bool:
        """AVX-512 F, BW, DQ and VL together."""
        return {"avx512f", "avx512bw", "avx512dq", "avx512vl"} <= self._present

    @property
    def vnni(self) -> bool:
        return self.has("avx512vnni") or self.has("avxvnni")

    @property
    def bf16(self) -> bool:
        return self.has("avx512bf16") or (not self.is_x86 and self.has("bf16"))

    @property
    def amx_int8(self) -> bool:
        return self.has("amx-int8")

    @property
    def amx_bf16(self) -> bool:
        return self.has("amx-bf16")

    @property
    def neon(self) -> bool:
        return self.has("neon")

    @property
    def dotprod(self) -> bool:
        return self.has("dotprod")

    @property
    def i8mm(self) -> bool:
        return self.has("i8mm")


@cache
def _host() -> Target:
    machine, name = _machine(), setting("RLX_TARGET")
    if not name or name == "host":
        return machine
    wanted = Target.named(name)
    if not wanted.runs_on(machine):
        raise OptionError(
            "code for this CPU cannot run here",
            where="RLX_TARGET",
            got=repr(name),
            expected="one of " + ", ".join(n for n in NAMED if _runs(n, machine)),
        )
    if wanted.cpu not in _LEVELS:
        return wanted
    return Target(wanted.triple, wanted.cpu, wanted.features, wanted.arch, paced_for=machine.cpu)


def _runs(name: str, machine: Target) -> bool:
    return Target.named(name).runs_on(machine)


def _machine() -> Target:
    arch = {"amd64": "x86_64", "arm64": "aarch64"}.get(
        platform.machine().lower(), platform.machine()
    )
    if arch not in ("x86_64", "aarch64"):
        raise CodegenError(
            "no native code for this machine",
            where="target",
            got=arch,
            expected="x86_64 or aarch64",
        )
    if sys.platform == "linux":
        cpu, features = linux_cpu(arch)
        return Target(_triple(arch), cpu, features, arch)
    return _host_from_llvm(arch)


def _host_from_llvm(arch: str) -> Target:
    """The host where there is no /proc/cpuinfo."""
    import llvmlite.binding as llvm

    flags = dict(llvm.get_host_cpu_features())
    if arch == "aarch64" and sys.platform == "darwin":
        flags[_RESERVE] = True  # Apple's ABI keeps x18 for the system
    # Tiles need the system's permission (see `cpus`).
    flags |= dict.fromkeys((name for name in flags if name.startswith("amx-")), False)
    features = tuple(sorted(("+" if on else "-") + name for name, on in flags.items()))
    return Target(_triple(arch), llvm.get_host_cpu_name(), features, arch)
