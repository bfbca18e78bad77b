"""LoRA on a language model with transformers and PEFT: eager, or with the model compiled."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import train_models as models
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM

VERSION = torch.__version__


class Trainer:
    def __init__(self, model: str, sizes: models.Lora, weights: models.Weights, library: str,
                 threads: int) -> None:  # fmt: skip
        torch.set_num_threads(threads)
        dtype = torch.float64 if library == "torch.f64" else torch.float32
        base = AutoModelForCausalLM.from_pretrained(sizes.folder, dtype=dtype)
        base.config.use_cache = False
        config = LoraConfig(r=sizes.rank, lora_alpha=sizes.alpha, target_modules="all-linear",
                            lora_dropout=0.0, task_type="CAUSAL_LM")  # fmt: skip
        net = get_peft_model(base, config, autocast_adapter_dtype=False).to(dtype)
        net.train()
        found = dict(net.named_parameters())
        with torch.no_grad():
            for name, a in weights.items():
                found[f"base_model.model.{name}.lora_A.default.weight"].copy_(torch.from_numpy(a))
        self.params = [p for p in net.parameters() if p.requires_grad]
        assert len(self.params) == 2 * len(weights)
        self.optimizer = torch.optim.AdamW(
            self.params, models.LORA_RATE, models.BETAS, weight_decay=models.DECAY, fused=True
        )

        def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            logits = net(input_ids=x).logits
            return F.cross_entropy(logits.view(-1, logits.shape[-1]), y.reshape(-1))

        self.loss: Any = torch.compile(loss) if library == "torch.compile" else loss

    def step(self, x: Any, y: Any) -> float:
        loss = self.loss(torch.from_numpy(x), torch.from_numpy(y))
        loss.backward()
        nn.utils.clip_grad_norm_(self.params, models.CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(loss)
