"""Fourier transforms (`fft`, on `fft_passes`) and linear systems (`lower_linalg`)."""
