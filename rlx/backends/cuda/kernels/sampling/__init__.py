"""Sampling of tokens from logits, on the device."""
