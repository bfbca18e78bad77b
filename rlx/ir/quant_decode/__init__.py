"""NumPy references for packed weights, one file per family of layouts; see `rlx.ir.quant`.

Importing the families enters their layouts into the tables of `blocks`.
"""

from rlx.ir.quant_decode import iq, kencode, kquants, legacy, microscale, plain, ternary

__all__ = ["iq", "kencode", "kquants", "legacy", "microscale", "plain", "ternary"]
