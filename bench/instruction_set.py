"""The instruction set of a run: RLX held to AVX2 on request, and its peers with it.

RLX_TARGET holds RLX. Peers have switches of their own; llama.cpp is built for an instruction set:
give such a build to the bench.
"""

from __future__ import annotations

import argparse
import os

from rlx.llvm.target import Target

AVX2 = "x86-64-v3"
"""What RLX_TARGET is for `--avx2`: AVX2 and FMA, no AVX-512, no VNNI, on AMD's and Intel's CPUs."""

_PEERS = {
    "ONEDNN_MAX_CPU_ISA": "AVX2",  # OpenVINO, torch
    "DNNL_MAX_CPU_ISA": "AVX2",  # its older name
    "ATEN_CPU_CAPABILITY": "avx2",  # torch
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",  # torch's GEMM
    "OPENBLAS_CORETYPE": "Zen",  # NumPy
    "XLA_FLAGS": "--xla_cpu_max_isa=AVX2",  # JAX
    "BENCH_PEER_ISA": "avx2",  # bench/peers: ONNX Runtime, which has no switch
}


def instruction_set(target: Target | None = None) -> str:
    """The name of the widest vector instructions of a target, the host's if none is given."""
    target = target or Target.host()
    if target.is_x86:
        return "avx512" if target.avx512 else "avx2" if target.avx2 else "sse"
    return "neon"


def held() -> str:
    """The instruction set that RLX_TARGET names; empty where RLX takes all that this CPU has."""
    return instruction_set() if os.environ.get("RLX_TARGET") else ""


def hold_peers() -> None:
    """Set what holds peers down, to be called before they are loaded."""
    if held() == "avx2":
        for name, value in _PEERS.items():
            os.environ.setdefault(name, value)


def add_avx2(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--avx2", action="store_true", help=f"hold RLX to AVX2, as RLX_TARGET={AVX2} does"
    )


def hold_to_avx2() -> None:
    """Have this process and those it starts use AVX2 alone."""
    os.environ["RLX_TARGET"] = AVX2
    os.environ |= _PEERS
