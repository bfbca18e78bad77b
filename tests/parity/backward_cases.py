"""The part of the table that is about backward ops."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from cases import Arg, Case

FLOATS = ("f32", "bf16", "f16")


def below(high: int) -> Callable[..., Any]:
    return lambda dims, rng: rng.integers(0, high, dims)


def losses() -> Iterator[Case]:
    labels, row = Arg(("n",), "i32", data=below(37)), Arg(("n",))
    for t in (*FLOATS, "f64"):
        x = Arg(("n", 37), t, -8, 8)
        # an exponential, and a sum of 37 of them
        yield Case(
            "softmax_cross_entropy", t, {"x": x, "i": labels},
            lambda g, x, i: g.softmax_cross_entropy(x, i, ignore_index=2), 8, "sum",
        )  # fmt: skip
        yield Case(
            "softmax_cross_entropy_backward", t, {"x": x, "i": labels, "l": row, "d": row},
            lambda g, *v: g.softmax_cross_entropy_backward(*v, ignore_index=2), 8, "sum",
        )  # fmt: skip


def norms() -> Iterator[Case]:
    for t in (*FLOATS, "f64"):
        # sums of 37 products for a row, of n products for gamma
        x = Arg(("n", 37), t)
        args = {"x": x, "g": Arg((37,), t), "dy": x}
        for kind in ("rms_norm_backward", "layer_norm_backward"):
            yield Case(
                kind, t, args, lambda g, *v, kind=kind: g.apply(kind, *v, has_beta=True), 16, "sum"
            )
            yield Case(
                kind, f"{t}-sum", args | {"s": x}, lambda g, *v, kind=kind: g.apply(kind, *v),
                16, "sum",
            )  # fmt: skip


def gathers() -> Iterator[Case]:
    for t in (*FLOATS, "i8", "c64"):
        off = 0 if t == "i8" else 8
        dy, ids = Arg((3, "n", 70), t), Arg(("n",), "i32", data=below(9))
        yield Case(
            "gather_backward", t, {"dy": dy, "i": ids},
            lambda g, dy, i: g.gather_backward(dy, i, size=11, axis=1), off, "sum",
        )  # fmt: skip
    rows = {
        "dy": Arg(("n", 2, 5)),
        "i": Arg(("n", 2), "i64", data=lambda d, r: r.integers(-7, 7, d)),
    }
    yield Case(
        "gather_backward", "f32-rows", rows,
        lambda g, dy, i: g.gather_backward(dy, i, size="n + 7"), 8, "sum",
    )  # fmt: skip


def convolutions() -> Iterator[Case]:
    images, dy = ("n", 6, 9, 37), ("n", 10, 9, 37)
    for t in (*FLOATS, "f64"):
        # sums of n · 333 products, up to 67 · 333; f64 has no wider type to sum in, and added one
        # by one their roundings walk √22,311 / 2 half-ulps of the largest sum
        within = 80 if t == "f64" else 16
        yield Case(
            "conv_weight_backward", t, {"x": Arg(images, t), "dy": Arg(dy, t)},
            lambda g, *v: g.conv_weight_backward(*v, kernel=(3, 3), padding=(1,)), within, "sum",
        )  # fmt: skip
        pooled = {"x": Arg(images, t, special=True), "dy": Arg(("n", 6, 4, 18), t)}
        yield Case(
            "max_pool_backward", t, pooled, lambda g, *v: g.max_pool_backward(*v, kernel=(2,))
        )
    uneven = {"x": Arg(("n", 4, 11, 40)), "dy": Arg(("n", 6, 4, 19))}
    yield Case(
        "conv_weight_backward", "f32-uneven", uneven,
        lambda g, *v: g.conv_weight_backward(
            *v, kernel=(3, 2), stride=(2, 2), padding=(0, 1, 1, 0), dilation=(2, 3), groups=2
        ), 16, "sum",
    )  # fmt: skip
    yield Case(
        "conv_weight_backward", "f32-1d", {"x": Arg(("n", 3, 67)), "dy": Arg(("n", 5, 63))},
        lambda g, *v: g.conv_weight_backward(*v, kernel=(5,)), 16, "sum",
    )  # fmt: skip
    shared = {"x": Arg(("n", 2, 7, 9), low=-1, high=1), "dy": Arg(("n", 2, 4, 5))}
    yield Case(
        "max_pool_backward", "f32-shared", shared,
        lambda g, *v: g.max_pool_backward(*v, kernel=(3,), stride=(2,), padding=(1,)), 2, "sum",
    )  # fmt: skip


def attentions() -> Iterator[Case]:
    heads = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
    for t in (*FLOATS, "f64"):
        q, k = Arg((2, 5, 32), t), Arg((2, "n", 16), t)
        # sums of 8 products for a score, then of n exponentials and n products
        yield Case(
            "attention_with_lse", t, {"q": q, "k": k, "v": k},
            lambda g, *x: g.apply("attention_with_lse", *x, **heads, softcap=3.0), 16, "sum",
            sizes=(1, 5, 67),  # the maximum of a row needs a key
        )  # fmt: skip
        for mask in ("none", "causal"):
            yield Case(
                "attention_backward", f"{t}-{mask}", {"q": q, "k": k, "v": k, "do": q},
                attention_gradient(**heads, mask_kind=mask), 32, "sum",
                sizes=(5, 67),  # of one key the gradients are 0 but for rounding
            )  # fmt: skip
    q, k = Arg((2, 3, "n", 20)), Arg((2, 3, 83, 20))
    yield Case(
        "attention_backward", "f32-window", {"q": q, "k": k, "v": k, "do": q},
        attention_gradient(
            num_heads=3, num_kv_heads=3, head_dim=20, q_layout="bhsd", kv_layout="bhsd",
            mask_kind="sliding_window(9)",
        ), 32, "sum", sizes=(1, 67),
    )  # fmt: skip
    rows = Arg((2, 50, "n", 4, 64))
    yield Case(
        "attention_backward", "f32-strided", {"qkv": rows, "do": Arg((2, 50, 256))},
        strided_attention_gradient, 32, "sum", sizes=(3,),
    )  # fmt: skip


def attention_gradient(**attributes: Any) -> Callable[..., Any]:
    """Backward behind forward: a log-sum-exp is no free operand."""

    def build(g: Any, q: Any, k: Any, v: Any, ct: Any) -> Any:
        out, lse = g.apply("attention_with_lse", q, k, v, **attributes)
        return g.apply("attention_backward", q, k, v, out, lse, ct, **attributes)

    return build


def strided_attention_gradient(g: Any, qkv: Any, ct: Any) -> Any:
    """Queries, keys and values from one tensor, and a cotangent with the heads inside."""
    heads = g.transpose(qkv, axes=(2, 0, 3, 1, 4))
    q, k, v = (
        g.reshape(g.narrow(heads, axis=0, start=i, length=1), shape=(2, 4, 50, 64))
        for i in range(3)
    )
    ct = g.transpose(g.reshape(ct, shape=(2, 50, 4, 64)), axes=(0, 2, 1, 3))
    build = attention_gradient(
        num_heads=4, num_kv_heads=4, head_dim=64, q_layout="bhsd", kv_layout="bhsd",
        mask_kind="causal",
    )  # fmt: skip
    return build(g, q, k, v, ct)


BACKWARD = (losses, norms, gathers, attentions, convolutions)
