"""Optimisers, learning-rate schedules, clipping and averages: pure functions on trees of arrays.

optimizer = optim.AdamW(optim.schedules.cosine(3e-4, 10_000), weight_decay=0.1)
state = optimizer.init(params)
params, state = optimizer.update(grads, state, params)
"""

from __future__ import annotations

from rlx.optim import schedules
from rlx.optim.accumulation import accumulate
from rlx.optim.adam import Adam, AdamW
from rlx.optim.averages import EMA
from rlx.optim.clipping import clip_by_global_norm, clip_by_value, global_norm
from rlx.optim.factored import Adafactor
from rlx.optim.momentum import SGD, Lion
from rlx.optim.muon import Muon
from rlx.optim.optimizer import Optimizer, Params, State, matrices_only
from rlx.optim.precision import MasterWeights, cast

__all__ = [
    "EMA",
    "SGD",
    "Adafactor",
    "Adam",
    "AdamW",
    "Lion",
    "MasterWeights",
    "Muon",
    "Optimizer",
    "Params",
    "State",
    "accumulate",
    "cast",
    "clip_by_global_norm",
    "clip_by_value",
    "global_norm",
    "matrices_only",
    "schedules",
]
