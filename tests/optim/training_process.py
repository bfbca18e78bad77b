"""A small training run that can be killed at any time.

python training_process.py FOLDER STEPS EVERY

Goes on from the newest checkpoint in FOLDER and prints a digest of all that it ends with: weights,
running statistics, average, state of the optimiser, random key, place in the data.
"""

from __future__ import annotations

import hashlib
import sys
from typing import Any

import numpy as np

import rlx
import rlx.numpy as rnp
from rlx import data, nn, optim, random

OPTIMIZER = optim.AdamW(optim.schedules.warmup(optim.schedules.cosine(1e-2, 400), 20))
AVERAGE = optim.EMA(0.99)


def loss(model: Any, batch: Any, key: Any) -> Any:
    return rnp.mean(rnp.square(model(batch["x"], key=key) - batch["y"])), model


@rlx.jit(donate=["model", "state", "average"])
def step(model: Any, state: Any, average: Any, batch: Any, key: Any) -> Any:
    """A step of a network with dropout and running statistics; the key is split."""
    key, own = random.split(key)
    (_, model), grads = rlx.value_and_grad(loss, has_aux=True)(model, batch, own)
    grads, _ = optim.clip_by_global_norm(grads, 1.0)
    model, state = OPTIMIZER.update(grads, state, model)
    return model, state, AVERAGE.update(average, model), key


def main(folder: str, steps: int, every: int) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((300, 12)).astype(np.float32)
    y = np.sin(x @ rng.standard_normal((12, 3))).astype(np.float32)
    batches = data.Loader({"x": x, "y": y}, 16, seed=5)
    a, b, key = random.split(random.key(1), 3)
    model = nn.Sequential(
        nn.Linear(12, 40, key=a), nn.BatchNorm1d(40), nn.ReLU(), nn.Dropout(0.1),
        nn.Linear(40, 3, key=b),
    )  # fmt: skip
    now: dict[str, Any] = {
        "model": model, "state": OPTIMIZER.init(model), "average": AVERAGE.init(model), "key": key,
        "data": batches.state_dict(), "step": 0,
    }  # fmt: skip
    checkpoints = rlx.CheckpointManager(folder, keep=2)
    now = checkpoints.restore(now)
    batches.load_state_dict(now["data"])
    stream = batches.repeat()
    print("start", now["step"], flush=True)
    while now["step"] < steps:
        changed = step(now["model"], now["state"], now["average"], next(stream), now["key"])
        now |= dict(zip(("model", "state", "average", "key"), changed, strict=True))
        now |= {"step": now["step"] + 1, "data": batches.state_dict()}
        if now["step"] % every == 0:
            checkpoints.save(now["step"], now)
    stream.close()
    digest = hashlib.sha256(repr((now["step"], now["data"])).encode())
    for leaf in rlx.numpy.tree.flatten([now[k] for k in ("model", "state", "average", "key")])[0]:
        digest.update(np.asarray(leaf).tobytes())
    print("end", digest.hexdigest(), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
