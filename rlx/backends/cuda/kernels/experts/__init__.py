"""Products whose rows have weights of their own: those of experts, and of adapters."""
