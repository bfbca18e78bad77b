"""The compiler itself: building nodes, the whole pipeline, repeated layers, import time.

No peer does the same work, so each figure stands against the budget that was set for it.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

from bench.common import Bar, arguments, finish, median_time
from rlx import Graph, GraphModule
from rlx.passes.pipeline import run_pipeline

HIDDEN, HEADS, KV, HEAD, FFN = 1024, 16, 8, 128, 3072


def transformer(layers: int) -> GraphModule:
    """A decoder in the shape of Qwen3-0.6B, batch and sequence symbolic."""

    def layer(g: GraphModule, x: object, name: str) -> object:
        def w(part: str, *dims: int) -> object:
            return g.param(f"{name}.{part}", list(dims))

        h = g.rms_norm(x, w("norm1", HIDDEN))
        q = g.linear(h, w("q", HIDDEN, HEADS * HEAD))
        k = g.linear(h, w("k", HIDDEN, KV * HEAD))
        v = g.linear(h, w("v", HIDDEN, KV * HEAD))
        cos, sin = g.as_hir().find("cos"), g.as_hir().find("sin")
        q = g.qk_norm_rope(q, w("q_norm", HEAD), cos, sin, head_dim=HEAD)
        k = g.qk_norm_rope(k, w("k_norm", HEAD), cos, sin, head_dim=HEAD)
        h = g.attention(
            q, k, v, num_heads=HEADS, num_kv_heads=KV, head_dim=HEAD, mask_kind="causal"
        )
        x = x + g.linear(h, w("o", HEADS * HEAD, HIDDEN))
        h = g.rms_norm(x, w("norm2", HIDDEN))
        up, gate = w("up", HIDDEN, FFN), w("gate", HIDDEN, FFN)
        return x + g.swiglu_ffn(h, up, gate, w("down", FFN, HIDDEN))

    def build(g: GraphModule) -> object:
        x = g.input("x", ["batch", "seq", HIDDEN])
        g.param("cos", [4096, HEAD // 2])
        g.param("sin", [4096, HEAD // 2])
        for i in range(layers):
            x = g.named(f"layers.{i}", lambda b, x=x, i=i: layer(b, x, f"layers.{i}"))
        return g.lm_head(g.rms_norm(x, g.param("norm", [HIDDEN])), g.param("head", [HIDDEN, 1000]))

    return GraphModule.define("qwen3", build)


def node_cost() -> float:
    """Microseconds to build a node, inference, origin and all; a mix of ops as models use."""
    count = 3000

    def build() -> None:
        g = Graph("nodes")
        x = g.input("x", ["batch", 64])
        w = g.param("w", [64, 64])
        for _ in range(count // 6):
            h = g.matmul(x, w)
            h = g.add(h, x)
            h = g.softmax(h, axis=-1)
            h = g.mul(h, h)
            h = g.transpose(h, (1, 0))
            x = g.transpose(h, (1, 0))

    return median_time(build, 9) / count * 1e6


def pipeline_cost(layers: int, policy: str) -> tuple[float, int]:
    """Seconds from a defined module to a legal, prepared template; nodes after lowering."""
    module = transformer(layers)
    nodes = len(module.with_fusion_policy(policy).lower())

    def run() -> None:
        lowered = module.with_fusion_policy(policy).lower().as_graph()
        run_pipeline(lowered, has_native=lambda node: True)

    return median_time(run, 5), nodes


def import_cost() -> float:
    """Seconds that `import rlx` and its core names add to `import numpy`, in new processes."""

    def spent(code: str) -> float:
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True)
        return time.perf_counter() - start

    plain, ours = [], []
    spent("import rlx; rlx.Session")
    for _ in range(9):
        plain.append(spent("import numpy"))
        ours.append(spent("import numpy, rlx; rlx.GraphModule"))
    return statistics.median(ours) - statistics.median(plain)


def main(argv: list[str]) -> int:
    options = arguments("compiler", __doc__ or "").parse_args(argv)
    bars = [Bar("node", node_cost(), "µs", "budget", 5.0, 1.0, higher_is_better=False)]
    seconds, nodes = pipeline_cost(28, "fusable")
    per = seconds * 3000 / nodes
    print(f"28 layers in primitives: {nodes} nodes, {seconds * 1e3:.0f} ms")
    bars.append(Bar("pipeline_3000", per, "s", "budget", 0.5, 1.0, higher_is_better=False))
    one, _ = pipeline_cost(1, "direct")
    many, _ = pipeline_cost(28, "direct")
    print(f"direct: 1 layer {one * 1e3:.1f} ms, 28 layers {many * 1e3:.1f} ms")
    bars.append(Bar("layers_28", many / one, "× one layer", "28 layers apart", 28.0, 1.0, False))
    bars.append(Bar("import", import_cost(), "s", "budget", 0.1, 1.0, higher_is_better=False))
    return finish(bars, options.json)
