"""Attention: one query against long keys, divided among blocks; many queries by tensor cores."""
