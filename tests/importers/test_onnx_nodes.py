"""ONNX's own conformance tests on the standard backend class.

pytest tests/importers/test_onnx_nodes.py
"""

from __future__ import annotations

import re
from typing import Any

import pytest
from onnx_exclusions import EXCLUDED
from onnx_node_cases import cases, model_of, require_same, sets_of

from rlx.errors import RlxError
from rlx.onnx import backend

SHARDS = 16
# where a slow, plain device is enough to see that operators do not lean on the CPU's kernels
ON_REFERENCE = re.compile(
    "test_(add|conv|gather|gemm|lstm|matmul|maxpool|qlinear|reduce_sum|resize|scatter|softmax|topk)"
)


def run(case: Any, device: str) -> None:
    model = model_of(case)
    prepared = backend.prepare(model, device)
    for given, expected in sets_of(case, model):
        found = prepared.run(list(given))
        assert len(found) == len(expected)
        for a, b in zip(found, expected, strict=True):
            require_same(a, b, case)


def failures(chosen: list[Any], device: str = "CPU") -> dict[str, str]:
    """Names of cases that fail, with what went wrong."""
    found = {}
    for case in chosen:
        try:
            run(case, device)
        except (AssertionError, RlxError, NotImplementedError) as error:
            found[case.name] = f"{type(error).__name__}: {error!s:.300}"
    return found


@pytest.mark.parametrize("shard", range(SHARDS))
def test_nodes(shard: int) -> None:
    """All that are not excluded pass. What is excluded for another reason than chance fails: the
    list is not longer than it must be."""
    chosen = cases()[shard::SHARDS]
    found = failures(chosen)
    assert {n: e for n, e in found.items() if n not in EXCLUDED} == {}
    sure = {c.name for c in chosen} & {n for n, why in EXCLUDED.items() if "random" not in why}
    assert sure <= found.keys()


def test_nodes_on_the_reference() -> None:
    chosen = [c for c in cases() if ON_REFERENCE.match(c.name) and c.name not in EXCLUDED]
    assert len(chosen) > 150
    assert failures(chosen, "REFERENCE") == {}


def test_few_are_excluded() -> None:
    names = {case.name for case in cases()}
    assert len(names) > 1900 and EXCLUDED.keys() <= names
    assert len(EXCLUDED) <= 0.02 * len(names)
