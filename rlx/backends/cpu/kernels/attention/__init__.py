"""Attention after FlashAttention: online softmax over KV blocks, split-KV between workers.

The order of all sums is fixed by positions alone (`problem`), so a row's result has the same bits
whatever runs beside it, on any number of workers.

lower_attention     the op to kernels: decode or prefill, strides, combine
problem             what is constant in the code, kernel args, GQA rows, visible keys, Q8_0 cache
prefill             many rows: query blocks against KV blocks
tiles               its tiles and micro-kernels (QKᵀ, PV), its packed operands
decode              a few rows: flash decoding at memory speed
decode_heads        the same where the heads of a key are neighbours in memory
softmax             online softmax of both
combine             split-KV: splits of the keys shared among workers, and combined in order
paged_attention     decode over a paged KV cache
rotary              rotary position embedding, with a fused norm of heads
"""
