"""Fused regions: softmax, norms, gelu, rope, residual + norm.

Large arrays against the bandwidth of the fastest copy by as many workers (with streaming stores),
measured in turn; small ones against torch (--peer-python names a Python that has it). Bars name the
instruction set: RLX_TARGET=x86-64-v3 holds us to AVX2, and then torch is held to it too.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from bench.common import Bar, arguments, finish, interleaved
from bench.instruction_set import instruction_set
from bench.peers.pipe import Peer, PeerMissing
from rlx import CompileOptions, DimBinding, Graph, Session
from rlx.backends.cpu.peaks import CopyProbe, read_bandwidth

WIDTH = 1024


def graph(kind: str, rows: int) -> Graph:
    g = Graph(kind)
    x = g.input("x", [rows, WIDTH])
    if kind == "softmax":
        out = g.softmax(x)
    elif kind == "layer_norm":
        out = g.layer_norm(x, g.param("g", [WIDTH]), g.param("b", [WIDTH]))
    elif kind == "rms_norm":
        out = g.rms_norm(x, g.param("g", [WIDTH]))
    elif kind == "gelu":
        out = g.gelu(x)
    elif kind == "rope":
        tables = g.param("cos", [rows, WIDTH // 2]), g.param("sin", [rows, WIDTH // 2])
        out = g.rope(g.reshape(x, [1, rows, WIDTH]), *tables, head_dim=WIDTH)
    else:
        residual = g.input("r", [rows, WIDTH])
        out = g.fused_residual_rms_norm(x, residual, g.param("g", [WIDTH]))[0]
    g.set_outputs(out)
    return g


def moved(kind: str, rows: int) -> int:
    """Bytes read and written: the tensors themselves, once each."""
    tensor = rows * WIDTH * 4
    return {"rope": 3, "residual_norm": 4}.get(kind, 2) * tensor


def runner(kind: str, rows: int, threads: int) -> Any:
    options = CompileOptions(binding=DimBinding(), threads=threads)
    f = Session("cpu").compile(graph(kind, rows), options)
    rng = np.random.default_rng(0)
    for node in f.template.source.sources("param"):
        shape = node.output.shape.static_dims
        f.set_param(node.name, rng.standard_normal(shape, dtype=np.float32))
    for name in f.input_names:
        f.slot(name)[...] = rng.standard_normal((rows, WIDTH), dtype=np.float32)
    f.run_slots()
    return f.run_slots


KINDS = ("softmax", "layer_norm", "rms_norm", "gelu", "rope", "residual_norm")


def main(argv: list[str]) -> int:
    parser = arguments("regions", __doc__ or "")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--peer-python", default=sys.executable, metavar="PYTHON")
    options = parser.parse_args(argv)
    used = instruction_set()
    large, small = 32 * 1024, 64  # 128 MiB a tensor, and 256 KiB
    bars = []
    rounds = 5 if options.quick else 11
    copy = CopyProbe(options.threads, large * WIDTH * 4)
    for kind in KINDS:
        run = runner(kind, large, options.threads)
        ours, plain = interleaved([run, copy.run], 2 * rounds)
        speed = moved(kind, large) / ours / 1e9
        name, limit = f"{kind}_large, {used}", copy.bytes / plain / 1e9
        bars.append(Bar(name, speed, "GB/s", "copy", limit, 0.8))
    print(f"read bandwidth {read_bandwidth(options.threads):.1f} GB/s")
    try:
        with Peer(
            options.peer_python, "torch_server.py", options.threads,
            requirements="requirements-regions.txt",
        ) as peer:  # fmt: skip
            for kind in KINDS:
                run = runner(kind, small, options.threads)
                ours = interleaved([run], rounds, 20)[0]
                theirs = peer.ask("time", op=kind, rows=small, width=WIDTH, repeat=rounds)
                bars.append(
                    Bar(
                        f"{kind}_small, {used}",
                        ours * 1e6,
                        "µs",
                        "torch",
                        theirs["seconds"] * 1e6,
                        1.0,
                        False,
                    )
                )
    except PeerMissing as e:
        print(e, file=sys.stderr)
        return 2
    return finish(bars, options.json)
