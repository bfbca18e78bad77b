"""LoRA on a language model in RLX."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import train_models as models

import rlx
import rlx.numpy as rnp
from rlx import optim
from rlx.models.adapter_files import hf_names
from rlx.models.finetune.training_model import LoraConfig, TrainingModel
from rlx.models.model_file import ModelFile

VERSION = rlx.__version__


class Trainer:
    def __init__(self, model: str, sizes: models.Lora, weights: models.Weights, library: str,
                 threads: int) -> None:  # fmt: skip
        file = ModelFile.open(Path(sizes.folder))
        lora = LoraConfig(rank=sizes.rank, alpha=sizes.alpha)
        self.model = TrainingModel(file, lora, context=sizes.context)
        self.params: Any = self.model.init(0)
        ours = hf_names(file)
        for name, a in weights.items():
            self.params[ours[f"{name}.weight"]]["a"] = rnp.asarray(a, copy=True)
        optimizer = optim.AdamW(models.LORA_RATE, *models.BETAS, weight_decay=models.DECAY)
        self.state: Any = optimizer.init(self.params)

        def update(params: Any, state: Any, batch: Any) -> Any:
            (loss, _), grads = rlx.value_and_grad(self.model.loss, has_aux=True)(params, batch)
            grads, _ = optim.clip_by_global_norm(grads, models.CLIP)
            return *optimizer.update(grads, state, params), loss

        self.update = rlx.jit(update, donate=["params", "state"])

    def step(self, x: Any, y: Any) -> float:
        batch = {"tokens": x.astype(np.int32), "labels": y.astype(np.int32)}
        self.params, self.state, loss = self.update(self.params, self.state, batch)
        return float(loss)
