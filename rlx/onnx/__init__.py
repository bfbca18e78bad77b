"""ONNX models: operators onto arrays, programs of compiled segments, `OnnxModel`."""
