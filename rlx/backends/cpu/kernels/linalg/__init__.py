"""Fourier transforms and linear systems: `fft` (constant lengths) on `fft_passes`, `dft` (lengths
known at run time), `solve` (LU decomposition), `lower_linalg`."""
