"""StableLM: Llama with layer norms and partial rotary positions.

Larger ones have attention and FFN in parallel, after one norm.
"""

from __future__ import annotations

from rlx.models.arch.llama import HF_NAMES as _LLAMA
from rlx.models.arch.llama import embed, finish
from rlx.models.arch.llama import layer as _sequential_layer
from rlx.models.arch.starcoder2 import HF_NAMES as _WITH_BIASES
from rlx.models.decoder_builder import DecoderBuilder, Tensor

HF_NAMES = {**_WITH_BIASES, **_LLAMA}


def layer(net: DecoderBuilder, x: Tensor, i: int) -> Tensor:
    if f"blk.{i}.ffn_norm.weight" in net.weights:
        return _sequential_layer(net, x, i)
    h = net.norm(x, f"blk.{i}.attn_norm")
    y = net.linear(net.attend(*net.qkv(h, i), i), f"blk.{i}.attn_output")
    return x + y + net.ffn(h, i)


__all__ = ["HF_NAMES", "embed", "finish", "layer"]
