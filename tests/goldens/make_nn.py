"""Makes nn.npz: what PyTorch's functions and layers give, for tests/nn. Needs torch.

python tests/goldens/make_nn.py
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "nn"))
from nn_cases import FUNCTIONS, LAYERS


class Attention(nn.Module):
    """Self-attention without the weights as a result, under PyTorch's names."""

    def __init__(self, layer: nn.MultiheadAttention) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x, x, x, need_weights=False)[0]

    def state_dict(self) -> Any:
        return self.layer.state_dict()


class Decoder(nn.Module):
    """A decoder layer with the causal mask that ours has by itself."""

    def __init__(self, layer: nn.TransformerDecoderLayer) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.layer(x, memory, tgt_mask=mask)

    def state_dict(self) -> Any:
        return self.layer.state_dict()


def _flat(result: Any) -> list[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        return [result]
    return [x for part in result for x in _flat(part)]


def _shaken(layer: nn.Module) -> None:
    """Parameters and running statistics without the zeros and ones they start as."""
    for name, x in layer.state_dict().items():
        if x.dtype.is_floating_point:
            x.copy_(torch.rand_like(x) + 0.5 if "var" in name else torch.randn_like(x) * 0.3)


def main() -> None:
    made: dict[str, np.ndarray] = {}
    torch.manual_seed(0)
    names = {"torch": torch, "F": F, "nn": nn, "Attention": Attention, "Decoder": Decoder}
    with torch.no_grad():
        for case in FUNCTIONS:
            inputs = {k: torch.from_numpy(np.array(v)) for k, v in case.arrays().items()}
            result = eval(case.torch or case.expression, {**names, **inputs})
            made[f"{case.name}/y"] = result.numpy()
        for case in LAYERS:
            layer = eval(case.torch or case.expression, names)
            _shaken(layer)
            for k, v in layer.state_dict().items():
                made[f"layer {case.name}/state/{k}"] = v.numpy().copy()
            inputs = [torch.from_numpy(np.array(v)) for v in case.arrays().values()]
            layer.eval()
            for i, y in enumerate(_flat(layer(*inputs))):
                made[f"layer {case.name}/y{i}"] = y.numpy()
            if "BatchNorm" in case.expression:
                layer.train()
                made[f"layer {case.name}/trained"] = layer(*inputs).numpy()
                for k, v in layer.state_dict().items():
                    made[f"layer {case.name}/after/{k}"] = v.numpy().copy()
    np.savez_compressed(Path(__file__).with_name("nn.npz"), **made)


if __name__ == "__main__":
    main()
