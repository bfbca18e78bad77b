"""The shape of Qwen3-0.6B, built as `rlx.load` builds it from a file, without weights."""

from __future__ import annotations

LAYERS = 28
CONTEXT, VOCAB = 4096, 151936
HIDDEN, HEADS, KV, HEAD, FFN = 1024, 16, 8, 128, 3072


def decoder(layers: int = LAYERS):  # type: ignore[no-untyped-def]
    """Qwen3-0.6B: token ids and a cache in, the logits of the last token out."""
    from rlx import GraphModule

    def layer(g: GraphModule, x: object, i: int) -> object:
        def w(part: str, *dims: int) -> object:
            return g.param(f"blk.{i}.{part}", list(dims))

        def cached(value: object, name: str) -> object:
            state = g.state(f"{name}.{i}", [1, CONTEXT, KV * HEAD], "f16")
            return g.cache_append(state, value, start="past_seq", axis=1)

        cos, sin = g.as_hir().find("cos"), g.as_hir().find("sin")
        rope = {"head_dim": HEAD, "offset": "past_seq"}
        h = g.rms_norm(x, w("norm1", HIDDEN))
        q = g.linear(h, w("q", HEADS * HEAD, HIDDEN), transposed=True)
        k = g.linear(h, w("k", KV * HEAD, HIDDEN), transposed=True)
        v = g.linear(h, w("v", KV * HEAD, HIDDEN), transposed=True)
        q = g.qk_norm_rope(q, w("q_norm", HEAD), cos, sin, **rope)
        k = g.qk_norm_rope(k, w("k_norm", HEAD), cos, sin, **rope)
        h = g.attention(
            q, cached(k, "k"), cached(v, "v"), num_heads=HEADS, num_kv_heads=KV, head_dim=HEAD,
            mask_kind="causal",
        )  # fmt: skip
        x = x + g.linear(h, w("o", HIDDEN, HEADS * HEAD), transposed=True)
        h = g.rms_norm(x, w("norm2", HIDDEN))
        gate = g.linear(h, w("gate", FFN, HIDDEN), transposed=True, activation="silu")
        up = g.linear(h, w("up", FFN, HIDDEN), transposed=True)
        return x + g.linear(gate * up, w("down", HIDDEN, FFN), transposed=True)

    def build(g: GraphModule) -> object:
        table = g.param("embed", [VOCAB, HIDDEN])
        x = g.embedding(g.input("ids", [1, "seq"], "i32"), table)
        g.param("cos", [CONTEXT, HEAD // 2])
        g.param("sin", [CONTEXT, HEAD // 2])
        for i in range(layers):
            x = g.named(f"blk.{i}", lambda b, x=x, i=i: layer(b, x, i))
        x = g.rms_norm(x, g.param("norm", [HIDDEN]))
        last = x.narrow(axis=1, start=x.shape.dims[1] - 1, length=1)
        return {"logits": g.linear(last, table, transposed=True)}

    return GraphModule.define("qwen3", build)


def component(seq: int, past: int = CONTEXT - 1):  # type: ignore[no-untyped-def]
    """One token, or up to so many, after up to `past` others."""
    from rlx import KernelDispatchConfig, ModelComponent, ModelVariant, UpTo

    size = seq if seq == 1 else UpTo(seq)
    return ModelComponent(ModelVariant.decode(1, UpTo(past), size), KernelDispatchConfig())
