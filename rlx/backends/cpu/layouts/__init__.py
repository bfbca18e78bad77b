"""Weight layouts of the CPU kernels, as ops that the backend puts into a graph.

Importing this package registers the ops; `rlx.ir.op.PROVIDERS` names it.
"""

from rlx.backends.cpu.layouts import channels_last, pack, pack_conv, quant_ops

__all__ = ["channels_last", "pack", "pack_conv", "quant_ops"]
