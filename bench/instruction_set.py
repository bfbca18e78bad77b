"""Peers held to the instruction set that RLX_TARGET holds RLX to.

llama.cpp is built for one: give a build for that CPU with --peer-python.
"""

from __future__ import annotations

import os

from rlx.llvm.target import Target

_AVX2 = {
    "ONEDNN_MAX_CPU_ISA": "AVX2",  # OpenVINO, torch
    "DNNL_MAX_CPU_ISA": "AVX2",  # its older name
    "ATEN_CPU_CAPABILITY": "avx2",  # torch
    "OPENBLAS_CORETYPE": "Zen",  # NumPy
    "BENCH_PEER_ISA": "avx2",  # bench/peers: ONNX Runtime, which has no switch
}


def held() -> str:
    """The instruction set that RLX_TARGET names; empty where RLX takes all that this CPU has."""
    if not os.environ.get("RLX_TARGET"):
        return ""
    target = Target.host()
    if not target.is_x86:
        return target.cpu
    return "avx512" if target.avx512 else "avx2" if target.avx2 else target.cpu


def hold_peers() -> None:
    """Set what holds peers down, to be called before they are loaded."""
    if held() == "avx2":
        for name, value in _AVX2.items():
            os.environ.setdefault(name, value)
