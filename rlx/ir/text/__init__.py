"""The text format of graphs: printer, parser, and readable views.

    graph mlp {
      %0 "x": [batch, 64] f32 = input  // mlp.py:12
      %1 "w": [64, 10] f32 = param
      %2: [batch, 10] f32 = matmul(%0, %1)  // block layers.0, mlp.py:14, via fuse
      return %2 as "y"
    }

Tensors come before the semicolon, attributes that differ from their defaults after it. Results may
be left without a shape, ids are labels (`%x` will do), and nodes without a comment have no origin,
so that graphs can be written by hand.
"""

from __future__ import annotations

from rlx.ir.text.parser import parse_graph
from rlx.ir.text.planned import is_lir, parse_lir, print_lir
from rlx.ir.text.printer import inspect_graph, inspect_lir, node_line, print_graph

__all__ = [
    "inspect_graph",
    "inspect_lir",
    "is_lir",
    "node_line",
    "parse_graph",
    "parse_lir",
    "print_graph",
    "print_lir",
]
