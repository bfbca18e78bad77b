"""Encoders: bidirectional models that give vectors or scores of texts."""
