"""Regions: any group of elementwise, broadcast, reduction, layout and gather ops as loops.

A graph is traced into element instructions (`trace`), cut into kernels (`kernels`), its loops are
settled (`settle`) and emitted, with vectors along the rows (`rows`) or across them (`columns`).
"""
