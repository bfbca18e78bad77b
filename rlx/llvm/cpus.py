"""CPUs: what the operating system says about this one, and a table of those with names.

Linux tells features by names on x86 (/proc/cpuinfo) and by bits on AArch64 (the auxiliary vector).
"""

from __future__ import annotations

import ctypes
import re

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

# Linux's name -> (word and bit of the auxiliary vector's AT_HWCAP and AT_HWCAP2, LLVM's name)
_ARM_FLAGS = {
    "fp": ((0, 0), "fp-armv8"),
    "asimd": ((0, 1), "neon"),
    "aes": ((0, 3), "aes"),
    "sha2": ((0, 6), "sha2"),
    "crc32": ((0, 7), "crc"),
    "atomics": ((0, 8), "lse"),
    "asimdhp": ((0, 10), "fullfp16"),
    "asimdrdm": ((0, 12), "rdm"),
    "jscvt": ((0, 13), "jsconv"),
    "fcma": ((0, 14), "complxnum"),
    "lrcpc": ((0, 15), "rcpc"),
    "sha3": ((0, 17), "sha3"),
    "asimddp": ((0, 20), "dotprod"),
    "sve": ((0, 22), "sve"),
    "asimdfhm": ((0, 23), "fp16fml"),
    "sve2": ((1, 1), "sve2"),
    "i8mm": ((1, 13), "i8mm"),
    "bf16": ((1, 14), "bf16"),
}
_CPUINFO = "/proc/cpuinfo"
_HWCAP, _HWCAP2 = 16, 26  # entries of the auxiliary vector

# x86-64 Linux: the system call that asks for a part of the registers' state, and AMX's part
_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA = 158, 0x1023, 18

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
# A hypervisor may give a CPU the model of an older one, and the features that it has all the same:
# what no CPU had before the one named here, and the models that have it.
_SINCE = {
    "amx-fp16": ("graniterapids", {"graniterapids"}),
    "amx-tile": ("sapphirerapids", {"sapphirerapids", "emeraldrapids", "graniterapids"}),
    "avx512fp16": ("sapphirerapids", {"sapphirerapids", "emeraldrapids", "graniterapids"}),
}

_ARM, _AMPERE, _APPLE, _FUJITSU = 0x41, 0xC0, 0x61, 0x46
_ARM_PARTS = {
    (_ARM, 0xD03): "cortex-a53",
    (_ARM, 0xD05): "cortex-a55",
    (_ARM, 0xD07): "cortex-a57",
    (_ARM, 0xD08): "cortex-a72",
    (_ARM, 0xD09): "cortex-a73",
    (_ARM, 0xD0A): "cortex-a75",
    (_ARM, 0xD0B): "cortex-a76",
    (_ARM, 0xD0C): "neoverse-n1",
    (_ARM, 0xD0D): "cortex-a77",
    (_ARM, 0xD40): "neoverse-v1",
    (_ARM, 0xD41): "cortex-a78",
    (_ARM, 0xD44): "cortex-x1",
    (_ARM, 0xD49): "neoverse-n2",
    (_ARM, 0xD4F): "neoverse-v2",
    (_AMPERE, 0xAC3): "ampere1",
    (_FUJITSU, 0x001): "a64fx",
    **dict.fromkeys(((_APPLE, n) for n in (0x22, 0x23, 0x24, 0x25, 0x28, 0x29)), "apple-m1"),
    **dict.fromkeys(((_APPLE, n) for n in (0x32, 0x33, 0x34, 0x35, 0x38, 0x39)), "apple-m2"),
}


def linux_cpu(arch: str) -> tuple[str, tuple[str, ...]]:
    """(LLVM CPU name, features) of this machine."""
    with open(_CPUINFO, encoding="utf-8", errors="replace") as file:
        text = file.read()
    cpu, features = from_cpuinfo(
        text, arch, _hardware_capabilities() if arch == "aarch64" else None
    )
    if "+amx-tile" in features and not _may_use_tiles():
        features = tuple(sorted(f.replace("+amx-", "-amx-") for f in features))
    return cpu, features


def _may_use_tiles() -> bool:
    """Ask Linux (from 5.16 on) for the state of AMX's tiles, once for this process and its threads.
    It refuses where a thread's signal stack could not hold it."""
    call = ctypes.CDLL(None, use_errno=True).syscall
    call.restype, call.argtypes = ctypes.c_long, [ctypes.c_long] * 3
    return bool(call(_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA) == 0)


def _hardware_capabilities() -> tuple[int, int]:
    """What the kernel says that programs may use; an emulator changes this, not /proc/cpuinfo."""
    read = ctypes.CDLL(None).getauxval
    read.restype, read.argtypes = ctypes.c_ulong, [ctypes.c_ulong]
    return int(read(_HWCAP)), int(read(_HWCAP2))


def from_cpuinfo(
    text: str, arch: str, capabilities: tuple[int, int] | None = None
) -> tuple[str, tuple[str, ...]]:
    """(LLVM CPU name, sorted '+x'/'-x' features) of the first processor in /proc/cpuinfo; on
    AArch64 the features are those of `capabilities`, where they are given."""
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
        if capabilities is not None:
            bits = ((name, at) for name, (at, _) in _ARM_FLAGS.items())
            flags = {name for name, (word, bit) in bits if capabilities[word] >> bit & 1}
        present = {llvm for linux, (_, llvm) in _ARM_FLAGS.items() if linux in flags}
        known = {llvm for _, llvm in _ARM_FLAGS.values()}
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
        for feature, (first, having) in _SINCE.items():
            if feature in present and name not in having:
                return first
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
_ICE = _set("avx512bitalg avx512ifma avx512vbmi avx512vbmi2 avx512vnni avx512vpopcntdq")
_WIDE = _set("avx512bf16", _ICE)
_ZEN4 = _set("gfni", _ZEN3, _V4, _WIDE)
_SPR = _set(
    "adx aes amx-bf16 amx-int8 amx-tile avx512fp16 avxvnni gfni pclmul prfchw rdrnd rdseed sha "
    "vaes vpclmulqdq",
    _V4,
    _WIDE,
)
_ICX = _set("adx aes gfni pclmul prfchw rdrnd rdseed sha vaes vpclmulqdq", _V4, _ICE)
_ADL = _set("adx aes avxvnni gfni pclmul prfchw rdrnd rdseed sha vaes vpclmulqdq", _V3)
_ARM8 = _set("fp-armv8 neon")
_N1 = _set("aes crc dotprod fullfp16 lse rcpc rdm sha2", _ARM8)
_M1 = _set("complxnum fp16fml jsconv reserve-x18 sha3", _N1)
_V1_ARM = _set("bf16 complxnum fp16fml i8mm jsconv sha3 sve", _N1)

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
    "alderlake": ("x86_64", "alderlake", _ADL),
    "icelake-server": ("x86_64", "icelake-server", _ICX),
    "sapphirerapids": ("x86_64", "sapphirerapids", _SPR),
    "graniterapids": ("x86_64", "graniterapids", _set("amx-fp16", _SPR)),
    "aarch64": ("aarch64", "generic", _ARM8),
    "armv8": ("aarch64", "generic", _ARM8),
    "neoverse-n1": ("aarch64", "neoverse-n1", _N1),
    "neoverse-v1": ("aarch64", "neoverse-v1", _V1_ARM),
    "neoverse-v2": ("aarch64", "neoverse-v2", _set("sve2", _V1_ARM)),
    "apple-m1": ("aarch64", "apple-m1", _M1),
    "apple-m2": ("aarch64", "apple-m2", _set("bf16 i8mm", _M1)),
}
