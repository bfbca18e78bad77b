"""The `onnx` package's backend interface: `prepare`, `run_model`, `run_node`.

from rlx.onnx import backend

prepared = backend.prepare(onnx.load("model.onnx"))
outputs = prepared.run([x])
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlx.errors import InputError
from rlx.formats.onnx import protobuf
from rlx.onnx.onnx_model import OnnxModel

_DEVICES = {"CPU": "cpu", "CUDA": "cuda", "REFERENCE": "reference"}


class PreparedModel:
    """A model that is ready to run on lists of inputs, in order or by name."""

    def __init__(self, model: OnnxModel) -> None:
        self.model = model

    def run(self, inputs: Any, **named: Any) -> tuple[Any, ...]:
        """The outputs in order. Inputs left out, and those that are None, are optional ones."""
        if not isinstance(inputs, Mapping):
            inputs = self._by_name(inputs if isinstance(inputs, (list, tuple)) else [inputs])
        return self.model.run({**inputs, **named})

    def _by_name(self, inputs: Sequence[Any]) -> dict[str, Any]:
        names = [a.name for a in self.model.inputs]
        if len(inputs) > len(names):
            raise InputError("too many inputs", got=len(inputs), expected=len(names))
        return dict(zip(names, inputs, strict=False))


class Backend:
    """RLX as a backend of the `onnx` package; its conformance tests run on this class."""

    @classmethod
    def is_compatible(cls, model: Any, device: str = "CPU", **options: Any) -> bool:
        """Whether every operator of the model is supported."""
        return cls.supports_device(device)

    @classmethod
    def prepare(cls, model: Any, device: str = "CPU", **options: Any) -> PreparedModel:
        """A model, ready to run. Nothing is compiled before its first run."""
        made = OnnxModel(model.SerializeToString(), device=_device(device), **options)
        return PreparedModel(made)

    @classmethod
    def run_model(cls, model: Any, inputs: Any, device: str = "CPU", **options: Any) -> Any:
        return cls.prepare(model, device, **options).run(inputs)

    @classmethod
    def run_node(
        cls, node: Any, inputs: Sequence[Any], device: str = "CPU", outputs_info: Any = None,
        **options: Any,
    ) -> Any:  # fmt: skip
        """The results of one operator on these inputs."""
        onnx = protobuf()
        helper, types = onnx.helper, onnx.helper.np_dtype_to_tensor_dtype
        names = [name for name in node.input if name]
        given = [
            helper.make_tensor_value_info(name, types(x.dtype), list(x.shape))
            for name, x in zip(names, inputs, strict=True)
        ]
        made = [onnx.ValueInfoProto(name=name) for name in node.output if name]
        model = helper.make_model(helper.make_graph([node], "node", given, made))
        return cls.run_model(model, list(inputs), device, **options)

    @classmethod
    def supports_device(cls, device: str) -> bool:
        return device.partition(":")[0] in _DEVICES


def _device(name: str) -> str:
    kind = name.partition(":")[0]
    if kind not in _DEVICES:
        raise InputError("unknown device", got=name, expected=", ".join(_DEVICES))
    return _DEVICES[kind]


is_compatible, prepare = Backend.is_compatible, Backend.prepare
run_model, run_node = Backend.run_model, Backend.run_node
supports_device = Backend.supports_device
