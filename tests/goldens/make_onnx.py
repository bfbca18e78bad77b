"""Writes onnx.npz: what ONNX Runtime computes for the cases of Microsoft's operators, for a
quantised network, and for models that ship in packages.

    python tests/goldens/make_onnx.py

Runs where onnx and onnxruntime are installed.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnxruntime

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "importers")]
from microsoft_cases import cases  # noqa: E402
from packaged_models import STEP, inputs, place  # noqa: E402
from quantised_models import qdq_input, qdq_network  # noqa: E402


def main() -> None:
    found = {}
    for case in cases():
        session = onnxruntime.InferenceSession(case.model().SerializeToString())
        names = [o.name for o in session.get_outputs()]
        for name, made in zip(names, session.run(names, case.given()), strict=True):
            found[f"{case.name}.{name}"] = made
    session = onnxruntime.InferenceSession(qdq_network().SerializeToString())
    (found["qdq_network.y"],) = session.run(None, {"x": qdq_input()})
    for model, given in inputs().items():
        session = onnxruntime.InferenceSession(str(place(model)))
        for i, made in enumerate(session.run(None, given)):
            found[f"{model}.{i}"] = made.reshape(-1)[::STEP]
    np.savez_compressed(ROOT / "tests" / "goldens" / "onnx.npz", **found)


if __name__ == "__main__":
    main()
