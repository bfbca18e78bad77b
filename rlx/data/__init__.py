"""Batches for training: shuffled, sharded, resumable, prefetched in threads.

batches = rlx.data.Loader({"x": images, "y": labels}, 64, seed=0)
for batch in batches:  # an epoch; the next `for` is the next one, in another order
    ...
state = batches.state_dict()  # after any batch: where to go on
"""

from __future__ import annotations

from rlx.data.json_lines import JsonLines
from rlx.data.loader import Loader, epoch_order
from rlx.data.sequences import Packed, pack, pack_rows, pad
from rlx.data.sources import Arrays, Mapped, Source, TokenWindows, read_tokens, stack

__all__ = [
    "Arrays",
    "JsonLines",
    "Loader",
    "Mapped",
    "Packed",
    "Source",
    "TokenWindows",
    "epoch_order",
    "pack",
    "pack_rows",
    "pad",
    "read_tokens",
    "stack",
]
