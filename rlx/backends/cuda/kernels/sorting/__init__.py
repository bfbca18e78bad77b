"""Orders of rows: the best few of a row, all of it, and places in sorted tables."""
