"""GEMM after BLIS: packed panels, a register-tiled micro-kernel, fused epilogues.

lower_gemm                  matmul ops to kernels: strides, choice of kernel, scratch
pack_weights                graph rewrite: constant weights packed into panels once
gemm                        the loops over blocks of MC x KC and panels of NR
pack_operands               blocks and panels in the order of the micro-kernel
microkernel, epilogue       the MR x NR register tile, and what follows it
gemv                        one row: forms for either unit stride of the weight; a single column
grouped_gemm                rows routed to experts
complex_gemm                complex numbers
strassen, strassen_twice    one and two levels of Strassen's algorithm
"""
