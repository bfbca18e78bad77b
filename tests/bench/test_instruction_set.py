"""Benches of a lesser CPU: what holds the peers to its instruction set, and the names of bars."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import pytest

from bench import common, instruction_set
from bench.common import Bar
from bench.peers.hold_avx2 import NAME, _Finder
from rlx.llvm.target import Target

x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="names x86 targets")


@x86
def test_peers_are_held_to_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"RLX_TARGET": "znver3", "OPENBLAS_CORETYPE": "Haswell"})
    monkeypatch.setattr(Target, "host", staticmethod(lambda: Target.named("znver3")))
    instruction_set.hold_peers()
    assert os.environ["ONEDNN_MAX_CPU_ISA"] == "AVX2"
    assert os.environ["OPENBLAS_CORETYPE"] == "Haswell"  # as it was given


@x86
def test_peers_take_what_the_cpu_has_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {})
    instruction_set.hold_peers()
    assert os.environ == {}


def test_bars_name_the_instruction_set(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(common, "held", lambda: "avx2")
    common.finish([Bar("gemm", 2.0, "GFLOP/s", "peer", 1.0, 1.0)], None)
    assert capsys.readouterr().out.startswith("bar gemm_avx2: 2 GFLOP/s;")


def test_a_copy_of_the_library_sees_no_avx512(tmp_path: Path) -> None:
    """XGETBV becomes `push 7; pop rax`: the state of x87, SSE and AVX."""
    library = tmp_path / "onnxruntime_pybind11_state.cpython-311-x86_64-linux-gnu.so"
    library.write_bytes(b"\x90\x31\xc9\x0f\x01\xd0\x0f\x01\xd0\xc3")
    spec = _Finder(tmp_path / "copy.so").find_spec(NAME, [str(tmp_path)])
    assert spec is not None and spec.origin == str(tmp_path / "copy.so")
    held = bytes.fromhex("90 31c9 6a07 58 0f01d0 c3")  # a match of three bytes may be chance
    assert (tmp_path / "copy.so").read_bytes() == held


def test_a_library_that_asks_in_another_way_is_refused(tmp_path: Path) -> None:
    (tmp_path / "onnxruntime_pybind11_state.abi3.so").write_bytes(b"\xc3")
    with pytest.raises(RuntimeError, match="in another way"):
        _Finder(tmp_path / "copy.so").find_spec(NAME, [str(tmp_path)])
