"""Thousands of damaged files: what comes out is a FormatError, or a sound program."""

from __future__ import annotations

import hashlib
import random
import struct
from typing import Any

import pytest

from rlx.errors import FormatError
from rlx.ir.binding import DimBinding, UpTo, bind_graph
from rlx.ir.graph import Graph
from rlx.ir.lir import Lir
from rlx.ir.module import GraphModule
from rlx.ir.serial import from_bytes, to_bytes
from rlx.ir.text import parse_graph
from rlx.ir.verify import verify
from rlx.passes.plan import plan

GRAPH = """graph everything {
  live past_seq <= 64
  %0 "x": [batch, seq, 32] f32 = input  // block a.b, net.py:3, via fuse > cse
  %1 "cache": [batch, 80, 16] f32 = state
  %2 "kv": [batch, seq, 16] f32 = input
  %3 = state_update(%1, %2; axis=1, start=past_seq)
  %4 = narrow(%3; axis=1, start=0, length=past_seq + seq)
  %5 = attention(%0, %4, %4; num_heads=4, num_kv_heads=2, head_dim=8, mask_kind=mask.causal)
  %6: [4] f32 = constant([0.0, nan, -inf, 0.1])
  %7 "packed": [16, 18] u8 = param
  %8 = dequant_matmul(%0, %7; scheme=quant.Q4_0)
  %9:2 = top_k(%5; k=2)
  %10 = reshape(%5; shape=[batch * seq, 4, 8])
  %11 = elementwise_region(%10; body=graph region {
    %0 "v": [batch * seq, 4, 8] f32 = input
    %1 = tanh(%0)
    return %1
  })
  %12 "image": [1, 3, height, (width + 1) // 2] f32 = input
  %13 "w": [8, 3, 3, 3] f32 = param
  %14 = conv(%12, %13; stride=[2, 2], padding=[1, 1])
  %15 = pad(%6; low=[1], high=[2], value=-0.0, mode="edge")
  %16 "flag": [] bool = input
  %17 = cond(%16, %6; then=graph then {
    %0 "v": [4] f32 = input
    %1 = neg(%0)
    return %1
  }, otherwise=graph otherwise {
    %0 "v": [4] f32 = input
    return %0
  })
  return %8 as "y", %9.1 as "index", %11 as "z", %14 as "image", %15 as "p", %17 as "c"
}"""


def programs() -> list[bytes]:
    graph = parse_graph(GRAPH)
    binding = DimBinding(batch=1, seq=2, past_seq=UpTo(64), height=9, width=7)
    module = GraphModule.hir("mlp")
    x = module.input("x", ["batch", 8])
    module.set_outputs(module.linear(x, module.param("w", [8, 4]), activation="relu"))
    return [to_bytes(graph), to_bytes(plan(bind_graph(graph, binding))), to_bytes(module)]


HEADER = 52


def resealed(data: bytes) -> bytes:
    """The length and the digest made right again, so that damage reaches the decoder."""
    payload = data[HEADER:]
    length = struct.pack("<Q", len(payload))
    return data[:12] + length + hashlib.sha256(payload).digest() + payload


ODD = [0, 1, 2, 0x7F, 0x80, 0xFF]


def damaged(data: bytes, rng: random.Random, others: list[bytes]) -> bytes:
    out = bytearray(data)
    for _ in range(rng.choice([1, 1, 1, 2, 5])):
        at = rng.randrange(HEADER if rng.random() < 0.9 else 0, len(out))
        kind = rng.randrange(7)
        if kind == 0:
            out[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            out[at] = rng.choice(ODD)
        elif kind == 2:
            out[at : at + 4] = struct.pack("<I", rng.choice([0, 1, 7, 2**31, 2**32 - 1]))
        elif kind == 3:
            del out[at : at + rng.randrange(1, 9)]
        elif kind == 4:
            out[at:at] = bytes(rng.choice(ODD) for _ in range(rng.randrange(1, 9)))
        elif kind == 5:  # a piece of another place, where it is likely to be well formed
            source = rng.choice(others)
            start = rng.randrange(HEADER, len(source))
            out[at : at + rng.randrange(40)] = source[start : start + rng.randrange(40)]
        else:
            out[at : at + 1] = rng.choice([b"N", b"T", b"i", b"s", b"x", b"(", b"B", b"D", b"O"])
        if len(out) <= HEADER:
            break
    return bytes(out)


def graph_of(program: Any) -> Graph:
    if isinstance(program, GraphModule):
        program = program.as_hir() or program.as_mir()
    return program.graph if isinstance(program, Lir) else program


@pytest.mark.parametrize("seed", range(6))
def test_damage_raises(seed: int) -> None:
    rng = random.Random(seed)
    samples = programs()
    refused = 0
    for _ in range(700):
        data = damaged(rng.choice(samples), rng, samples)
        if rng.random() < 0.9:
            data = resealed(data)
        try:
            program = from_bytes(data)
        except FormatError:
            refused += 1
            continue
        verify(graph_of(program))  # a harmless change
        assert to_bytes(from_bytes(to_bytes(program))) == to_bytes(program)
    assert refused > 350


def test_noise_raises() -> None:
    rng = random.Random(99)
    for _ in range(500):
        noise = rng.randbytes(rng.randrange(400))
        with pytest.raises(FormatError):
            from_bytes(noise)
        head = to_bytes(Graph())[:HEADER]
        kind = struct.pack("<H", rng.randrange(1, 5))
        try:
            program = from_bytes(resealed(head[:10] + kind + head[12:] + noise))
        except FormatError:
            continue
        assert len(program) == 0  # nothing but an empty graph comes from noise
