"""Encoders: models that read a whole text at once and give vectors or scores."""
