"""The page of ops is the one the table prints, and the table covers the ops."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from cases import covered
from ops_page import page

from rlx.ir.op import REGISTRY

ROOT = Path(__file__).resolve().parents[2]
# tested where their operands are at home: with the passes that make them, or in files of their own
ELSEWHERE = {
    "custom", "state_update", "elementwise_region", "fused_attention_block",
    "fused_transformer_layer", "dequant_grouped_matmul", "dequant_moe_weights", "quantize_weight",
    # how functions are differentiated and batched: gone before a device sees the graph
    "stop_gradient", "checkpoint", "custom_jvp", "custom_vjp", "optimization_barrier",
    "psum", "pmean", "pmax", "pmin", "all_gather", "axis_index",
}  # fmt: skip


def test_docs_ops_is_up_to_date() -> None:
    text = (ROOT / "docs" / "ops.md").read_text(encoding="utf-8")
    assert text == page(), "run python tests/parity/ops_page.py > docs/ops.md"


def test_every_op_of_the_user_has_a_case() -> None:
    internal = {n for n, cls in REGISTRY.items() if cls.is_block or cls.is_source}
    internal |= {n for n, cls in REGISTRY.items() if cls.__module__.startswith("rlx.backends.")}
    tested_here = {"cube", "scaled_linear"}  # ops that other tests register
    missing = set(REGISTRY) - internal - covered() - ELSEWHERE - tested_here
    missing = {n for n in missing if REGISTRY[n].__module__.startswith("rlx.")}
    assert not missing, sorted(missing)
