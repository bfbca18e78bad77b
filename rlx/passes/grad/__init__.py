"""Differentiation of MIR graphs: graph in, graph out.

`reverse.linearize` appends a graph to another and returns its pullback (reverse mode);
`forward.push_forward` appends it with tangents (forward mode). `gradient.py` makes whole graphs.
Derivatives of elementwise ops stand in their rows (`rlx/ir/ops`); those of other ops are the rules
of this folder. An op without a rule is differentiated through its decomposition.
"""

from rlx.passes.grad.forward import push_forward
from rlx.passes.grad.gradient import gradient_graph, jvp_graph, vjp_graph
from rlx.passes.grad.reverse import linearize

__all__ = ["gradient_graph", "jvp_graph", "linearize", "push_forward", "vjp_graph"]
