"""Rotary embeddings, with the norm of each head before them, and appending to the KV cache."""
