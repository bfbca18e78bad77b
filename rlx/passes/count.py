"""How many passes ran in this process: a start from an artifact runs none."""

from __future__ import annotations

from rlx.support.records import dataclass


@dataclass
class Counters:
    passes: int = 0  # of the list, see `pipeline`
    plans: int = 0  # bound variants that were given memory


counters = Counters()
