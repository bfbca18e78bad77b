"""Graphs over all op groups, for tests of verification, text and serialisation."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from rlx.backends.cpu.backend import CpuBackend
from rlx.ir.attrs import Body, Data, MaskKind
from rlx.ir.dim import sym
from rlx.ir.dtype import ALL
from rlx.ir.graph import Graph
from rlx.ir.hir import HirModule
from rlx.ir.node import Origin
from rlx.ir.ops.custom import custom_op
from rlx.ir.quant.scheme import QuantScheme
from rlx.ir.text.printer import bodies
from rlx.llvm.target import Target

tagged = custom_op(
    "samples.tagged",
    infer=lambda x, *, tag=None, **rest: x,
    reference=lambda x, *, tag=None, **rest: x,
)


def mlp() -> Graph:
    g = Graph("mlp")
    x = g.input("x", ["batch", 64])
    with g.block("layers.0"):
        w = g.param("w", [64, 10])
        y = g.gelu(g.matmul(x, w))
    return g.set_outputs({"y": y})


def elementwise() -> Graph:
    g = Graph("elementwise ops, quoted")
    x = g.input('x "quoted"\n\t\\ ünï', ["batch", "2 * seq + 1", "(n + 3) // 4"])
    y = g.clamp(g.leaky_relu(x, alpha=0.1), low=-0.0, high=float("inf"))
    z = g.where(g.lt(y, 1.0), g.elu(y, alpha=1e-300), g.cast(y, "f16"), name="chosen")
    k = g.bitwise_xor(g.cast(z, "i64"), 7)
    return g.set_outputs({"out 1": z, "out,2": k})


def reductions() -> Graph:
    g = Graph("reductions")
    x = g.input("x", ["rows", 8, 16])
    values, indices = g.top_k(g.softmax(x, axis=1), k=3, largest=False, name="best")
    total = g.sum(values, axis=(0, -1), keepdims=True)
    token, rng = g.sample(
        g.mean(x, axis=[1]), g.input("rng", [2], "u64"), temperature=0.5, top_k=40, top_p=0.9
    )
    return g.set_outputs(total, g.argmax(x), indices, g.cumsum(x, reverse=True), token, rng)


def layouts() -> Graph:
    g = Graph("layouts")
    x = g.input("x", ["batch", "seq", 6])
    flat = g.reshape(x, [sym.BATCH * sym.SEQ, 2, 3])
    turned = g.transpose(flat, (0, 2, 1))
    part = g.narrow(x, axis=1, start="past_seq", length="seq - past_seq")
    padded = g.pad(turned, low=(0, 1, 0), high=(0, 0, 2), value=-0.0)
    edge = g.pad(turned, low=(0, 1, 0), high=(0, 0, 2), value=float("-inf"), mode="constant")
    joined = g.concat([padded, edge], axis=0)
    rows = g.gather(flat, g.iota(shape=[4], dtype="i32"), axis=0)
    count = g.dim_value(dim="batch * seq", dtype="i64")
    return g.set_outputs(part, joined, rows, count, g.slice(rows, (0, 0, 1), (4, 2, 3)))


def matmuls() -> Graph:
    g = Graph("matmuls")
    x = g.input("x", ["rows", 256])
    packed = g.param("packed", [16, 144], "u8")
    y = g.dequant_matmul(x, packed, scheme="Q4_K")
    w8, scale = g.param("w8", [16, 256], "i8"), g.param("scale", [16, 8])
    z = g.dequant_matmul(x, w8, scale, scheme="int8_b32")
    lora = g.lora_matmul(
        x, g.param("w", [256, 16]), g.param("a", [256, 4]), g.param("b", [4, 16]), scale=0.25
    )
    both = g.dot_general(y, z, lhs_contract=(1,), rhs_contract=(1,))
    fused = g.fused_matmul_bias_act(
        x, g.find("w"), g.param("bias", [16]), activation="silu", has_bias=True
    )
    return g.set_outputs(both, lora, fused)


def attentions() -> Graph:
    g = Graph("attentions")
    g.dynamic = {"past_seq": 4096, "seq": 8}
    q = g.input("q", ["batch", "seq", 32])
    cache = g.state("cache", ["batch", 4104, 16])
    new = g.state_update(cache, g.input("kv", ["batch", "seq", 16]), axis=1, start="past_seq")
    kv = g.narrow(new, axis=1, start=0, length="past_seq + seq")
    heads = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
    window = MaskKind.SLIDING_WINDOW(128)
    a = g.attention(q, kv, kv, mask_kind=window, softcap=30.0, scale=0.125, **heads)
    table = g.constant(np.linspace(0, 1, 4104 * 4, dtype=np.float32).reshape(4104, 4))
    b = g.rope(a, table, table, head_dim=8, interleaved=True, offset="past_seq")
    gamma = g.param("gamma", [32])
    normed, total = g.fused_residual_rms_norm(b, q, gamma, eps=1e-5)
    return g.set_outputs({"normed": normed, "sum": total, "cache": new})


def spatial() -> Graph:
    g = Graph("spatial")
    x = g.input("image", ["batch", 3, "height", "width"])
    w = g.param("w", [8, 3, 3, 3])
    y = g.conv(x, w, stride=(2, 2), padding=(1, 1), dilation=(1, 1))
    y = g.max_pool(g.group_norm(y, g.param("g", [8]), g.param("b", [8]), groups=4), kernel=(2, 2))
    z = g.resize(g.input("small", [1, 3, 5, 5]), sizes=(9, 7), mode="linear")
    spectrum = g.fft(g.complex(z, z), axis=-1, inverse=True)
    q = g.quantize(z, g.constant(0.1), dtype="i8")
    layout = {"stride": (2,), "padding": (1,), "dilation": (1,), "groups": 1, "tile": 8}
    layout |= {"transposed": False, "output_padding": (0,)}
    packed = g.packed_conv(x, g.pack_conv(w, **layout), **layout, w=w.shape)
    return g.set_outputs(y, spectrum, q, packed)


def recurrences() -> Graph:
    g = Graph("recurrences")
    q = g.input("q", ["batch", "seq", 2, 8])
    gate = g.input("gate", ["batch", "seq", 2])
    out, last = g.gated_delta_net(q, q, q, gate, gate, state_size=8)
    u = g.input("u", ["batch", "seq", 4])
    b = g.input("b", ["batch", "seq", 3])
    y, h = g.selective_scan(u, u, g.param("a", [4, 3]), b, b, g.param("d", [4]), has_d=True)
    r, state = g.param("r", [3, 12]), g.input("state", ["seq", 3])
    cells, *_ = g.lstm(g.input("x_gates", ["steps", "seq", 12]), r, state, state)
    gated, _ = g.gru(cells @ g.param("w", [3, 9]), g.param("s", [3, 9]), state, reverse=True)
    return g.set_outputs({"out": out, "last": last, "y": y, "h": h, "gated": gated})


def numerics() -> Graph:
    g = Graph("numerics")
    x = g.input("x", ["batch", "n", 5])
    ordered = g.sort(x, axis=1, descending=True)
    places = g.searchsorted(g.input("table", ["m"]), x, side="right")
    q, r = g.qr(g.input("a", [6, 4], "f64"), complete=True)
    words = g.philox(*[g.constant(i, "u32") for i in range(6)])
    return g.set_outputs(ordered, places, q, r, *words)


def _body(build: Callable[..., object], *shapes: object, name: str = "body") -> Graph:
    inner = Graph(name)
    inputs = [inner.input(f"in{i}", *s) for i, s in enumerate(shapes)]
    return inner.set_outputs(build(inner, *inputs))


def derivatives() -> Graph:
    """Ops that say how a function is differentiated."""
    g = Graph("derivatives")
    body = Graph("body")
    body.set_outputs(body.exp(body.input("x", ["n"])))
    x = g.checkpoint(g.input("x", ["n"]), body=body, policy="matmuls")
    x = g.custom_jvp(g.stop_gradient(x), body=body, rule=body)
    x = g.custom_vjp(x, body=body, forward=body, backward=body)
    return g.set_outputs(*g.optimization_barrier(x, g.exp(x)))


def control() -> Graph:
    """Branches in a loop in a scan: graphs nested three deep."""
    g = Graph("control")
    x = g.input("x", ["seq", 4])
    row: tuple[object, ...] = ([4],)

    def step(b: Graph, carry: object, item: object) -> object:
        then = _body(lambda t, v: t.tanh(v), row, name="then")
        other = _body(lambda t, v: t.mul(v, np.float32(0.1)), row, name="other wise")
        positive = b.gt(b.sum(item), 0.0)
        chosen = b.cond(positive, carry, then=then, otherwise=other)
        return (b.add(chosen, item), chosen)

    carry, ys = g.scan(
        g.constant(np.zeros(4, np.float32)),
        x,
        body=_body(step, row, row, name="step"),
        n_carry=1,
        n_xs=1,
        reverse=True,
    )
    small = _body(lambda b, v: b.lt(b.sum(v), 10.0), row, name="condition")
    grow = _body(lambda b, v: b.add(v, 1.0), row, name="grow")
    final = g.while_loop(carry, condition=small, body=grow, n_carry=1)
    region = _body(lambda b, v: b.relu(b.add(v, v)), (["seq", 4],), name="region")
    return g.set_outputs({"final": final, "ys": g.elementwise_region(ys, body=region)})


def constants() -> Graph:
    """Every element type, ordinary and odd values, small and large, empty and scalar."""
    g = Graph("constants")
    rng = np.random.default_rng(7)
    made = []
    for t in ALL:
        raw = rng.integers(0, 2 if t.name == "bool" else 256, size=12 * t.bytes, dtype=np.uint8)
        made.append(g.constant(Data(raw.view(t.numpy).reshape(3, 4)), name=f"random {t}"))
        made.append(g.constant(Data(np.arange(3).astype(t.numpy), t)))
        made.append(g.constant(Data(np.ones((2, 30)).astype(t.numpy), t)))
        made.append(g.constant(Data(np.ones(()).astype(t.numpy), t)))
        made.append(g.constant(Data(np.ones((0, 3)).astype(t.numpy), t)))
    payload = np.array([0x7FC00001, 0xFFC00000, 0x7F800001, 0x80000000, 0x00000001], np.uint32)
    made.append(g.constant(Data(payload.view(np.float32))))
    made.append(g.constant(Data([float("nan"), float("inf"), float("-inf"), -0.0, 0.1])))
    return g.set_outputs(*made)


def customs() -> Graph:
    g = Graph("customs")
    x = g.input("x", ["true", "f32", 3])
    inner = _body(lambda b, v: b.neg(v), ([3],), name="inner")
    odd = (1, 1.0, True, "1", None, (), (1,), ("a", (2.5, (False,))), float("nan"), -0.0, 10**40)
    y = tagged(g, x, tag=odd, dim=sym("true") * 2 + sym.SEQ, minus=sym("none") * -3 + 1)
    y = tagged(g, y, dtype=ALL[3], mask=MaskKind.LOCAL(0), data=Data([1, 2, 3], "u8"))
    y = tagged(g, y, shape=x.shape, word="é\ud800\x00", nested=(("graph", (Body(inner),)),))
    return g.set_outputs(y)


def origins() -> Graph:
    g = Graph("origins")
    places = [
        Origin("layers.0.attn", "/home/a/model.py", 12, ("fuse", "cse")),
        Origin('odd, block > "x"', "/home/b/model.py", 3, ("a b", "c>d", "e,f")),
        Origin("", "C:\\models\\net.py", 1, ()),
        Origin("", "<stdin>", 0, ()),
        Origin("", "", 7, ("only",)),
        Origin("b", "", 0, ()),
        Origin("", "plain.py", 5, ()),
        Origin("", "a: b.py", -1, ()),
        Origin(),
    ]
    with g.origin(places[0]):
        x = g.input("x", [3])
    for place in places[1:]:
        with g.origin(place):
            x = g.neg(x)
    return g.set_outputs(x)


def hir() -> Graph:
    m = HirModule("hir")
    x = m.input("x", ["batch", "seq", 32])
    with m.block("layers.0"):
        h = m.rms_norm(x, m.param("gamma", [32]), eps=1e-5)
        y = m.linear(h, m.param("w", [32, 64]), m.param("b", [64]), activation="gelu")
        z = m.swiglu_ffn(x, *(m.param(n, d) for n, d in _FFN))
    return m.set_outputs({"y": y, "z": m.mir("add", [z, x])})


_FFN = (("up", [32, 48]), ("gate", [32, 48]), ("down", [48, 32]))


def integers() -> Graph:
    g = Graph("integers")
    x, w = g.input("x", ["images", 4, 9, 8], "u8"), g.param("w", [6, 4, 3, 3], "i8")
    zero, scale = g.constant(np.uint8(128)), g.param("scale", [6])
    y = g.qlinear_conv(x, w, zero, scale, zero, stride=(2,), activation="relu")
    return g.set_outputs(y, g.conv_integer(x, w, zero, padding=(1,)))


def backward() -> Graph:
    g = Graph("backward")
    x, labels = g.input("x", ["batch", 6]), g.input("labels", ["batch"], "i32")
    loss, lse = g.softmax_cross_entropy(x, labels, ignore_index=-100)
    dx = g.softmax_cross_entropy_backward(x, labels, lse, loss, ignore_index=-100)
    dx, _ = g.rms_norm_backward(x, g.param("gamma", [6]), g.psum(dx, axis_name="devices"))
    heads = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 3, "mask_kind": "causal"}
    q, k = g.reshape(x, [1, sym.BATCH, 6]), g.input("k", [1, "keys", 3])
    out, rows = g.apply("attention_with_lse", q, k, k, **heads)
    dq, *_ = g.apply("attention_backward", q, k, k, out, rows, g.reshape(dx, q.shape.dims), **heads)
    image, dy = g.input("image", ["images", 4, 9, 8]), g.input("dy", ["images", 6, 9, 8])
    dw = g.conv_weight_backward(image, dy, kernel=(3, 3), padding=(1,))
    return g.set_outputs(dq, g.gather_backward(dx, labels, size=9), dw)


def lowered() -> Graph:
    """Matmuls as the CPU device rewrites them: packed weights, plain and quantised."""
    g = Graph("lowered")
    x = g.input("x", ["batch", 64])
    plain = g.matmul(x, g.param("w", [64, 32]))
    scheme = QuantScheme.parse("Q8_0")
    packed = g.dequant_matmul(x, g.param("q", [32, scheme.row_bytes(64)], "u8"), scheme=scheme)
    g.set_outputs(plain, packed)
    return CpuBackend(Target.named("x86-64-v3")).rewrite_template(g)


def empty() -> Graph:
    return Graph("empty")


SAMPLES: tuple[Callable[[], Graph], ...] = (
    mlp, elementwise, reductions, layouts, matmuls, attentions, spatial, recurrences, numerics,
    control, derivatives, backward, integers, constants, customs, origins, hir, lowered, empty,
)  # fmt: skip


def all_nodes(graph: Graph) -> list[object]:
    """Every node, nested ones included, as (op name, name, shapes, origin)."""
    rows: list[object] = [graph.name, graph.output_names, sorted(graph.dynamic.items())]
    for node in graph.nodes:
        shapes = [v.shape for v in node.outputs]
        inputs = [(v.node.id, v.index) for v in node.inputs]
        rows.append((node.id, node.op.name, node.name, inputs, shapes, node.origin))
        rows.extend(all_nodes(b.graph) for b in bodies(node.op))
    return rows
