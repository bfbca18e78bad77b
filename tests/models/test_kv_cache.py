"""A KV cache in blocks of Q8_0: how far attention may be from exact, and that a model uses it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "goldens"))
from tiny import PROMPT, write_folder

import rlx
from rlx import CompileOptions, DimBinding, Graph, Session
from rlx.models.builder import LOGITS, build_graph
from rlx.models.config import KVCacheType
from rlx.models.decoder_runner import DecoderRunner
from rlx.models.model_file import ModelFile

DEVICES = ["reference", "cpu"]
# A code is off by half a step of max/127, and a scale in f16 by 2^-11 of itself.
ERROR = 1 / 254 + 2.0**-11


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows", [1, 40])
def test_attention_with_a_quantised_kv_cache_keeps_its_bound(device: str, rows: int) -> None:
    """Every key is off by at most ERROR of its largest element, so a score by at most
    s = scale · |q|₁ · ERROR · max|k|, and a weight by a factor between exp(-2s) and exp(2s). The
    result, a mean of values, is then off by (exp(2s) - 1) · max|v| + ERROR · max|v|, and by f32
    rounding, which is far less than the slack in the bound: the bound is never reached."""
    rng, dim, keys = np.random.default_rng(rows), 64, 100
    q = rng.standard_normal((1, 2, rows, dim)).astype(np.float32) / 4
    k, v = rng.standard_normal((2, 1, 2, keys, dim)).astype(np.float32)
    g = Graph("packed")
    inputs = [g.input(n, list(a.shape)) for n, a in (("q", q), ("k", k), ("v", v))]
    packed = [g.quantize_blocks(x) for x in inputs[1:]]
    options = {"num_heads": 2, "num_kv_heads": 2, "head_dim": dim, "q_layout": "bhsd"}
    options |= {"kv_layout": "bhsd", "mask_kind": "causal"}
    g.set_outputs(g.attention(inputs[0], *packed, **options, kv_scheme="Q8_0"))
    (found,) = Session(device).compile(g).run(q=q, k=k, v=v)
    plain = Graph("plain")
    inputs = [plain.input(n, list(a.shape)) for n, a in (("q", q), ("k", k), ("v", v))]
    plain.set_outputs(plain.attention(*inputs, **options))
    (exact,) = Session("reference").compile(plain).run(q=q, k=k, v=v)
    s = np.abs(q).sum(-1, keepdims=True) / np.sqrt(dim) * ERROR * np.abs(k).max()
    bound = (np.expm1(2 * s) + ERROR) * np.abs(v).max()
    off = np.abs(found - exact)
    assert (off <= bound).all()
    assert off.max() > 1e-4  # it is packed at all


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny llama with half as many heads of twice the size: the same weights fit."""
    path = tmp_path_factory.mktemp("heads32")
    write_folder("llama", path)
    wider = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    config = json.loads((path / "config.json").read_text()) | wider
    (path / "config.json").write_text(json.dumps(config))
    return path


def logits(folder: Path, device: str, kv: str, parts: list[tuple[int, int]]) -> Any:
    model = ModelFile.open(folder)
    described = build_graph(model, model.weights(), LOGITS, context=40, kv=kv)
    binding = DimBinding().set_live("seq", 32).set_live("past_seq", 39)
    f = Session(device).compile(described.module, CompileOptions(binding=binding))
    f.set_params(described.params)
    tokens = np.array([PROMPT], np.int32)
    runs = [f.run(ids=tokens[:, a:b], sizes={"past_seq": a})[0][0] for a, b in parts]
    return np.concatenate(runs)


@pytest.mark.parametrize("device", DEVICES)
def test_a_model_with_a_quantised_kv_cache(folder: Path, device: str) -> None:
    """Chunks and single tokens read what a whole prefill reads: the same blocks. What differs is
    the order of sums, and a code that rounds the other way for it, a step of 1/127 in one of many
    terms: 2e-3 of the largest logit. Against f32 the errors of all layers stay below 3 %."""
    count = len(PROMPT)
    whole = logits(folder, device, "q8_0", [(0, count)])
    steps = [(0, 4), *((i, i + 1) for i in range(4, count))]
    largest = np.abs(whole).max()
    assert np.abs(logits(folder, device, "q8_0", steps) - whole).max() < 2e-3 * largest
    exact = logits(folder, "reference", "f32", [(0, count)])
    assert 0 < np.abs(whole - exact).max() < 0.03 * largest


def test_the_kv_cache_takes_what_it_says(folder: Path) -> None:
    model = ModelFile.open(folder)
    sizes = {}
    for kv in ("f32", "f16", "bf16", "q8_0"):
        engine = DecoderRunner(model, context=40, kv=kv)
        engine.executables(LOGITS)
        sizes[kv] = engine.cache_bytes
    per_token = 3 * 2 * 32  # layers, keys and values, numbers of the one head
    assert sizes["f32"] == 40 * per_token * 4
    assert sizes["q8_0"] == 40 * per_token // 32 * 34


def test_the_kv_cache_is_never_dequantised_as_a_whole(folder: Path) -> None:
    """What a run needs beside the states does not grow with them."""
    model = ModelFile.open(folder)
    arenas = []
    for context in (40, 120):
        lir = (
            DecoderRunner(model, context=context, kv="q8_0")
            .executables(LOGITS)
            .decode.executable.lir
        )
        arenas.append(lir.arena_size)
        op_names = {n.op.name for n in lir.graph.nodes}
        assert "quantize_blocks" in op_names and "dequant_gather" not in op_names
    assert arenas[0] == arenas[1]


def test_what_cannot_be_quantised(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(rlx.OptionError, match="unknown type of the KV cache; got q4_0"):
        rlx.load(folder, kv="q4_0")
    write_folder("llama", tmp_path)
    with pytest.raises(rlx.OptionError, match=r"heads of 16; expected a multiple of 32 for q8_0"):
        KVCacheType.of("q8_0", ModelFile.open(tmp_path).config.head_dim)
