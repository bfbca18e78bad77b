"""Quantised GEMM: weights stay in their quantised format.

dequantize, dequant_formats every scheme as f32 values, bit for bit
gather                      embedding rows and weights of chosen experts, dequantised
dequant_gemm                GEMM that dequantises on the fly: any scheme
quantize_rows               operands of integer dot products: 8-bit rows, column tiles
dot                         the target's integer dot product, and the tile that uses it
block_formats, kquant_*     dot products of blocks and of k-quant superblocks
qgemm, unpacked_gemm        integer GEMM, and its form for many rows with unpacked weights
grouped_qgemm               integer GEMM of rows routed to experts
pack_quantised              graph rewrites: packed weights, fused epilogues
"""
