"""Kernels of blocks, each family with its lowering."""
