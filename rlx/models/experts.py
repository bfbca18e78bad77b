"""Mixture of experts: a router sends each token to a few of many FFNs.

Only the chosen experts are read: a grouped matmul multiplies rows of tokens with the weights of
their own expert, [experts, out, in], float or quantised.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from rlx.models.activations import activate
from rlx.models.builder import Tensor

if TYPE_CHECKING:
    from rlx.models.decoder_builder import DecoderBuilder

Gate = Callable[["DecoderBuilder", Tensor, Tensor], Tensor]  # gate and up → the input of down


def plain_gate(net: DecoderBuilder, gate: Tensor, up: Tensor) -> Tensor:
    return activate(net.g, net.config.activation, gate) * up


def has_experts(net: DecoderBuilder, layer: int) -> bool:
    """Whether a layer has a router; the first layers of some models have none."""
    return f"blk.{layer}.ffn_gate_inp.weight" in net.weights


def experts_ffn(net: DecoderBuilder, x: Tensor, layer: int, gate: Gate = plain_gate) -> Tensor:
    """The weighted sum of the chosen experts, plus the shared expert where there is one."""
    g, blk = net.g, f"blk.{layer}"
    _, tokens, width = x.shape.dims
    scores, chosen = _route(net, x, layer)
    active = chosen.shape.dims[1]
    slots = tokens * active
    rows = x.reshape(tokens, 1, width)
    rows = rows.expand(tokens, active, width)
    rows = rows.reshape(slots, width)
    expert = chosen.reshape(slots)
    gated, up = (net.grouped(rows, f"{blk}.ffn_{p}_exps", expert) for p in ("gate", "up"))
    y = net.grouped(gate(net, gated, up), f"{blk}.ffn_down_exps", expert)
    y = y.reshape(tokens, active, width)
    y = g.sum(y * scores.reshape(tokens, active, 1), axis=1)
    y = y.reshape(x.shape.dims)
    return y if f"{blk}.ffn_up_shexp.weight" not in net.weights else y + _shared(net, x, layer)


def _route(net: DecoderBuilder, x: Tensor, layer: int) -> tuple[Tensor, Tensor]:
    """(scores, expert indices), both [tokens, active].

    A softmax over the chosen experts alone equals a normalised softmax over all.
    """
    settings = net.config.experts
    assert settings is not None
    logits = net.linear(x, f"blk.{layer}.ffn_gate_inp")
    logits = logits.reshape(x.shape.dims[1], settings.count)
    every = logits.softmax()
    scores, chosen = every.top_k(k=settings.active)
    if settings.normalize:
        scores = scores / scores.sum(axis=1, keepdims=True)
    return scores if settings.scale == 1.0 else scores * settings.scale, chosen


def _shared(net: DecoderBuilder, x: Tensor, layer: int) -> Tensor:
    """The shared expert, gated where the file has a gate for it."""
    y = net.gated_ffn(x, layer, part="_shexp")
    name = f"blk.{layer}.ffn_gate_inp_shexp.weight"
    if name not in net.weights:
        return y
    gate = net.param(name).reshape(x.shape.dims[2], 1)
    return y * net.g.sigmoid(x @ gate)
