"""Batching of MIR graphs (vmap): a graph that computes one example becomes one for a whole batch.

    outputs, mapped = batch(g, graph, operands, axes, size)

`vectorize.py` walks the graph; what an op becomes is a rule of this folder. An op without a rule is
batched through its decomposition; one without either runs in a scan over the batch.
"""

from rlx.passes.batching.vectorize import batch

__all__ = ["batch"]
