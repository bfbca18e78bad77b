"""Continuous batching: many requests on one model, with a paged KV cache."""
