"""How each ATen op is built from ours: a table of small functions, a file per group."""
