"""Static estimates: which loop of assembly is taken, how often loops in it run, what it multiplies.
The assembly is written by hand; what llvm-mca makes of it is its own business."""

from __future__ import annotations

import shutil

import pytest

from bench import mca

X86 = """
	.text
tile:                                   # @tile
	xorl	%eax, %eax
.LBB0_1:
	xorl	%ecx, %ecx
.LBB0_2:
	{vex}	vpdpbusd	(%rsi), %ymm1, %ymm0
	{vex}	vpdpbusd	32(%rsi), %ymm1, %ymm2
	addq	$2, %rcx
	cmpq	$8, %rcx
	jl	.LBB0_2
	vcvtdq2ps	%ymm0, %ymm3
	incq	%rax
	cmpq	%rdi, %rax
	jl	.LBB0_1
	retq
"""
ARM = """
tile8:
.LBB0_1:
	mov	x9, xzr
.LBB0_2:
	ldr	q1, [x0], #16
	cmp	x9, #12
	smmla	v0.4s, v1.16b, v2.16b
	add	x9, x9, #4
	fmla	v3.4s, v4.4s, v5.s[0]
	b.lt	.LBB0_2
	scvtf	v6.4s, v0.4s
	add	x10, x10, #1
	cmp	x10, x11
	b.lt	.LBB0_1
	ret
"""


@pytest.mark.parametrize(
    ("text", "name", "trips", "each"), [(X86, "tile", 4, 64), (ARM, "tile8", 3, 32)]
)
def test_a_loop_of_constant_length_is_written_out(
    text: str, name: str, trips: int, each: int
) -> None:
    """64: two products of 32 bytes; 32: one of 2 x 2 sums of 8. The fmla only scales."""
    lines = mca.functions(text)[name]
    outer, inner = mca.loops(lines)
    assert mca.trips(lines, inner) == trips and mca.trips(lines, outer) is None
    found = mca.hot_loop(text, ".*")
    assert mca.multiplies(found) == trips * each
    assert not any(line.endswith(":") or line.startswith(("j", "b.")) for line in found)
    assert sum("cvt" in line for line in found) == 1, "what is around the inner loop counts once"
    assert mca.hot_loop(text, "other") == []


def test_what_scales_sums_does_not_count() -> None:
    lines = ["vpmaddubsw\t%ymm0, %ymm1, %ymm2", "vpmaddwd\t%ymm2, %ymm3, %ymm4"]
    assert mca.multiplies(lines) == 32
    assert mca.multiplies(["vfmadd231ps\t%zmm0, %zmm1, %zmm2"]) == 16
    assert mca.multiplies(["sdot\tv0.4s, v1.16b, v2.4b[1]"]) == 16


def test_without_llvm_mca_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(SystemExit, match="no llvm-mca here\nhint: apt-get install llvm"):
        mca.program()
