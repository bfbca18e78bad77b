"""Rotary position embedding: `rotary` (the kernel, with the fused norm of heads), `lower_rotary`."""
