"""`rlx profile` and `rlx tune`: tables, JSON and traces of language models and encoders."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from cli_support import FFN, HIDDEN, KV_HEADS, LAYERS, VOCAB

import rlx as api
from rlx.models.benchmark import LanguageRuns

HEAD = 8


def test_a_table_for_each_part(rlx: Any, tiny: Path) -> None:
    shown = rlx("profile", tiny, "-p", "16", "-n", "3", "-r", "2").stdout
    prefill, decode = shown.split("\n\n")
    assert prefill.startswith("prefill: 16 tokens in ")
    assert decode.startswith("decode: a token in ")
    for part in (prefill, decode):
        assert re.search(r"^kernel +calls +time +share +MB +GB/s +GFLOP/s +block$", part, re.M)
        shares = [float(n) for n in re.findall(r"([\d.]+)%", part)]
        assert sum(shares) == pytest.approx(100, abs=0.05 * len(shares))  # each is rounded
        assert "blk.*.attention" in part
        assert "at barriers" in part


def test_flops_of_a_token(rlx: Any, tiny: Path) -> None:
    """Products of all matrices, two operations for each of their numbers."""
    found = json.loads(rlx("profile", tiny, "-p", "4", "-n", "1", "--json").stdout)
    products = sum(k["flops"] for k in found["decode"]["kernels"] if "gemm" in k["kernel"])
    layer = 2 * HIDDEN * HIDDEN + 2 * HIDDEN * KV_HEADS * HEAD + 3 * HIDDEN * FFN
    exact = 2 * (LAYERS * layer + HIDDEN * VOCAB)
    assert exact <= products <= 1.05 * exact  # what is fused to a product counts with it
    assert found["decode"]["tokens"] == 1
    kernels = found["decode"]["kernels"]
    assert [k["seconds"] for k in kernels] == sorted((k["seconds"] for k in kernels), reverse=True)
    blocks = {block for k in kernels for block in k["blocks"]}
    assert "blk.*.attention" in blocks


def test_a_trace(rlx: Any, tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    done = rlx("profile", tiny, "-p", "8", "-n", "3", "-r", "2", "--trace", file)
    assert f"wrote {file}" in done.stderr
    events = json.loads(file.read_text())["traceEvents"]
    runs = [e["name"] for e in events if e.get("cat") == "run"]
    assert runs == ["prefill"] * 2 + ["decode"] * 3
    rows = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {"runs", "worker 0"} <= rows


def test_encoders(rlx: Any, encoder: Path) -> None:
    command = ("profile", encoder, "--batch", "3", "-p", "10", "-r", "2")
    for device in ("cpu", "reference"):
        found = json.loads(rlx(*command, "--json", "--device", device).stdout)
        assert set(found) == {"model", "encode"}
        assert found["encode"]["tokens"] == 30
        assert found["encode"]["seconds"] > 0
    assert rlx(*command).stdout.startswith("encode: 30 tokens in ")
    usual = json.loads(rlx("profile", encoder, "--batch", "1", "-r", "1", "--json").stdout)
    assert usual["encode"]["tokens"] == 40  # as many as it reads: less than the usual 128
    long = rlx("profile", encoder, "-p", "100000")
    assert (long.exit_code, "longer than the model reads" in long.stderr) == (1, True)
    many = rlx("profile", encoder, "-p", "8", "-b", "100000")
    assert (many.exit_code, "more texts than run at once" in many.stderr) == (1, True)


def test_in_python(tiny: Path) -> None:
    with api.load(tiny) as model:
        found = api.profile_model(model, prompt=8, new=4, repeat=3)
        assert {s.run for s in found["prefill"].slices} == {0, 1, 2}
        assert {s.run for s in found["decode"].slices} == {0, 1, 2, 3}
        with pytest.raises(api.InputError, match="longer than the context"):
            api.profile_model(model, prompt=100_000)
        with pytest.raises(api.InputError, match="2 or more"):
            LanguageRuns(model).record(1, 1, 1)


@pytest.mark.slow
def test_tune(rlx: Any, tiny: Path, encoder: Path, own_cache: Path) -> None:
    """Noise may or may not choose something for a model as small as this; answers stay."""
    before = rlx("run", "-m", tiny, "-n", "8", "--temperature", "0", "hello").stdout
    shown = rlx("tune", tiny, "-p", "8").stdout
    prefill, decode = shown.split("\n\n")
    for part, text in (("prefill", prefill), ("decode", decode)):
        assert re.match(rf"{part}: [\d.]+ ms with defaults, [\d.]+ ms tuned \([\d.]+ ×\)\n", text)
        assert re.search(r"^kernel +share +tunable +default +best +speedup$", text, re.M)
    assert "read_ahead" in decode
    assert rlx("run", "-m", tiny, "-n", "8", "--temperature", "0", "hello").stdout == before
    found = json.loads(rlx("tune", encoder, "-p", "8", "-b", "2", "--json").stdout)
    assert found["encode"]["seconds_before"] > 0
    assert [*own_cache.glob("tuning/*.json")]
    assert "defaults again" in rlx("tune", "--reset").stderr
    assert not [*own_cache.glob("tuning/*.json")]
    refused = rlx("tune", tiny, "--device", "reference")
    assert (refused.exit_code, "nothing to tune on this device" in refused.stderr) == (1, True)
