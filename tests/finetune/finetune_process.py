"""A fine-tuning run that can be killed at any time: python finetune_process.py MODEL OUT STEPS

Prints "start" when training begins and a digest of the result in the end.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

from finetune_models import chats

import rlx


def main(model: str, out: str, steps: int) -> None:
    def started(now: rlx.TrainingProgress) -> None:
        print("start", now.step, flush=True)

    found = rlx.finetune(
        model, chats(8), out=out, steps=steps, batch=1, accumulate=2, save_every=1, evaluation=0.3,
        eval_every=7, patience=50, lora={"rank": 2, "dropout": 0.1}, pack=False, progress=started,
    )  # fmt: skip
    digest = hashlib.sha256(found.history.as_text().encode())
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        digest.update((Path(found.path) / name).read_bytes())
    print("end", digest.hexdigest(), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
