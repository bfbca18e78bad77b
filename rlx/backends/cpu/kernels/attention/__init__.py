"""Attention after FlashAttention: online softmax over KV blocks, split-KV between workers.

The order of all sums is fixed by positions alone (`problem`), so a row's result has the same bits
whatever runs beside it, on any number of workers.

lower_attention     the op to kernels: decode or prefill, strides, combine
problem             what is constant in the code, kernel args, GQA rows and visible keys
prefill             many rows: query blocks against KV blocks
tiles, pack_qkv     its tiles and micro-kernels (QKᵀ, PV), its packed operands
decode, key_parts   a few rows: flash decoding at memory speed
decode_heads        the same where the heads of a key are neighbours in memory
softmax             online softmax of both
work_split, combine split-KV: splits of the keys shared among workers, and combined in order
paged_attention     decode over a paged KV cache
q8_cache            the Q8_0 KV cache
"""
