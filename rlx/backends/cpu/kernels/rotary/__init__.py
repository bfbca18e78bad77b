"""Rotary position embedding: `rotary` (the kernel, with a fused norm of heads), `lower_rotary`."""
