"""`rlx quantize`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlx.formats.gguf import GgufFile


def test_a_smaller_model_that_answers(rlx: Any, tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "small.gguf"
    done = rlx("quantize", tiny, out, "--type", "Q8_0", "--threads", 1)
    assert done.exit_code == 0, done.stderr
    assert done.stdout.strip() == str(out)
    assert "Q8_0" in done.stderr
    with GgufFile(out) as file:
        assert file.tensors["blk.0.attn_q.weight"].scheme.name == "Q8_0"  # type: ignore[union-attr]
        # rows of 48 are no whole blocks of 32
        assert file.tensors["blk.0.ffn_down.weight"].scheme.name == "F16"  # type: ignore[union-attr]
    answer = rlx("run", out, "Hi", "--temperature", 0, "--max-tokens", 4, "--json")
    assert answer.exit_code == 0, answer.stderr
    assert json.loads(answer.stdout)["tokens"]


def test_as_json(rlx: Any, tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "small.gguf"
    done = rlx("quantize", tiny, out, "-q", "q4_0", "--json")
    found = json.loads(done.stdout)
    assert found["type"] == "Q4_0" and found["path"] == str(out)
    assert found["bytes"] == out.stat().st_size
    rows = {t["name"]: (t["before"], t["after"]) for t in found["tensors"]}
    assert rows["blk.1.attn_k.weight"] == ("F32", "Q4_0")
    assert rows["output.weight"] == ("F32", "Q8_0")  # Q6_K, but rows of 32
    assert rows["output_norm.weight"] == ("F32", "F32")


@pytest.mark.parametrize(
    "options, code, message",
    [
        (["--type", "Q4_M"], 2, "no such quant preset"),
        (["--type", "Q8_0"], 1, "--force"),
        (["--threads", "0", "--force"], 2, "number of threads"),
    ],
)
def test_refusals(
    rlx: Any, tiny: Path, tmp_path: Path, options: list[str], code: int, message: str
) -> None:
    out = tmp_path / "there.gguf"
    out.write_text("mine")
    done = rlx("quantize", tiny, out, *options)
    assert done.exit_code == code
    assert message in done.stderr
    assert out.read_text() == "mine"


def test_twice(rlx: Any, tiny: Path, tmp_path: Path) -> None:
    once, twice = tmp_path / "once.gguf", tmp_path / "twice.gguf"
    assert rlx("quantize", tiny, once, "-q", "Q8_0").exit_code == 0
    refused = rlx("quantize", once, twice, "-q", "Q4_0")
    assert refused.exit_code == 1 and "--requantize" in refused.stderr
    done = rlx("quantize", once, twice, "-q", "Q4_0", "--requantize")
    assert done.exit_code == 0 and "warning" in done.stderr
