"""`rlx.from_torch`, without PyTorch until it is called."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rlx.support.optional import library

if TYPE_CHECKING:
    from rlx.pytorch.exported_module import TorchModel


def from_torch(
    module: Any, *examples: Any, dynamic: Any = True, named: Mapping[str, Any] | None = None,
    device: str = "cpu", threads: int | None = None,
) -> TorchModel:  # fmt: skip
    """A module of PyTorch, compiled for any sizes. `examples` are inputs that it is traced with,
    `named` those given by name. Needs the extra `torch`.

    `dynamic` leaves all sizes open that the module does not fix; False fixes all; else it is what
    `torch.export.export` takes as `dynamic_shapes`.
    """
    library("torch", "from_torch")
    from rlx.pytorch import exported_module

    return exported_module.from_torch(
        module, *examples, dynamic=dynamic, named=named, device=device, threads=threads
    )
