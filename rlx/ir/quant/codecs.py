"""NumPy codecs of packed weights, one file per family of block layouts.

Importing a family registers its layouts in the tables of `blocks`.
"""

from __future__ import annotations

from rlx.ir.quant import blocks, iq, kquants, plain

__all__ = ["blocks", "iq", "kquants", "plain"]
