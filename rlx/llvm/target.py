"""The target of code generation: a CPU with its features, vector width and registers.

`Target.host()` reads the operating system's list of features, so a start from cached objects needs
no LLVM; RLX_TARGET restricts it. `Target.named("x86-64-v3")` is a target whose objects can be
shipped.
"""

from __future__ import annotations

import platform
import re
import sys
from functools import cache, cached_property

from rlx.errors import CodegenError, OptionError
from rlx.support.records import dataclass
from rlx.support.settings import setting

# Linux's name of a feature -> LLVM's. A feature listed here and absent on the host is disabled
# explicitly, so that a hypervisor that hides features of a CPU model is respected.
_SAME = """
    adx aes avx avx2 avx512bw avx512cd avx512dq avx512f avx512ifma avx512vbmi avx512vl bmi2 cldemote
    clflushopt clwb clzero cmov cmpccxadd cx16 cx8 enqcmd f16c fma fma4 fsgsbase fxsr gfni invpcid
    lwp mmx movbe movdir64b movdiri mwaitx pku popcnt rdpid rdpru rdseed rtm serialize sgx sha512
    sm3 sm4 sse sse2 sse4a ssse3 tbm tsxldtrk vaes vpclmulqdq waitpkg wbnoinvd xop xsave xsavec
    xsaveopt xsaves
"""
_X86_FLAGS = {
    **{name: name for name in _SAME.split()},
    "lm": "64bit",
    "bmi1": "bmi",
    "abm": "lzcnt",
    "lahf_lm": "sahf",
    "pclmulqdq": "pclmul",
    "3dnowprefetch": "prfchw",
    "rdrand": "rdrnd",
    "sha_ni": "sha",
    "pni": "sse3",
    "sse4_1": "sse4.1",
    "sse4_2": "sse4.2",
    "user_shstk": "shstk",
    "amx_tile": "amx-tile",
    "amx_int8": "amx-int8",
    "amx_bf16": "amx-bf16",
    "amx_fp16": "amx-fp16",
    "amx_complex": "amx-complex",
    "avx512_bf16": "avx512bf16",
    "avx512_bitalg": "avx512bitalg",
    "avx512_fp16": "avx512fp16",
    "avx512_vbmi2": "avx512vbmi2",
    "avx512_vnni": "avx512vnni",
    "avx512_vp2intersect": "avx512vp2intersect",
    "avx512_vpopcntdq": "avx512vpopcntdq",
    "avx_vnni": "avxvnni",
    "avx_ifma": "avxifma",
    "avx_ne_convert": "avxneconvert",
    "avx_vnni_int8": "avxvnniint8",
    "avx_vnni_int16": "avxvnniint16",
}

_ARM_FLAGS = {
    "fp": "fp-armv8",
    "asimd": "neon",
    "asimdhp": "fullfp16",
    "asimddp": "dotprod",
    "asimdrdm": "rdm",
    "asimdfhm": "fp16fml",
    "atomics": "lse",
    "crc32": "crc",
    "aes": "aes",
    "sha2": "sha2",
    "sha3": "sha3",
    "lrcpc": "rcpc",
    "jscvt": "jsconv",
    "fcma": "complxnum",
    "i8mm": "i8mm",
    "bf16": "bf16",
    "sve": "sve",
    "sve2": "sve2",
}

_INTEL_MODELS = {
    **dict.fromkeys((0x3C, 0x3F, 0x45, 0x46), "haswell"),
    **dict.fromkeys((0x3D, 0x47, 0x4F, 0x56), "broadwell"),
    **dict.fromkeys((0x4E, 0x5E, 0x8E, 0x9E, 0xA5, 0xA6), "skylake"),
    0x55: "skylake-avx512",
    **dict.fromkeys((0x7D, 0x7E), "icelake-client"),
    **dict.fromkeys((0x6A, 0x6C), "icelake-server"),
    **dict.fromkeys((0x8C, 0x8D), "tigerlake"),
    0xA7: "rocketlake",
    **dict.fromkeys((0x97, 0x9A, 0xB7, 0xBA, 0xBF), "alderlake"),
    0x8F: "sapphirerapids",
    0xCF: "emeraldrapids",
    **dict.fromkeys((0xAD, 0xAE), "graniterapids"),
}

_ARM_PARTS = {
    (0x41, 0xD08): "cortex-a72",
    (0x41, 0xD0B): "cortex-a76",
    (0x41, 0xD0C): "neoverse-n1",
    (0x41, 0xD40): "neoverse-v1",
    (0x41, 0xD49): "neoverse-n2",
    (0x41, 0xD4F): "neoverse-v2",
}


def from_cpuinfo(text: str, arch: str) -> tuple[str, tuple[str, ...]]:
    """(LLVM CPU name, sorted '+x'/'-x' features) of the first processor in /proc/cpuinfo."""
    fields: dict[str, str] = {}
    for name, value in re.findall(r"^([^:\n]+?)[ \t]*:[ \t]*(.*)$", text, re.MULTILINE):
        fields.setdefault(name.strip(), value)
    if arch == "x86_64":
        flags = set(fields.get("flags", "").split())
        present = {llvm for linux, llvm in _X86_FLAGS.items() if linux in flags}
        known = set(_X86_FLAGS.values()) | {"crc32"}
        if "sse4.2" in present:
            present.add("crc32")
        cpu = _x86_cpu(fields, present)
    else:
        flags = set(fields.get("Features", "").split())
        present = {llvm for linux, llvm in _ARM_FLAGS.items() if linux in flags}
        known = set(_ARM_FLAGS.values())
        part = (_number(fields, "CPU implementer"), _number(fields, "CPU part"))
        cpu = _ARM_PARTS.get(part, "generic")
    return cpu, tuple(sorted(("+" if f in present else "-") + f for f in known))


def _number(fields: dict[str, str], name: str) -> int:
    try:
        return int(fields.get(name, "0"), 0)
    except ValueError:
        return 0


def _x86_cpu(fields: dict[str, str], present: set[str]) -> str:
    family, model = _number(fields, "cpu family"), _number(fields, "model")
    vendor = fields.get("vendor_id", "")
    if vendor == "AuthenticAMD" and family == 0x17:
        return "znver1" if model < 0x30 else "znver2"
    if vendor == "AuthenticAMD" and family == 0x19:
        zen4 = 0x10 <= model <= 0x1F or 0x60 <= model <= 0x7F or 0xA0 <= model <= 0xAF
        return "znver4" if zen4 else "znver3"
    if vendor == "AuthenticAMD" and family == 0x1A:
        return "znver5"
    if vendor == "GenuineIntel" and family == 6 and model in _INTEL_MODELS:
        name = _INTEL_MODELS[model]
        if name == "skylake-avx512" and "avx512vnni" in present:
            name = "cooperlake" if "avx512bf16" in present else "cascadelake"
        return name
    for level in ("x86-64-v4", "x86-64-v3", "x86-64-v2"):
        if NAMED[level][2] <= present:
            return level
    return "x86-64"


def _set(text: str, *bases: frozenset[str]) -> frozenset[str]:
    return frozenset(text.split()).union(*bases)


_V1 = _set("64bit cmov cx8 fxsr mmx sse sse2")
_V2 = _set("crc32 cx16 popcnt sahf sse3 sse4.1 sse4.2 ssse3", _V1)
_V3 = _set("avx avx2 bmi bmi2 f16c fma lzcnt movbe xsave", _V2)
_V4 = _set("avx512bw avx512cd avx512dq avx512f avx512vl", _V3)
_ZEN3 = _set("adx aes pclmul prfchw rdrnd rdseed sha sse4a vaes vpclmulqdq", _V3)
_WIDE = _set("avx512bf16 avx512bitalg avx512ifma avx512vbmi avx512vbmi2 avx512vnni avx512vpopcntdq")
_ZEN4 = _set("gfni", _ZEN3, _V4, _WIDE)
_SPR = _set(
    "adx aes amx-bf16 amx-int8 amx-tile avx512fp16 avxvnni gfni pclmul prfchw rdrnd rdseed sha "
    "vaes vpclmulqdq",
    _V4,
    _WIDE,
)
_ARM8 = _set("fp-armv8 neon")
_N1 = _set("aes crc dotprod fullfp16 lse rcpc rdm sha2", _ARM8)
_M1 = _set("complxnum fp16fml jsconv reserve-x18 sha3", _N1)

# Name -> (architecture, LLVM CPU, features that code for it may use). Features that compiled code
# never needs (such as monitor instructions) are left out: an artifact must not be refused for them.
NAMED: dict[str, tuple[str, str, frozenset[str]]] = {
    "generic": ("x86_64", "x86-64", _V1),
    "x86-64": ("x86_64", "x86-64", _V1),
    "x86-64-v2": ("x86_64", "x86-64-v2", _V2),
    "x86-64-v3": ("x86_64", "x86-64-v3", _V3),
    "x86-64-v4": ("x86_64", "x86-64-v4", _V4),
    "znver3": ("x86_64", "znver3", _ZEN3),
    "znver4": ("x86_64", "znver4", _ZEN4),
    "sapphirerapids": ("x86_64", "sapphirerapids", _SPR),
    "aarch64": ("aarch64", "generic", _ARM8),
    "armv8": ("aarch64", "generic", _ARM8),
    "neoverse-n1": ("aarch64", "neoverse-n1", _N1),
    "apple-m1": ("aarch64", "apple-m1", _M1),
}


_RESERVE = "reserve-x18"  # not a CPU feature: a register that the ABI reserves


@dataclass(frozen=True)
class Target:
    """One CPU model with its features; targets of equal `key` give the same machine code."""

    triple: str
    cpu: str
    features: tuple[str, ...]
    arch: str

    @staticmethod
    def host() -> Target:
        """This machine's CPU, or the subset of it that RLX_TARGET names."""
        return _host()

    @staticmethod
    def named(name: str) -> Target:
        """A target from the table, or the host for "host"."""
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
        triple = f"{arch}-unknown-linux-gnu"
        return Target(triple, cpu, tuple(sorted(f"+{f}" for f in features)), arch)

    @staticmethod
    def names() -> list[str]:
        return ["host", *NAMED]

    @cached_property
    def _present(self) -> frozenset[str]:
        return frozenset(f[1:] for f in self.features if f[0] == "+")

    @cached_property
    def key(self) -> str:
        """Everything about the target that can change machine code, as text."""
        return f"{self.triple};{self.cpu};{','.join(self.features)}"

    def has(self, feature: str) -> bool:
        """Is this LLVM feature (such as "avx2") present?"""
        return feature in self._present

    def runs_on(self, host: Target) -> bool:
        """Can code made for this target run on `host`?"""
        if self.arch != host.arch or (host.has(_RESERVE) and not self.has(_RESERVE)):
            return False
        return self._present - {_RESERVE} <= host._present

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
        With 512-bit vectors the loop is short enough for the hardware prefetcher, and software
        prefetch costs 5 to 15 % (Zen 4; other such CPUs: not measured)."""
        return 0 if self.avx512 else 4096

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
    return wanted


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
        cpu, features = from_cpuinfo(_read_cpuinfo(), arch)
        return Target(f"{arch}-unknown-linux-gnu", cpu, features, arch)
    return _host_from_llvm(arch)


def _read_cpuinfo() -> str:
    with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        return file.read()


def _host_from_llvm(arch: str) -> Target:
    """The host where there is no /proc/cpuinfo. Objects are ELF, because `elf` links them."""
    import llvmlite.binding as llvm

    flags = dict(llvm.get_host_cpu_features())
    if arch == "aarch64" and sys.platform == "darwin":
        flags[_RESERVE] = True  # Apple's ABI keeps x18 for the system
    features = tuple(sorted(("+" if on else "-") + name for name, on in flags.items()))
    system = "pc-windows-msvc-elf" if sys.platform == "win32" else "unknown-linux-gnu"
    return Target(f"{arch}-{system}", llvm.get_host_cpu_name(), features, arch)
