"""ONNX models: operators onto arrays, programs of compiled segments, `OnnxModel`.

model = rlx.load("model.onnx")
model.inputs, model.outputs            # names, element types, shapes with symbolic sizes
(logits,) = model.run(x=images)        # another batch size costs milliseconds
"""

from __future__ import annotations

from rlx.onnx.compiled_file import CompiledOnnxModel, load_compiled
from rlx.onnx.onnx_model import OnnxModel

__all__ = ["CompiledOnnxModel", "OnnxModel", "load_compiled"]
