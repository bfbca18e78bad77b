"""Convolutions: windows as rows of a product, or sums of taps."""
