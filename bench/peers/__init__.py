"""Peers, each run by a Python that has it installed, spoken to over pipes."""
