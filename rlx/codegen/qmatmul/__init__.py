"""Products with packed weights, which stay packed: decoding, integer dot products, panels."""
