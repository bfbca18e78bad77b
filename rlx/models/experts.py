"""Mixture of experts: a router sends each token to a few of many FFNs.

Only the chosen experts are read: a grouped matmul multiplies rows of tokens with the weights of
their own expert, [experts, out, in], float or quantised.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from rlx.models.builder import Tensor

if TYPE_CHECKING:
    from rlx.models.decoder_builder import DecoderBuilder

Gate = Callable[["DecoderBuilder", Tensor, Tensor], Tensor]  # gate and up → the input of down


def silu_gate(net: DecoderBuilder, gate: Tensor, up: Tensor) -> Tensor:
    return net.g.hir_mir("silu", [gate]) * up


def has_experts(net: DecoderBuilder, layer: int) -> bool:
    """Whether a layer has a router; the first layers of some models have none."""
    return f"blk.{layer}.ffn_gate_inp.weight" in net.weights


def experts_ffn(net: DecoderBuilder, x: Tensor, layer: int, gate: Gate = silu_gate) -> Tensor:
    """The weighted sum of the chosen experts, plus the shared expert where there is one."""
    g, blk = net.g, f"blk.{layer}"
    _, tokens, width = x.shape.dims
    scores, chosen = _route(net, x, layer)
    active = chosen.shape.dims[1]
    slots = tokens * active
    rows = g.hir_mir("reshape", [x], dims=(tokens, 1, width))
    rows = g.hir_mir("expand", [rows], dims=(tokens, active, width))
    rows = g.hir_mir("reshape", [rows], dims=(slots, width))
    expert = g.hir_mir("reshape", [chosen], dims=(slots,))
    gated, up = (net.grouped(rows, f"{blk}.ffn_{p}_exps", expert) for p in ("gate", "up"))
    y = net.grouped(gate(net, gated, up), f"{blk}.ffn_down_exps", expert)
    y = g.hir_mir("reshape", [y], dims=(tokens, active, width))
    y = g.hir_mir("sum", [y * g.hir_mir("reshape", [scores], dims=(tokens, active, 1))], axes=(1,))
    y = g.hir_mir("reshape", [y], dims=x.shape.dims)
    return y if f"{blk}.ffn_up_shexp.weight" not in net.weights else y + _shared(net, x, layer)


def _route(net: DecoderBuilder, x: Tensor, layer: int) -> tuple[Tensor, Tensor]:
    """(scores, expert indices), both [tokens, active].

    A softmax over the chosen experts alone equals a normalised softmax over all.
    """
    g, settings = net.g, net.config.experts
    assert settings is not None
    logits = net.linear(x, f"blk.{layer}.ffn_gate_inp")
    logits = g.hir_mir("reshape", [logits], dims=(x.shape.dims[1], settings.count))
    every = g.hir_mir("softmax", [logits])
    scores, chosen = g.hir_mir("top_k", [every], k=settings.active)
    if settings.normalize:
        scores = scores / g.hir_mir("sum", [scores], axes=(1,), keepdims=True)
    return scores if settings.scale == 1.0 else scores * settings.scale, chosen


def _shared(net: DecoderBuilder, x: Tensor, layer: int) -> Tensor:
    """The shared expert, gated where the file has a gate for it."""
    y = net.gated_ffn(x, layer, part="_shexp")
    name = f"blk.{layer}.ffn_gate_inp_shexp.weight"
    if name not in net.weights:
        return y
    gate = net.g.hir_mir("reshape", [net.param(name)], dims=(x.shape.dims[2], 1))
    return y * net.g.hir_mir("sigmoid", [net.g.hir_mir("matmul", [x, gate])])
