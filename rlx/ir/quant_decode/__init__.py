"""NumPy references for packed weights, one file per family of layouts; see `rlx.ir.quant`."""
