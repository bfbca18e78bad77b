"""On a machine with a GPU: how long recurrent layers, loops, experts and packed types take.

    python tests/cuda/layers_on_gpu.py [--only TEXT]

Each is 12 nodes (4 with experts) of a graph with weights and states of their own, in one run; a
figure is the time of a run, queued behind others, divided by their number (medians of seven).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "parity"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "goldens"))
sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import numpy as np
from checks_on_gpu import Letters, backend, compiled, graph_of
from tiny import PROMPT, write_folder

import rlx
from rlx.ir.dtype import DType
from rlx.ir.graph import Graph
from rlx.ir.ops.control import make_body
from rlx.ir.quant.scheme import GGUF_SCHEMES
from rlx.ir.shape import Shape
from rlx.models.model_file import ModelFile

COPIES = 12
Build = Callable[[Graph, int], Any]


def delta_net(tokens: int, heads: int = 32, size: int = 128) -> tuple[Build, float]:
    def build(g: Graph, i: int) -> Any:
        q, k, v = (g.input(f"{n}{i}", [1, tokens, heads, size]) for n in "qkv")
        gate, beta = (g.input(f"{n}{i}", [1, tokens, heads]) for n in ("g", "b"))
        state = g.state(f"s{i}", [1, heads, size, size])
        o, last = g.gated_delta_net(q, k, v, gate, beta, state, state_size=size)
        g.state_update(state, last)
        return o

    return build, 8.0 * heads * size * size


def scan_layer(tokens: int, width: int = 1536, size: int = 128) -> tuple[Build, float]:
    def build(g: Graph, i: int) -> Any:
        u, d = (g.input(f"{n}{i}", [1, tokens, width]) for n in "ud")
        b, c = (g.input(f"{n}{i}", [1, tokens, size]) for n in "bc")
        a, state = g.param(f"a{i}", [width, size]), g.state(f"s{i}", [1, width, size])
        y, last = g.selective_scan(u, d, a, b, c, state, has_state=True)
        g.state_update(state, last)
        return y

    return build, 12.0 * width * size


def cell(name: str, tokens: int, hidden: int, batch: int) -> tuple[Build, float]:
    def build(g: Graph, i: int) -> Any:
        gates = 4 if name == "lstm" else 3
        x = g.input(f"x{i}", [tokens, batch, gates * hidden])
        states = [g.input(f"h{i}", [batch, hidden])]
        states += [g.input(f"c{i}", [batch, hidden])] if name == "lstm" else []
        return getattr(g, name)(x, g.param(f"r{i}", [hidden, gates * hidden]), *states)[0]

    return build, 0.0


def loop(length: int) -> tuple[Build, float]:
    def build(g: Graph, i: int) -> Any:
        body = make_body(lambda g, h, x: g.tanh(g.add(h, x)), [64], [64])
        return g.scan(g.input(f"h{i}", [64]), g.input(f"x{i}", [length, 64]), body=body,
                      n_carry=1, n_xs=1)  # fmt: skip

    return build, 0.0


def expert_products(
    kind: str, rows: int, count: int = 128, n: int = 768, k: int = 2048
) -> tuple[Build, float]:
    def build(g: Graph, i: int) -> Any:
        x, ids = g.input(f"x{i}", [rows, k]), g.input(f"e{i}", [rows], "i32")
        if kind == "BF16":
            w = g.param(f"w{i}", [count, n, k], "bf16")
            return g.grouped_matmul(x, g.transpose(w, (0, 2, 1)), ids)
        scheme = GGUF_SCHEMES[kind]
        w = g.param(f"w{i}", [count, n, scheme.row_bytes(k)], "u8")
        return g.dequant_grouped_matmul(x, w, ids, scheme=scheme)

    each = 2.0 * n * k if kind == "BF16" else n * GGUF_SCHEMES[kind].row_bytes(k)
    return build, each * min(rows, count)


def packed(kind: str, rows: int, n: int = 4096, k: int = 4096) -> tuple[Build, float]:
    scheme = GGUF_SCHEMES[kind]

    def build(g: Graph, i: int) -> Any:
        w = g.param(f"w{i}", [n, scheme.row_bytes(k)], "u8")
        return g.dequant_matmul(g.input(f"x{i}", [rows, k]), w, scheme=scheme)

    return build, float(n * scheme.row_bytes(k))


def ordered(rows: int, size: int) -> tuple[Build, float]:
    return (lambda g, i: g.argsort(g.input(f"x{i}", [rows, size]))), 0.0


def best(k: int, size: int) -> tuple[Build, float]:
    return (lambda g, i: g.top_k(g.input(f"x{i}", [1, size]), k=k)[0]), 0.0


TIMED: dict[str, tuple[Build, float]] = {
    "gated delta net, 1 token, 32 heads of 128": delta_net(1),
    "gated delta net, 512 tokens": delta_net(512),
    "selective scan, 1 token, 1536 channels of 128": scan_layer(1),
    "selective scan, 512 tokens": scan_layer(512),
    "lstm, 100 steps, 512 units, 1 row": cell("lstm", 100, 512, 1),
    "lstm, 100 steps, 512 units, 32 rows": cell("lstm", 100, 512, 32),
    "gru, 100 steps, 512 units, 1 row": cell("gru", 100, 512, 1),
    "a loop of 100 small steps": loop(100),
    **{
        f"8 of 128 experts {kind}, 768x2048": expert_products(kind, 8)
        for kind in ("BF16", "Q8_0", "Q4_K")
    },
    **{
        f"4096 rows of 128 experts {kind}, 768x2048": expert_products(kind, 4096)
        for kind in ("BF16", "Q4_K")
    },
    **{
        f"{rows} rows, {kind}, 4096x4096": packed(kind, rows)
        for kind in ("Q4_K", "IQ4_XS", "Q3_K", "Q5_0", "IQ2_XXS")
        for rows in (1, 512)
    },
    "argsort of a row of 151936": ordered(1, 151936),
    "the best 16 of a row of 151936": best(16, 151936),
    "the best 17 of a row of 151936": best(17, 151936),
    "running sum of 64 rows of 65536": (lambda g, i: g.cumsum(g.input(f"x{i}", [64, 65536])), 0.0),
    "64 systems of 64 equations": (
        lambda g, i: g.solve(g.input(f"x{i}", [64, 64, 64]), g.input(f"y{i}", [64, 64, 1])), 0.0
    ),
}  # fmt: skip


@cache
def numbers(dims: tuple[int, ...], dtype: DType, negative: bool) -> Any:
    """Bytes of zeros have scales that are numbers."""
    rng = np.random.default_rng(0)
    if dtype.name == "u8":
        return np.zeros(dims, np.uint8)
    if dtype.name == "i32":
        return rng.permutation(128 * (1 + dims[0] // 128))[: dims[0]].astype(np.int32) % 128
    some = rng.random(1 << 18, np.float32).astype(dtype.numpy)
    return np.resize(-some if negative else some, dims)


def filled(graph: Graph) -> Iterator[tuple[str, str, Any]]:
    """Params and inputs."""
    for node in graph.nodes:
        shape: Shape = node.outputs[0].shape
        if node.op.name in ("input", "param"):
            negative = node.name.startswith(("a", "g"))
            yield node.op.name, node.name, numbers(shape.static_dims, shape.dtype, negative)


def timed(build: Build, copies: int = COPIES) -> float:
    """Seconds of one node."""
    graph = graph_of(lambda g: tuple(build(g, i) for i in range(copies)))
    made = compiled(graph)
    values = list(filled(graph))
    made.set_params({name: data for role, name, data in values if role == "param"})
    inputs = {n: backend().allocator.put(d) for role, n, d in values if role == "input"}
    buffers = [inputs[name] for name in made.input_names]
    found = []
    for _ in range(8):
        start = time.perf_counter()
        for _ in range(4):
            made.run_slots(*buffers)
        made.synchronize()
        found.append((time.perf_counter() - start) / (4 * copies))
    return statistics.median(found[1:])


def decoded(name: str) -> float:
    """Tokens a second of a tiny model: launches and the host are all there is."""
    ModelFile.tokenizer = lambda self: Letters()  # type: ignore[method-assign,assignment,return-value]
    with tempfile.TemporaryDirectory() as folder:
        write_folder(name, Path(folder))
        with rlx.load(folder, device="cuda", context=128, kv="f16") as model:
            settings: dict[str, Any] = {"stream": False, "max_tokens": 96, "seed": 1}
            for _ in range(4):
                start = time.perf_counter()
                found = model.generate(PROMPT, **settings)
                seconds = time.perf_counter() - start
    return len(found.tokens) / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    only = parser.parse_args().only
    for name, (build, moved) in TIMED.items():
        if only in name:
            seconds = timed(build, 4 if "experts" in name else COPIES)
            rate = f", {moved / seconds / 1e9:,.0f} GB/s of weights or states" if moved else ""
            print(f"{name}: {seconds * 1e6:.1f} us{rate}", flush=True)
    for name in ("llama", "mamba2", "qwen3_next", "qwen3_moe"):
        if only in f"tiny {name}":
            print(f"tiny {name}: {decoded(name):,.0f} tokens/s", flush=True)


if __name__ == "__main__":
    main()
