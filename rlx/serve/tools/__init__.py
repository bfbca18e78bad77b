"""Tool calls: how families of models write them, constrained and parsed as they are generated."""
