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
TILES = """
multiply1:
.LBB1_1:
	tilezero	%tmm0
	tileloadd	(%rsi,%rcx), %tmm4
	tileloadd	64(%rdi,%rcx), %tmm6
	tdpbssd	%tmm6, %tmm4, %tmm0
	tilestored	%tmm0, (%rsp,%rcx)
	xorl	%eax, %eax
.LBB1_2:
	vcvtdq2ps	(%rsp), %zmm1
	vfmadd231ps	(%rdx){1to16}, %zmm1, %zmm0
	incq	%rax
	cmpq	$4, %rax
	jl	.LBB1_2
	incq	%r8
	cmpq	%r9, %r8
	jl	.LBB1_1
	retq
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


def test_loops_with_tiles() -> None:
    found = mca.tile_loop(TILES, ".*")
    assert mca.multiplies(found) == 16 * 16 * 32, "not those that scale"
    assert [line.split()[0] for line in found].count("vfmadd231ps") == 4
    moved = mca.by_rows(found)
    assert moved.count("vmovups (%rsi,%rcx), %zmm31") == 16
    assert moved.count("vmovups %zmm31, (%rsp,%rcx)") == 16
    assert not any("tmm" in line for line in moved) and len(moved) == len(found) - 5 + 48
    assert mca.tile_loop(X86, ".*") == mca.tile_loop(TILES, "tile1") == []


def test_bounds_of_tiles() -> None:
    """A product beside 40 cycles of other work, and between them."""
    estimate = mca.Estimate(10, 8192, 40.0, 16)
    assert estimate.per_cycle == 8192 / 56 and estimate.most_per_cycle == 8192 / 40
    assert estimate.text() == "146–205"
    assert mca.Estimate(10, 64, 40.0).text() == "1.6"


def test_what_scales_sums_does_not_count() -> None:
    lines = ["vpmaddubsw\t%ymm0, %ymm1, %ymm2", "vpmaddwd\t%ymm2, %ymm3, %ymm4"]
    assert mca.multiplies(lines) == 32
    assert mca.multiplies(["vfmadd231ps\t%zmm0, %zmm1, %zmm2"]) == 16
    assert mca.multiplies(["sdot\tv0.4s, v1.16b, v2.4b[1]"]) == 16


def test_without_llvm_mca_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(SystemExit, match="no llvm-mca here\nhint: apt-get install llvm"):
        mca.program()
