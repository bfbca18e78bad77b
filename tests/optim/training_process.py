"""A small training run that can be killed at any time.

python training_process.py FOLDER STEPS EVERY

Goes on from the newest checkpoint in FOLDER and prints a digest of all that it ends with.
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


@rlx.jit(donate=["params", "state"])
def step(params: Any, state: Any, batch: Any, key: Any, number: Any) -> Any:
    """A step of a linear network whose inputs are dropped at random."""
    x = nn.functional.dropout(batch["x"], 0.1, key=random.fold_in(key, number))
    error = x @ params["w"] + params["b"] - batch["y"]
    grads = {"w": x.mT @ error / x.shape[0], "b": rnp.mean(error, axis=0)}
    grads, _ = optim.clip_by_global_norm(grads, 1.0)
    return OPTIMIZER.update(grads, state, params)


def main(folder: str, steps: int, every: int) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((300, 12)).astype(np.float32)
    y = (x @ rng.standard_normal((12, 3))).astype(np.float32)
    batches = data.Loader({"x": x, "y": y}, 16, seed=5)
    params = {"w": random.normal(random.key(1), (12, 3)), "b": rnp.zeros((3,))}
    now: dict[str, Any] = {
        "params": params, "optimizer": OPTIMIZER.init(params), "key": random.key(2),
        "data": batches.state_dict(), "step": 0,
    }  # fmt: skip
    checkpoints = rlx.CheckpointManager(folder, keep=2)
    now = checkpoints.restore(now)
    batches.load_state_dict(now["data"])
    stream = batches.repeat()
    print("start", now["step"], flush=True)
    while now["step"] < steps:
        number = rnp.asarray(now["step"])
        given = now["params"], now["optimizer"], next(stream), now["key"], number
        now["params"], now["optimizer"] = step(*given)
        now["step"] += 1
        now["data"] = batches.state_dict()
        if now["step"] % every == 0:
            checkpoints.save(now["step"], now)
    stream.close()
    digest = hashlib.sha256(repr((now["step"], now["data"])).encode())
    for leaf in rlx.numpy.tree.flatten((now["params"], now["optimizer"]))[0]:
        digest.update(np.asarray(leaf).tobytes())
    print("end", digest.hexdigest(), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
