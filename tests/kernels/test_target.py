"""Targets: what the host is, what names mean, what runs where."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from rlx.errors import OptionError
from rlx.llvm import cpus
from rlx.llvm.cpus import from_cpuinfo
from rlx.llvm.target import Target, _host

ROOT = Path(__file__).resolve().parents[2]
ZEN3 = """processor : 0
vendor_id : AuthenticAMD
cpu family : 25
model : 1
flags : fpu lm cmov cx8 fxsr mmx sse sse2 pni ssse3 sse4_1 sse4_2 popcnt cx16 lahf_lm abm bmi1 \
bmi2 movbe avx avx2 fma f16c xsave aes pclmulqdq sha_ni sse4a adx rdrand rdseed vaes vpclmulqdq \
3dnowprefetch

processor : 1
flags : other
"""
GRAVITON = """processor : 0
Features : fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc \
asimddp
CPU implementer : 0x41
CPU part : 0xd0c
"""


def test_host_is_consistent():
    host = Target.host()
    assert host is Target.named("host")
    assert host.runs_on(host)
    assert list(host.features) == sorted(host.features)
    assert all(f[0] in "+-" for f in host.features)
    assert host.lanes(32) * 32 == host.vector_bits


@pytest.fixture
def fresh_host():
    """The host is read once; tests that change what decides about it have it read again."""
    _host.cache_clear()
    yield
    _host.cache_clear()


@pytest.mark.usefixtures("fresh_host")
def test_a_setting_makes_less_of_the_host(monkeypatch):
    monkeypatch.delenv("RLX_TARGET", raising=False)
    machine = Target.host()
    plain = "x86-64" if machine.is_x86 else "aarch64"
    foreign = "aarch64" if machine.is_x86 else "x86-64"
    _host.cache_clear()
    monkeypatch.setenv("RLX_TARGET", plain)
    held = Target.host()
    assert held == Target.named("host") == replace(Target.named(plain), paced_for=machine.cpu)
    assert held.runs_on(machine)
    _host.cache_clear()
    monkeypatch.setenv("RLX_TARGET", foreign)
    with pytest.raises(OptionError, match=rf"\[RLX_TARGET\] .* cannot run here.*{plain}"):
        Target.host()
    monkeypatch.setenv("RLX_TARGET", "host")
    assert Target.host() == machine


def test_a_level_keeps_the_prefetch_distance_of_its_cpu():
    """Code of x86-64-v3 for a CPU that is known: its instructions, the CPU's distance, and a key of
    its own, since objects are cached by it."""
    plain = Target.named("x86-64-v3")
    made = {cpu: replace(plain, paced_for=cpu) for cpu in ("znver3", "znver5", "sapphirerapids")}
    for cpu, target in made.items():
        assert target.features == plain.features
        assert target.runs_on(plain)
        assert target.key not in {plain.key} | {t.key for c, t in made.items() if c != cpu}
    distances = {cpu: target.read_ahead for cpu, target in made.items()}
    assert distances["znver3"] == replace(plain, cpu="znver3").read_ahead
    assert distances["sapphirerapids"] == plain.read_ahead, "what AVX-512 wants is another distance"
    assert distances["znver5"] > distances["znver3"] > distances["sapphirerapids"] > 0


def test_cpuinfo_of_known_machines():
    cpu, features = from_cpuinfo(ZEN3, "x86_64")
    zen3 = Target("x86_64-unknown-linux-gnu", cpu, features, "x86_64")
    assert cpu == "znver3"
    assert (zen3.vector_bits, zen3.num_vector_registers) == (256, 16)
    assert zen3.fma and zen3.f16c and not zen3.avx512 and not zen3.vnni
    assert "-avx512f" in features, "what a CPU model might have but the host lacks is switched off"
    assert Target.named("znver3").runs_on(zen3)
    assert not Target.named("znver4").runs_on(zen3)
    cpu, features = from_cpuinfo(GRAVITON, "aarch64")
    arm = Target("aarch64-unknown-linux-gnu", cpu, features, "aarch64")
    assert cpu == "neoverse-n1"
    assert arm.neon and arm.dotprod and not arm.i8mm
    assert Target.named("neoverse-n1").runs_on(arm)
    assert not Target.named("aarch64").runs_on(zen3)


SAPPHIRE = """processor : 0
vendor_id : GenuineIntel
cpu family : 6
model : 143
flags : fpu cx8 sse sse2 avx512f amx_bf16 avx512_fp16 amx_tile amx_int8
"""


MASKED = """processor : 0
vendor_id : GenuineIntel
cpu family : 6
model : 167
model name : Intel(R) Xeon(R) Processor
flags : fpu lm cx8 sse sse2 avx512f avx512_vnni {}
"""


@pytest.mark.parametrize(
    ("flags", "cpu"),
    [
        ("", "rocketlake"),
        ("avx512_fp16", "sapphirerapids"),
        ("avx512_fp16 amx_tile amx_int8 amx_bf16", "sapphirerapids"),
        ("avx512_fp16 amx_tile amx_int8 amx_bf16 amx_fp16", "graniterapids"),
    ],
)
def test_features_that_a_model_never_had_name_the_cpu(flags, cpu):
    """A virtual machine with the model of Rocket Lake and the features of its host."""
    assert from_cpuinfo(MASKED.format(flags), "x86_64")[0] == cpu
    emerald = MASKED.replace("model : 167", "model : 207").format("avx512_fp16 amx_tile")
    assert from_cpuinfo(emerald, "x86_64")[0] == "emeraldrapids"


@pytest.mark.parametrize("granted", [True, False])
def test_tiles_need_the_permission_of_linux(granted, monkeypatch, tmp_path):
    text = tmp_path / "cpuinfo"
    text.write_text(SAPPHIRE)
    asked = []

    def permission():
        asked.append(1)
        return granted

    monkeypatch.setattr(cpus, "_CPUINFO", str(text))
    monkeypatch.setattr(cpus, "_may_use_tiles", permission)
    cpu, features = cpus.linux_cpu("x86_64")
    assert cpu == "sapphirerapids" and "+avx512f" in features and asked == [1]
    target = Target("x86_64-unknown-linux-gnu", cpu, features, "x86_64")
    assert target.amx_int8 == target.amx_bf16 == target.has("amx-tile") == granted
    text.write_text(ZEN3)
    assert "-amx-tile" in cpus.linux_cpu("x86_64")[1] and asked == [1], "asked where there are none"


@pytest.mark.skipif(sys.platform != "linux" or not Target.host().is_x86, reason="Linux on x86-64")
def test_linux_answers_for_this_machine():
    """Where the CPU has no tiles Linux refuses, so that a wrong flag could not lead to a fault."""
    flags = Path("/proc/cpuinfo").read_text().split()
    assert cpus._may_use_tiles() or "amx_tile" not in flags or not Target.host().amx_int8
    if "amx_tile" not in flags:
        assert not cpus._may_use_tiles()


def test_arm_features_are_those_of_the_kernel():
    """Bits as in Linux's asm/hwcap.h; the text may be that of the machine below an emulator."""
    asimd, dot, i8mm, sve2 = 1 << 1, 1 << 20, 1 << 13, 1 << 1
    cpu, features = from_cpuinfo(ZEN3, "aarch64", (1 | asimd | dot, i8mm))
    assert cpu == "generic"
    assert {"+neon", "+dotprod", "+i8mm", "-sve2", "-bf16", "-lse"} <= set(features)
    cpu, features = from_cpuinfo(GRAVITON, "aarch64", (1 | asimd, sve2))
    assert cpu == "neoverse-n1"
    assert {"+neon", "-dotprod", "+sve2"} <= set(features), "less than the text says"
    assert len(features) == len({f[1:] for f in features})


@pytest.mark.parametrize(
    ("name", "bits", "registers", "traits"),
    [
        ("x86-64", 128, 16, []),
        ("x86-64-v3", 256, 16, ["fma", "f16c"]),
        ("x86-64-v4", 512, 32, ["fma", "avx512"]),
        ("znver4", 512, 32, ["fma", "avx512", "vnni", "bf16"]),
        ("sapphirerapids", 512, 32, ["vnni", "amx_int8", "amx_bf16"]),
        ("icelake-server", 512, 32, ["fma", "avx512", "vnni"]),
        ("graniterapids", 512, 32, ["vnni", "amx_int8", "amx_bf16"]),
        ("aarch64", 128, 32, ["neon", "fma", "f16c"]),
        ("neoverse-n1", 128, 32, ["neon", "dotprod"]),
        ("neoverse-v2", 128, 32, ["dotprod", "i8mm", "bf16"]),
        ("alderlake", 256, 16, ["fma", "vnni"]),
    ],
)
def test_named_targets(name, bits, registers, traits):
    target = Target.named(name)
    assert (target.vector_bits, target.num_vector_registers) == (bits, registers)
    assert all(getattr(target, t) for t in traits)
    leaves_it_to_the_cpu = name in ("x86-64-v4", "znver4")
    assert (target.read_ahead == 0) == leaves_it_to_the_cpu
    assert target.key != Target.named("x86-64-v2").key
    assert target == Target.named(name)


def test_a_feature_that_no_code_has_may_be_switched_off():
    target = Target.named("alderlake")

    def without(name):
        kept = tuple(f for f in target.features if f != f"+{name}")
        assert len(kept) == len(target.features) - 1
        return replace(target, cpu="znver5", features=kept)

    assert target.runs_on(without("rdseed"))
    assert not target.runs_on(without("avxvnni"))


def test_a_target_with_vnni_and_no_tiles_for_those_that_have_them():
    ice, sapphire = Target.named("icelake-server"), Target.named("sapphirerapids")
    assert ice.runs_on(sapphire) and not ice.amx_int8 and not ice.bf16
    assert not sapphire.runs_on(ice) and sapphire.runs_on(Target.named("graniterapids"))


def test_reserved_register_of_apple():
    """Code that may use x18 must not run where the system owns it; the other way is harmless."""
    apple, plain = Target.named("apple-m1"), Target.named("neoverse-n1")
    assert not plain.runs_on(apple)
    linux_m1 = Target(
        apple.triple, apple.cpu, tuple(f for f in apple.features if "x18" not in f), "aarch64"
    )
    assert apple.runs_on(linux_m1)


def test_unknown_names_raise():
    with pytest.raises(OptionError, match=r"unknown target; got 'pentium'.*x86-64-v3"):
        Target.named("pentium")


def test_llvm_agrees_about_this_machine():
    import llvmlite.binding as llvm

    if not Target.host().is_x86 and "Features" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("LLVM reads /proc/cpuinfo, which is that of the machine below the emulator")
    theirs = dict(llvm.get_host_cpu_features())
    for feature in Target.host().features:
        name = feature[1:]
        # Linux hides these by its settings, for faults of a processor, or has no name for them; no
        # kernel uses them.
        if name in theirs and name not in ("shstk", "pku", "rdseed", "amx-fp16"):
            assert (feature[0] == "+") == theirs[name], name


def test_every_named_feature_is_known_to_llvm():
    """LLVM prints a complaint about an unknown feature and goes on: none may appear."""
    code = (
        "from rlx.llvm.target import Target\n"
        "from rlx.llvm.jit import Unit\n"
        "for name in Target.names():\n"
        "    Unit('define void @kernel() { ret void }', Target.named(name)).compile()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


def test_host_needs_no_llvm():
    code = (
        "import sys\nfrom rlx.llvm.target import Target\nTarget.host()\n"
        "assert not [m for m in sys.modules if m.startswith('llvmlite')]"
    )
    if sys.platform == "linux":
        subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd=ROOT)
