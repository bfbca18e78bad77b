"""Recurrences over a sequence: states stay in registers from token to token."""
