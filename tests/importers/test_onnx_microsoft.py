"""Microsoft's operators against ONNX Runtime's results (`tests/goldens/make_onnx.py`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from microsoft_cases import Case, cases

from rlx.onnx import backend

GOLDENS = np.load(Path(__file__).resolve().parents[1] / "goldens" / "onnx.npz")


@pytest.mark.parametrize("case", cases(), ids=lambda c: c.name)
def test_results_are_those_of_onnx_runtime(case: Case) -> None:
    names = [n for n in GOLDENS.files if n.split(".")[0] == case.name]
    found = backend.prepare(case.model()).model.run(case.given())
    assert len(names) == len(found)
    for name, a in zip(names, found, strict=True):
        b = GOLDENS[name]
        assert a.dtype == b.dtype and a.shape == b.shape
        if b.dtype.kind in "iu":
            assert np.array_equal(a, b)
        else:  # sums of at most 64 terms in another order
            scale = np.abs(b).max()
            np.testing.assert_allclose(a, b, rtol=0, atol=max(scale, 1.0) * 2e-6)


@pytest.mark.parametrize("bits", [4, 8])
def test_packed_weights_are_multiplied_as_they_lie(bits: int) -> None:
    """Unless floats are asked for: then activations have 8 bits, each block with its scale."""
    rng = np.random.default_rng(bits)
    n, k, block = 24, 96, 32
    codes = rng.integers(0, 2**bits, (n, k))
    packed = codes if bits == 8 else codes[:, 0::2] | codes[:, 1::2] << 4
    given: dict[str, Any] = {
        "x": rng.standard_normal((5, k)).astype(np.float32),
        "w": packed.astype(np.uint8).reshape(n, k // block, -1),
        "s": rng.uniform(0.01, 0.1, n * k // block).astype(np.float32),
    }
    attributes = {"N": n, "K": k, "bits": bits, "block_size": block}
    case = Case("nbits", "MatMulNBits", given, attributes, constants=("w", "s"))
    prepared = backend.prepare(case.model())
    (found,) = prepared.run([given["x"]])
    scale = np.repeat(given["s"].reshape(n, -1), block, axis=1).astype(np.float64)
    weights = (codes - 2 ** (bits - 1)) * scale
    exact = given["x"].astype(np.float64) @ weights.T
    # an activation is off by up to 1/254 of the largest of its block
    largest = np.abs(given["x"]).reshape(5, -1, block).max(-1)
    bound = np.repeat(largest, block, axis=1) / 254 @ np.abs(weights).T
    assert (np.abs(found - exact) <= bound * 1.001).all()
    (segment,) = prepared.model.program.segments.values()
    ops = [n.op.name for trace in segment.traces for n in trace.graph.nodes]
    assert "dequant_matmul" in ops


def test_a_buffer_of_keys_is_written_in_place_of_growing() -> None:
    """`GroupQueryAttention` with a past that has room: results are those of a past that grows."""
    rng = np.random.default_rng(3)
    heads, groups, width, past, room = 4, 2, 16, 5, 12

    def case(keys: Any, values: Any) -> Case:
        f = lambda *shape: np.random.default_rng(9).standard_normal(shape).astype(np.float32)  # noqa: E731
        given = {
            "q": f(1, 1, heads * width), "k": f(1, 1, groups * width), "v": f(1, 1, groups * width),
            "pk": keys, "pv": values, "last": np.array([past], np.int32),
            "total": np.asarray(past + 1, np.int32),
        }  # fmt: skip
        attributes = {"num_heads": heads, "kv_num_heads": groups}
        return Case("gqa", "GroupQueryAttention", given, attributes, outputs=3)

    keys, values = rng.standard_normal((2, 1, groups, past, width)).astype(np.float32)
    grown = case(keys, values)
    wide = np.zeros((2, 1, groups, room, width), np.float32)
    wide[:, :, :, :past] = [keys, values]
    kept = case(wide[0], wide[1])
    first = backend.prepare(grown.model()).model.run(grown.given())
    other = backend.prepare(kept.model()).model.run(kept.given())
    np.testing.assert_allclose(first[0], other[0], atol=1e-6)
    for a, b in zip(first[1:], other[1:], strict=True):
        assert b.shape[2] == room and np.array_equal(a, b[:, :, : past + 1])
