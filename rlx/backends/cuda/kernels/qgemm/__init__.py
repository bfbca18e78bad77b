"""Products with and lookups in packed weights, which are decoded in registers."""
