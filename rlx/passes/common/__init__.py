"""Logical kernels: every op that is not primitive, as a body of primitive ops.

Primitive ops have no body; a backend runs them itself:

- arithmetic, comparison, bits, `where`, `cast` and the functions the other ones are made of (exp,
  log, sqrt, sin, cos, tanh, erf, …)
- sum, max, min, prod, any, all, argmax, argmin, `top_k` and `sample`
- views, concat, gather, take_along, scatter, iota, dim_value, contiguous
- matmul, `solve`, real, imag, complex
- cond, while_loop, scan, state_update, custom ops
- `quantize_blocks`, for caches in blocks

and of `dequant_moe_weights` the schemes whose scales lie inside the blocks (GGUF).
"""

from __future__ import annotations

import pkgutil
from importlib import import_module

from rlx.passes.common.registry import COMMON

for _module in pkgutil.iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")

__all__ = ["COMMON"]
