"""The models of `bench train` in torch: eager, or with their loss compiled."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import train_models as models
from torch import nn

VERSION = torch.__version__


class Block(nn.Module):
    def __init__(self, sizes: models.Gpt) -> None:
        super().__init__()
        w = sizes.width
        self.heads = sizes.heads
        self.norm1, self.norm2 = nn.LayerNorm(w), nn.LayerNorm(w)
        self.qkv, self.out = nn.Linear(w, 3 * w), nn.Linear(w, w)
        self.up, self.down = nn.Linear(w, 4 * w), nn.Linear(4 * w, w)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        rows = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1)
        q, k, v = rows.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    def __init__(self, sizes: models.Gpt) -> None:
        super().__init__()
        self.tokens = nn.Embedding(sizes.vocab, sizes.width)
        self.positions = nn.Embedding(sizes.context, sizes.width)
        self.blocks = nn.ModuleList([Block(sizes) for _ in range(sizes.layers)])
        self.norm = nn.LayerNorm(sizes.width)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.reshape(-1))


class Cnn(nn.Module):
    def __init__(self, sizes: models.Cnn) -> None:
        super().__init__()
        pairs = list(zip(sizes.channels, sizes.channels[1:], strict=False))
        self.convs = nn.ModuleList([nn.Conv2d(a, b, 3, padding=1) for a, b in pairs])
        self.norms = nn.ModuleList([nn.BatchNorm2d(b, track_running_stats=False) for _, b in pairs])
        last = sizes.channels[-1] * (sizes.size // 4) ** 2
        self.head = nn.Linear(last, sizes.classes)

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        for i, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            x = F.relu(norm(conv(x)))
            if i:
                x = F.max_pool2d(x, 2)
        return F.cross_entropy(self.head(x.flatten(1)), targets)


class Trainer:
    def __init__(self, model: str, sizes: Any, weights: models.Weights, library: str,
                 threads: int) -> None:  # fmt: skip
        torch.set_num_threads(threads)
        self.model = (Gpt if model == "gpt" else Cnn)(sizes)
        self.model.load_state_dict({k: torch.tensor(x) for k, x in weights.items()})
        self.dtype = torch.float64 if library == "torch.f64" else torch.float32
        self.model.to(self.dtype)
        params = list(self.model.parameters())
        groups = [
            {"params": [p for p in params if p.dim() > 1], "weight_decay": models.DECAY},
            {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
        ]
        self.params = params
        self.optimizer = torch.optim.AdamW(groups, models.RATE, models.BETAS, fused=True)
        self.loss: Any = torch.compile(self.model) if library == "torch.compile" else self.model

    def step(self, x: Any, y: Any) -> float:
        given = torch.from_numpy(x)
        given = given.to(self.dtype) if given.is_floating_point() else given
        loss = self.loss(given, torch.from_numpy(y))
        loss.backward()
        nn.utils.clip_grad_norm_(self.params, models.CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(loss)
