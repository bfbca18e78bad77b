"""Tensors of PyTorch as NumPy arrays and back, without a copy."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from rlx.ir.op import Array
from rlx.numpy import dlpack
from rlx.pytorch.element_types import NAMES, element_of


def as_array(tensor: Any) -> Array:
    """The memory of a tensor in the host's memory as an array, also of bfloat16."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    if plain.dtype is torch.bfloat16:
        return plain.view(torch.int16).numpy().view(element_of(torch.bfloat16).numpy)
    if plain.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        return dlpack.take(plain, None)
    found: Array = plain.numpy()
    return found


def as_tensor(array: Array) -> Any:
    """An array as a tensor on the same memory."""
    if array.dtype == element_of(torch.bfloat16).numpy:
        return torch.from_numpy(np.asarray(array).view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(np.asarray(array))


def torch_type(element: Any) -> Any:
    """The `torch.dtype` of an element type."""
    return getattr(torch, NAMES[element].removeprefix("torch."))
