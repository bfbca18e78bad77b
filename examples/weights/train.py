"""Makes the weights in this folder, with PyTorch: a CNN for digits, an LSTM, a tiny GPT.

pip install torch scikit-learn safetensors && python examples/weights/train.py

The examples load them by PyTorch's names into the same layers of `rlx.nn`.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional

FOLDER = Path(__file__).parent


def save(model: nn.Module, name: str, note: str) -> None:
    halves = {k: v.half() if v.is_floating_point() else v for k, v in model.state_dict().items()}
    save_file(halves, FOLDER / f"{name}.safetensors", {"note": note})
    count = sum(p.numel() for p in model.parameters())
    print(f"{name}: {count} parameters; {note}")


def fit(model: nn.Module, draw, steps: int, rate: float) -> None:  # type: ignore[no-untyped-def]
    """AdamW on batches that `draw(step)` returns the loss of."""
    optimiser = torch.optim.AdamW(model.parameters(), rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, rate, steps)
    model.train()
    for step in range(steps):
        optimiser.zero_grad()
        draw(step).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
    model.eval()


# -- a CNN for scikit-learn's digits, 8 × 8 pixels ----------------------------------------------


def digits() -> None:
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32)[:, None] / 16
    labels = torch.tensor(data.target)
    train = 1200  # the first 1,200 of 1,797; the rest is for the test
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Dropout(0.2), nn.Linear(256, 10),
    )  # fmt: skip

    def loss(step: int) -> torch.Tensor:
        chosen = torch.randint(train, (128,))
        return functional.cross_entropy(model(images[chosen]), labels[chosen])

    fit(model, loss, 1200, 1e-2)
    right = (model(images[train:]).argmax(1) == labels[train:]).float().mean().item()
    save(model, "digits", f"{right:.4f} of the images from number {train} on are right")


# -- an LSTM that continues sines -----------------------------------------------------


class Forecaster(nn.Module):
    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.lstm = nn.LSTM(1, width, batch_first=True)
        self.head = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0])


def waves(count: int, length: int) -> torch.Tensor:
    """Sines of drawn periods, phases and heights: [count, length, 1]."""
    time = torch.arange(length)[None, :]
    period, phase = 12 + 20 * torch.rand(count, 1), 6.2832 * torch.rand(count, 1)
    height = 0.5 + 0.5 * torch.rand(count, 1)
    return (height * torch.sin(6.2832 * time / period + phase))[..., None]


def forecaster() -> None:
    model = Forecaster()

    def loss(step: int) -> torch.Tensor:
        """The error of the next value; in the end, also of values that the network feeds itself."""
        x = waves(32, 120)
        y, state = model.lstm(x[:, :96])
        error = ((model.head(y)[:, 16:-1] - x[:, 17:96]) ** 2).mean()
        if step < 1500:
            return error
        own = [model.head(y[:, -1:])]
        for _ in range(23):
            y, state = model.lstm(own[-1], state)
            own.append(model.head(y))
        return error + ((torch.cat(own, 1) - x[:, 96:]) ** 2).mean()

    fit(model, loss, 1800, 1e-2)
    with torch.no_grad():
        x = waves(256, 128)
        error = ((model(x[:, :-1]) - x[:, 1:])[:, 64:] ** 2).mean().sqrt().item()
        still = ((x[:, 1:] - x[:, :-1])[:, 64:] ** 2).mean().sqrt().item()
    save(
        model,
        "forecaster",
        f"error of the next value {error:.4f}; of repeating the last {still:.4f}",
    )


# -- a tiny GPT that sorts digits -----------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, w = x.shape
        q, k, v = (
            part.view(b, s, self.heads, -1).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, s, w))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Sorter(nn.Module):
    """Reads digits and a separator (token 10), then says the digits in order."""

    def __init__(self, width: int = 48, heads: int = 4, layers: int = 2, length: int = 32) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(11, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 11, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def examples(count: int, length: int) -> torch.Tensor:
    given = torch.randint(10, (count, length))
    between = torch.full((count, 1), 10)
    return torch.cat([given, between, given.sort(1).values], 1)


def sorter() -> None:
    model = Sorter()

    def loss(step: int) -> torch.Tensor:
        length = int(torch.randint(2, 15, ()))
        ids = examples(64, length)
        logits = model(ids[:, :-1])[:, length:]
        return functional.cross_entropy(logits.flatten(0, 1), ids[:, length + 1 :].flatten())

    fit(model, loss, 2500, 3e-3)
    right = []
    with torch.no_grad():
        for length in range(2, 15):
            ids = examples(200, length)
            said = model(ids[:, :-1])[:, length:].argmax(-1)
            right.append((said == ids[:, length + 1 :]).all(1).float().mean())
    save(model, "sorter", f"{torch.stack(right).mean():.4f} of lists of 2 to 14 digits sorted")


if __name__ == "__main__":
    for make in (digits, forecaster, sorter):
        torch.manual_seed(0)
        make()
