"""A library that trains the models of `bench train`, behind a pipe, in a process of its own.

python train_server.py THREADS LIBRARY [lora], LIBRARY being rlx, torch, torch.compile,
torch.f64 or jax.
Commands: {"do": "start", "model": name, "sizes": what differs from the usual}, the seconds until
the first step was done; {"do": "steps", "count": n}, their seconds and losses;
{"do": "memory"}, the bytes at most resident.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import sys
import time
from typing import Any

THREADS, LIBRARY = int(sys.argv[1]), sys.argv[2]
os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = str(THREADS)
os.environ["RLX_NUM_THREADS"] = str(THREADS)
if LIBRARY == "jax":
    os.environ["XLA_FLAGS"] = " ".join(
        [
            os.environ.get("XLA_FLAGS", ""),  # may hold it to AVX2
            f"--xla_cpu_multi_thread_eigen=true intra_op_parallelism_threads={THREADS}",
        ]
    )

import train_models as models  # noqa: E402

PREFIX = "train_lora_" if "lora" in sys.argv[3:] else "train_"
library = importlib.import_module(PREFIX + LIBRARY.partition(".")[0])


class Server:
    def start(self, model: str, sizes: dict[str, Any]) -> dict[str, Any]:
        """Make the model and its first step, without anything compiled before."""
        self.model, self.sizes = model, models.LARGE[model]._replace(**sizes)
        self.number = 0
        weights, first = models.weights(model, self.sizes), models.batch(model, self.sizes, 0)
        begin = time.perf_counter()
        self.trainer = library.Trainer(model, self.sizes, weights, LIBRARY, THREADS)
        loss = self.trainer.step(*first)
        self.number += 1
        return {"seconds": time.perf_counter() - begin, "losses": [loss]}

    def steps(self, count: int) -> dict[str, Any]:
        """So many steps: the seconds of each, until its loss is there, and the losses."""
        seconds, losses = [], []
        for _ in range(count):
            given = models.batch(self.model, self.sizes, self.number)
            begin = time.perf_counter()
            losses.append(self.trainer.step(*given))
            seconds.append(time.perf_counter() - begin)
            self.number += 1
        return {"seconds": seconds, "losses": losses}

    def memory(self) -> dict[str, Any]:
        scale = 1 if sys.platform == "darwin" else 1024
        return {"bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale}


def main() -> None:
    print(json.dumps({"ready": True, "version": library.VERSION}), flush=True)
    server = Server()
    for line in sys.stdin:
        command = json.loads(line)
        print(json.dumps(getattr(server, command.pop("do"))(**command)), flush=True)


if __name__ == "__main__":
    main()
