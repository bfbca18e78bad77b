"""A small transformer: described once, seen at every level, run at several sizes.

python examples/small_network.py
"""

from __future__ import annotations

from functools import partial

import numpy as np

import rlx

WIDTH, HEADS, LAYERS, VOCAB = 64, 4, 2, 100


def model(g: rlx.GraphModule) -> rlx.Value:
    """Token ids to logits; batch and sequence length stay symbols."""
    ids = g.input("ids", ["batch", "seq"], "i32")
    x = g.embedding(ids, g.param("embedding", [VOCAB, WIDTH]))
    for i in range(LAYERS):
        x = g.named(f"layers.{i}", partial(layer, f"layers.{i}", x))
    return g.linear(g.rms_norm(x, g.param("norm", [WIDTH])), g.param("head", [WIDTH, VOCAB]))


def layer(name: str, x: rlx.Value, g: rlx.GraphModule) -> rlx.Value:
    def weight(part: str, *shape: int) -> rlx.Value:
        return g.param(f"{name}.{part}", list(shape))

    h = g.rms_norm(x, weight("attn_norm", WIDTH))
    q, k, v = (g.linear(h, weight(p, WIDTH, WIDTH)) for p in ("q", "k", "v"))
    h = g.attention(q, k, v, num_heads=HEADS, head_dim=WIDTH // HEADS, mask_kind="causal")
    x = x + g.linear(h, weight("o", WIDTH, WIDTH))
    h = g.rms_norm(x, weight("ffn_norm", WIDTH))
    up, gate = weight("up", WIDTH, 128), weight("gate", WIDTH, 128)
    return x + g.swiglu_ffn(h, up, gate, weight("down", 128, WIDTH))


def main() -> None:
    module = rlx.GraphModule.define("small", model)
    print("HIR: what was written\n")
    print(module.inspect())
    session = rlx.Session("reference")
    template, compiled = session.template(module), session.compile(module)
    print("\nThe fusion report\n")
    print(template.result.fusion_report)

    rng = np.random.default_rng(0)
    for node in template.source.sources("param"):
        shape = node.output.shape.static_dims
        compiled.set_param(node.name, rng.normal(0, 0.1, shape).astype(np.float32))
    for batch, seq in [(1, 5), (2, 9)]:
        ids = rng.integers(0, VOCAB, (batch, seq)).astype(np.int32)
        (logits,) = compiled.run(ids=ids)
        likeliest = logits[:, -1].argmax(-1)
        print(f"\nids {ids.shape} -> logits {logits.shape}; likeliest next: {likeliest}")
    print("\nLIR: the plan for the last size\n")
    print(rlx.GraphModule.from_lir(compiled.executable.lir).inspect())


if __name__ == "__main__":
    main()
