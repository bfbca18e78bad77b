"""The page that `python -m bench all` writes."""

from __future__ import annotations

from bench import results

BAR: dict[str, object] = {
    "name": "gemm_1t",
    "value": 3.0,
    "unit": "GFLOP/s",
    "peer": "OpenBLAS",
    "peer_value": 2.0,
    "ratio": 1.5,
    "goal": 1,
    "met": True,
}


def test_a_section_for_each_bench_that_measured() -> None:
    page = results._page({"gemm": [BAR, {**BAR, "name": "gemm_2t", "met": False}], "llm": []})
    section = page.split("## `python -m bench gemm`\n")[1]
    assert "| gemm_1t | 3 | GFLOP/s | OpenBLAS | 2 | 1.50 | 1 | met |" in section
    assert "| gemm_2t | 3 | GFLOP/s | OpenBLAS | 2 | 1.50 | 1 | missed |" in section
    assert "bench llm" not in page and page.endswith("Not measured in this run: llm.\n")
