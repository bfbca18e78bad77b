"""NumPy codecs of packed weights, one file per family of block layouts.

Importing a family registers its layouts in the tables of `blocks`.
"""

from __future__ import annotations

from rlx.ir.quant import blocks, codebooks, iq, iq1_search, iq_search, kquants, plain

__all__ = ["blocks", "codebooks", "iq", "iq1_search", "iq_search", "kquants", "plain"]
