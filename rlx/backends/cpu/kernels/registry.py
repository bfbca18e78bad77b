"""The kernel families: importing them fills the table of lowerings."""

from __future__ import annotations

from collections.abc import Callable

from rlx.backends.cpu.kernels.attention import (
    lower_attention,  # noqa: F401
    paged_attention,  # noqa: F401
)
from rlx.backends.cpu.kernels.control import lower_control  # noqa: F401
from rlx.backends.cpu.kernels.conv import (
    lower_conv,
    lower_pooling,  # noqa: F401
)
from rlx.backends.cpu.kernels.gemm import (
    lower_gemm,  # noqa: F401
    pack_weights,
)
from rlx.backends.cpu.kernels.linalg import lower_linalg  # noqa: F401
from rlx.backends.cpu.kernels.loops import (
    lower_copies,  # noqa: F401
    lower_indexing,  # noqa: F401
    lower_region,  # noqa: F401
)
from rlx.backends.cpu.kernels.qgemm import (
    lower_qgemm,  # noqa: F401
    pack_quantised,
)
from rlx.backends.cpu.kernels.recurrent import lower_recurrent  # noqa: F401
from rlx.backends.cpu.kernels.rotary import lower_rotary  # noqa: F401
from rlx.backends.cpu.kernels.sampling import lower_sampling  # noqa: F401
from rlx.ir.graph import Graph
from rlx.llvm.target import Target

# Rewrites of a template for this device, in order: packed weights and the like.
REWRITES: list[Callable[[Graph, Target], Graph]] = [
    lower_conv.pack_conv,
    pack_weights.pack_weights,
    pack_quantised.pack_quantised,
]
