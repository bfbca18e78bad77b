"""Matrix products: a few rows by the bandwidth of memory, many by tensor cores.

`lower_gemm` lowers matmuls, and those with a bias, an activation, a residual or a gate.
"""
