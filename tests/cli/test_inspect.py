"""`rlx inspect`: every stage of a model and of programs in files."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from cli_support import CONTEXT, KV_HEADS, LAYERS

import rlx as api
from rlx.cli.programs import parse_bindings, parse_variant
from rlx.errors import OptionError
from rlx.ir import serial

PROGRAM = """graph mlp {
  %0 "x": [batch, 8] f32 = input
  %1 "w": [8, 4] f32 = param
  %2 = matmul(%0, %1)  // block top.product
  %3 = tanh(%2)  // block top
  return %3 as "y"
}
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "mlp.mir"
    path.write_text(PROGRAM)
    return path


def test_blocks_operations_and_plan(rlx: Any, tiny: Path) -> None:
    hir = rlx("inspect", tiny, "--stage", "hir").stdout
    assert "symbols past_seq, seq" in hir.splitlines()[0]
    assert hir.count("hir.attention(") == LAYERS
    mir = rlx("inspect", tiny, "--stage", "mir").stdout
    assert mir.count(" attention(") == LAYERS
    assert "hir." not in mir
    lir = rlx("inspect", tiny, "--stage", "lir", "--device", "reference").stdout
    assert re.match(r"lir llama: \d+ nodes, arena ", lir)
    assert f"dynamic past_seq ≤ {CONTEXT - 1}" in lir
    assert '"ids": [1, 1] i32' in lir


def test_sizes_of_a_variant(rlx: Any, tiny: Path) -> None:
    command = ("inspect", tiny, "--stage", "lir", "--device", "reference")
    assert '"ids": [1, 7] i32' in rlx(*command, "--variant", "prefill:1x7").stdout
    chunks = rlx(*command, "--variant", "prefill:1").stdout
    assert '"ids": [1, seq] i32' in chunks
    assert f"seq ≤ {CONTEXT}" in chunks
    assert '"ids": [1, 3] i32' in rlx(*command, "--bind", "seq=3").stdout
    short = rlx("inspect", tiny, "--stage", "mir", "--context", "64").stdout
    cache = 2 * LAYERS * 64 * KV_HEADS * 8 * 2  # keys and values of 64 tokens, heads of 8 in f16
    assert f"{2 * LAYERS} states ({cache / 1024} KiB)" in short


def test_one_block(rlx: Any, tiny: Path) -> None:
    for stage in ("hir", "mir", "lir", "program"):
        shown = rlx("inspect", tiny, "--stage", stage, "--block", "blk.1").stdout
        lines = [line for line in shown.splitlines() if not line.startswith("program ")]
        assert lines
        assert all("blk.1" in line for line in lines), stage
        assert "blk.0" not in shown
    missing = rlx("inspect", tiny, "--stage", "mir", "--block", "blk.7")
    assert missing.exit_code == 2
    assert "nothing in this block; got blk.7" in missing.stderr


def test_native_stages(rlx: Any, tiny: Path) -> None:
    program = rlx("inspect", tiny, "--stage", "program").stdout
    head = re.match(r"program llama: (\d+) launches, (\d+) kernels, (\d+) barriers", program)
    assert head is not None
    assert program.count("\n  #") == int(head[1])
    llvm = rlx("inspect", tiny, "--stage", "llvm").stdout
    assert llvm.count("define void @kernel") == int(head[2])
    asm = rlx("inspect", tiny, "--stage", "asm", "--block", "blk.0", "--cpu", "x86-64-v3")
    assert "ymm" in asm.stdout  # what that CPU has
    assert "zmm" not in asm.stdout
    refused = rlx("inspect", tiny, "--stage", "llvm", "--device", "reference")
    assert refused.exit_code == 1
    assert "has no native code; got reference" in refused.stderr


def test_what_a_pass_changed(rlx: Any, tiny: Path) -> None:
    shown = rlx("inspect", tiny, "--diff", "fuse.glu", "fuse.residual", "--block", "blk.0").stdout
    gone = [line for line in shown.splitlines() if line.startswith("- ")]
    come = [line for line in shown.splitlines() if line.startswith("+ ")]
    assert len(gone) + len(come) == len(shown.splitlines())
    assert any(" add(" in line for line in gone)
    assert any("fused_residual_rms_norm(" in line for line in come)
    after = rlx("inspect", tiny, "--after", "fuse.residual", "--block", "blk.0").stdout
    assert "fused_residual_rms_norm(" in after
    assert rlx("inspect", tiny, "--diff", "simplify", "simplify").stdout.strip() == ""
    wrong = rlx("inspect", tiny, "--diff", "fuse.glu", "fuse.residul")
    assert (wrong.exit_code, "did you mean fuse.residual?" in wrong.stderr) == (2, True)


def test_stages_that_were_written_are_read_back(rlx: Any, tiny: Path, tmp_path: Path) -> None:
    for stage in ("hir", "mir"):
        file = tmp_path / f"edited.{stage}"
        assert rlx("inspect", tiny, "--stage", stage, "-o", file).stdout == ""
        assert rlx("inspect", tiny, "--stage", stage, "-o", "-").stdout == file.read_text()
        again = rlx("inspect", file, "--stage", stage, "-o", "-").stdout
        assert again == file.read_text()
        plans = [
            rlx("inspect", what, "--stage", "lir", "--variant", "decode:1", "--bind", "past_seq=9")
            for what in (tiny, file)
        ]
        assert plans[0].stdout == plans[1].stdout != ""


def test_a_plan_that_was_written_is_read_back(rlx: Any, tiny: Path, tmp_path: Path) -> None:
    for name, variant in (("one.lir", "decode:1"), ("many.lir", "prefill:1")):
        file = tmp_path / name
        rlx("inspect", tiny, "--stage", "lir", "--variant", variant, "-o", file)
        assert rlx("inspect", file, "--stage", "lir", "-o", "-").stdout == file.read_text()
        for stage in ("lir", "program", "asm"):
            own = rlx("inspect", tiny, "--stage", stage, "--variant", variant).stdout
            assert rlx("inspect", file, "--stage", stage).stdout == own != ""


def test_programs_in_files(rlx: Any, program: Path, tmp_path: Path) -> None:
    assert "tanh(%2)" in rlx("inspect", program, "--stage", "mir").stdout
    bound = rlx("inspect", program, "--stage", "mir", "--bind", "batch=3").stdout
    assert "[3, 8] f32" in bound
    plan = rlx("inspect", program, "--stage", "lir", "--variant", "encoder:5").stdout
    assert "[5, 4] f32" in plan
    live = rlx("inspect", program, "--stage", "lir", "--bind", "batch<=16").stdout
    assert "batch ≤ 16" in live
    kept = tmp_path / "kept.rlx"
    serial.save(api.parse_graph(PROGRAM), kept)
    assert "[5, 4] f32" in rlx("inspect", kept, "--stage", "lir", "--bind", "batch=5").stdout


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["--stage", "lir"], 2, "sizes are open; got batch"),
        (["--stage", "hir"], 1, "no blocks to show"),
        (["--stage", "xir"], 2, "no stage 'xir'"),
        (["--stage", "mir", "--bind", "width=3"], 2, "no such symbol; got width; expected batch"),
        (["--stage", "mir", "--bind", "batch"], 2, "not a size; got 'batch'"),
        (["--stage", "lir", "--variant", "decode:0"], 2, "not a variant; got 'decode:0'"),
        (["--stage", "mir", "--json"], 2, "--json"),
        (["--stage", "asm", "--cpu", "z80", "--bind", "batch=1"], 2, "unknown target; got 'z80'"),
    ],
)
def test_mistakes(rlx: Any, program: Path, arguments: list[str], code: int, text: str) -> None:
    done = rlx("inspect", program, *arguments)
    assert done.exit_code == code, done.output
    assert text in done.stderr


def test_files_that_are_nothing(rlx: Any, tiny: Path, tmp_path: Path) -> None:
    junk = tmp_path / "junk.bin"
    junk.write_bytes(b"\xff\xfe\x00junk")
    assert "neither a model nor IR" in rlx("inspect", junk).stderr
    text = tmp_path / "junk.mir"
    text.write_text("graph x { what }")
    assert rlx("inspect", text).exit_code == 1
    two = rlx("inspect", tiny, "--stage", "lir", "--variant", "decode:2")
    assert "one sequence at a time" in two.stderr


def test_the_summary(rlx: Any, tiny: Path, program: Path) -> None:
    found = json.loads(rlx("inspect", tiny, "--json").stdout)
    assert found["architecture"] == "llama"
    assert found["layers"] == LAYERS
    with api.load(tiny, device="reference") as model:
        tensors = model.model.file.tensors.values()
        assert found["weights"] == {"F32": sum(t.nbytes for t in tensors)}
        assert found["parameters"] == sum(t.nbytes for t in tensors) // 4
    assert found["kernels"] <= found["launches"]
    shown = rlx("inspect", tiny).stdout
    assert re.search(r"^architecture +llama$", shown, re.MULTILINE)
    assert "residual + norm: " in shown
    small = json.loads(rlx("inspect", program, "--bind", "batch=2", "--json").stdout)
    assert small["mir_nodes"] == 4


def test_variants() -> None:
    up = api.UpTo
    assert parse_variant("decode:1", 100, 32) == {"batch": 1, "seq": 1, "past_seq": up(99)}
    assert parse_variant("decode:2x4", 100, 32) == {"batch": 2, "seq": 4, "past_seq": up(99)}
    assert parse_variant("prefill:1", 100, 32) == {"batch": 1, "seq": up(32), "past_seq": up(99)}
    assert parse_variant("prefill", 20, 32) == {"batch": 1, "seq": up(20), "past_seq": up(19)}
    assert parse_variant("prefill:3x8", 100, 32) == {"batch": 3, "seq": 8, "past_seq": 0}
    for wrong in ("", "decode:", "decode:x", "prefill:1x", "prefill:1x0", "both:1"):
        with pytest.raises(OptionError, match="not a variant"):
            parse_variant(wrong, 100, 32)
    assert parse_bindings(["a=1", " b <= 7 "]) == {"a": 1, "b": up(7)}
