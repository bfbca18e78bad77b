"""Mixtures of experts: decoding reads the chosen experts alone, at the speed of memory.

Random weights in the shape of OLMoE, fewer layers. Decoding is counted in bytes of active weights
and compared with read bandwidth; a prompt of 512 tokens, whose rows are sorted by expert, with the
same tokens one by one.
"""

from __future__ import annotations

import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bench.common import Bar, arguments, finish
from rlx.backends.cpu.peaks import read_bandwidth
from rlx.formats.gguf import GgufFile
from rlx.formats.gguf.writer import PackedTensor, write_gguf
from rlx.ir.quant.scheme import QuantScheme
from rlx.models.decoder_runner import DecoderRunner
from rlx.models.model_file import ModelFile

HIDDEN, HEADS, HEAD, FFN, VOCAB, EXPERTS, ACTIVE = 2048, 16, 128, 1024, 32000, 64, 8
PREFILL, STEPS, PAST, CONTEXT = 512, 32, 64, 1024
LAYERS = {"Q8_0": 4, "Q4_K": 4, "MXFP4": 4, "F16": 2}  # by type: 1 to 2 GB
_BANDWIDTH, _SORTED = 0.8, 3.0  # goals: share of bandwidth, and of the speed of single tokens


def write_model(path: Path, kind: str) -> None:
    scheme, rng, layers = QuantScheme.parse(kind), np.random.default_rng(0), LAYERS[kind]
    matrices: dict[str, tuple[int, ...]] = dict.fromkeys(("token_embd", "output"), (VOCAB, HIDDEN))
    plain = {"output_norm": np.ones(HIDDEN, np.float32)}
    for i in range(layers):
        blk = f"blk.{i}."
        for name in ("attn_norm", "ffn_norm", "attn_q_norm", "attn_k_norm"):
            plain[blk + name] = np.ones(HIDDEN, np.float32)
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            matrices[blk + name] = (HIDDEN, HEADS * HEAD)
        plain[blk + "ffn_gate_inp"] = rng.standard_normal((EXPERTS, HIDDEN), np.float32) * 0.02
        matrices[blk + "ffn_gate_exps"] = matrices[blk + "ffn_up_exps"] = (EXPERTS, FFN, HIDDEN)
        matrices[blk + "ffn_down_exps"] = (EXPERTS, HIDDEN, FFN)
    tensors: dict[str, Any] = {f"{n}.weight": a for n, a in plain.items()}
    for name, shape in matrices.items():
        data = partial(_blocks, scheme, shape, rng)
        tensors[f"{name}.weight"] = PackedTensor(shape=shape, scheme=scheme, data=data)
    write_gguf(path, _metadata(layers), tensors)


def _metadata(layers: int) -> dict[str, Any]:
    numbers = {
        "context_length": 4096, "embedding_length": HIDDEN, "block_count": layers,
        "feed_forward_length": FFN, "attention.head_count": HEADS,
        "attention.head_count_kv": HEADS, "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10000.0, "expert_count": EXPERTS, "expert_used_count": ACTIVE,
    }  # fmt: skip
    return {"general.architecture": "olmoe"} | {f"olmoe.{n}": v for n, v in numbers.items()}


def _blocks(scheme: QuantScheme, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Random codes, with scales that keep activations in range."""
    rows = int(np.prod(shape[:-1]))
    count = rows * scheme.row_bytes(shape[-1]) // scheme.bytes_per_block
    scales = rng.uniform(0, 2e-4, count).astype(np.float16).view(np.uint8).reshape(-1, 2)
    if scheme.name == "F16":
        return scales
    blocks = rng.integers(0, 256, (count, scheme.bytes_per_block), np.uint8)
    if scheme.name == "MXFP4":
        blocks[:, 0] = 110  # 2 ** -17
        return blocks
    for at in (0, 2) if scheme.name == "Q4_K" else (0,):
        blocks[:, at : at + 2] = scales
    return blocks


def active_bytes(path: Path) -> int:
    """Bytes of weights that a decoded token reads."""
    with GgufFile(path) as file:
        total = 0
        for name, info in file.tensors.items():
            if name != "token_embd.weight":
                total += info.nbytes * ACTIVE // EXPERTS if "_exps." in name else info.nbytes
    return total


class Runs:
    """One engine, fed with random tokens, so that any expert may be the next."""

    def __init__(self, path: Path, threads: int) -> None:
        self.engine = DecoderRunner(ModelFile.open(path), context=CONTEXT, threads=threads)
        self.settings = np.array([0, 0, 1, 0], np.float32)
        self.state = np.array([1, 0], np.uint64)
        self.rng = np.random.default_rng(1)
        self.prefill()
        self.decode()

    def _feed(self, count: int) -> None:
        tokens = [int(t) for t in self.rng.integers(0, VOCAB, count)]
        self.engine.step(tokens, self.state, self.settings)

    def prefill(self) -> float:
        """Tokens per second of a prompt."""
        self.engine.tokens.clear()
        start = time.perf_counter()
        self._feed(PREFILL)
        return PREFILL / (time.perf_counter() - start)

    def decode(self) -> float:
        """Tokens per second of one after the other."""
        del self.engine.tokens[PAST:]
        start = time.perf_counter()
        for _ in range(STEPS):
            self._feed(1)
        return STEPS / (time.perf_counter() - start)


def measure(kind: str, threads: int, rounds: int) -> list[Bar]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "moe.gguf"
        write_model(path, kind)
        size, runs = active_bytes(path), Runs(path, threads)
        decode, prefill = [], []
        for _ in range(rounds):  # pairs, since memory is faster in one minute than in another
            speed = runs.decode()
            decode.append((speed * size / 1e9, read_bandwidth(threads, 0.3)))
            prefill.append((runs.prefill(), speed))
        runs.engine.close()
    print(f"{kind}: {size / 1e6:.0f} MB active; decode {_typical(prefill)[1]:.1f} tok/s")
    return [
        Bar(f"moe_decode_{kind}", *_in(decode, "GB/s", "read bandwidth"), _BANDWIDTH),
        Bar(f"moe_prefill_{kind}", *_in(prefill, "tok/s", "one by one"), _SORTED),
    ]


Pairs = list[tuple[float, float]]


def _typical(pairs: Pairs) -> tuple[float, float]:
    """The pair whose ratio is the median."""
    return sorted(pairs, key=lambda p: p[0] / p[1])[len(pairs) // 2]


def _in(pairs: Pairs, unit: str, peer: str) -> tuple[float, str, str, float]:
    ours, theirs = _typical(pairs)
    return ours, unit, peer, theirs


def main(argv: list[str]) -> int:
    parser = arguments("moe", __doc__ or "")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--type", action="append", choices=tuple(LAYERS), metavar="TYPE")
    options = parser.parse_args(argv)
    bars: list[Bar] = []
    for kind in options.type or LAYERS:
        bars += measure(kind, options.threads, 3 if options.quick else 7)
    return finish(bars, options.json)
