"""Norms: `norm_backward`. Their forward is a loop nest (`kernels/loops`)."""
