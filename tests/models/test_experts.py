"""Mixtures of experts against a dense computation, floats and quantised, few tokens and many."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "goldens"))
from tiny import EXPERTS, FFN, HIDDEN, VOCAB, write_folder

from rlx import CompileOptions, DimBinding, GraphModule, Session
from rlx.cli.programs import bytes_per_run
from rlx.errors import FormatError, UnsupportedError
from rlx.ir.dtype import DType
from rlx.ir.quant.scheme import decode
from rlx.models.arch import architecture, supported
from rlx.models.config import ExpertConfig, KVCacheType
from rlx.models.decoder_builder import DecoderBuilder
from rlx.models.model_file import ModelFile
from rlx.runtime.params import Deferred

TOKENS = 300  # more than a chunk of routed rows for some experts


def open_model(name: str, folder: Path, scheme: str | None) -> ModelFile:
    if scheme is None:
        write_folder(name, folder)
        return ModelFile.open(folder)
    from gguf_files import packed_experts, write_model

    write_model(name, folder / "model.gguf", packed_experts(scheme))
    return ModelFile.open(folder / "model.gguf")


def run_layer(model: ModelFile, x: np.ndarray, device: str) -> np.ndarray:
    """The network of layer 1 alone."""
    nets: list[DecoderBuilder] = []

    def build(g: GraphModule) -> Any:
        nets.append(DecoderBuilder(g, model.config, model.weights(), 8, KVCacheType.of("f32", 16)))
        return nets[0].ffn(g.input("x", [1, "seq", HIDDEN]), 1)

    module = GraphModule.define("experts", build)
    options = CompileOptions(binding=DimBinding().set_live("seq", TOKENS))
    f = Session(device).compile(module, options).set_params(nets[0].params)
    pieces = [f.run(x=x[None, :1])[0], f.run(x=x[None, 1:])[0]]  # one row, then many
    return np.concatenate(pieces, axis=1)[0]


def weight(model: ModelFile, name: str) -> np.ndarray:
    found = model.weights().get(f"blk.1.{name}.weight")
    array = found.array.make() if isinstance(found.array, Deferred) else found.array
    plain = array if found.scheme is None else decode(found.scheme, np.asarray(array))
    return np.asarray(plain, np.float64)


def gated(x: np.ndarray, gate: np.ndarray, up: np.ndarray, down: np.ndarray) -> np.ndarray:
    y = x @ gate.T
    return (y / (1 + np.exp(-y)) * (x @ up.T)) @ down.T


def dense(model: ModelFile, x: np.ndarray) -> np.ndarray:
    """Every expert for every token, in f64; the scores of those not chosen are zero."""
    settings = model.config.experts
    assert settings is not None
    x = x.astype(np.float64)
    logits = x @ weight(model, "ffn_gate_inp").T
    scores = np.exp(logits - logits.max(-1, keepdims=True))
    scores /= scores.sum(-1, keepdims=True)
    least = np.sort(scores, axis=-1)[:, -settings.active][:, None]
    scores = np.where(scores >= least, scores, 0.0)
    if settings.normalize:
        scores /= scores.sum(-1, keepdims=True)
    parts = [weight(model, f"ffn_{p}_exps") for p in ("gate", "up", "down")]
    out = np.zeros_like(x)
    for e in range(EXPERTS):
        out += scores[:, e : e + 1] * settings.scale * gated(x, *(w[e] for w in parts))
    if "blk.1.ffn_up_shexp.weight" in model.weights():
        y = gated(x, *(weight(model, f"ffn_{p}_shexp") for p in ("gate", "up", "down")))
        if "blk.1.ffn_gate_inp_shexp.weight" in model.weights():
            y = y / (1 + np.exp(-(x @ weight(model, "ffn_gate_inp_shexp").reshape(-1, 1))))
        out += y
    return out


@pytest.mark.parametrize("device", ["reference", "cpu"])
@pytest.mark.parametrize("scheme", [None, "Q8_0", "MXFP4"])
@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v2_rank"])
def test_equals_all_experts_computed_densely(
    name: str, scheme: str | None, device: str, tmp_path: Path
) -> None:
    """f32 sums of at most 96 terms: 1e-5 of the largest. Natively, packed weights meet activations
    of 8 bits, off by half of 1/127 of a block's peak: 2 % of the largest result."""
    model = open_model(name, tmp_path, scheme)
    x = np.random.default_rng(7).standard_normal((TOKENS, HIDDEN), dtype=np.float32)
    wanted = dense(model, x)
    bound = 0.02 if device == "cpu" and scheme is not None else 1e-5
    got = run_layer(model, x, device)
    np.testing.assert_allclose(got, wanted, rtol=0, atol=bound * float(np.abs(wanted).max()))


def test_experts_of_a_folder_wait_until_they_are_wanted(tmp_path: Path) -> None:
    model = open_model("olmoe", tmp_path, None)
    found = model.weights().get("blk.0.ffn_up_exps.weight")
    assert isinstance(found.array, Deferred)
    assert found.array.make().shape == found.shape == (EXPERTS, 96, HIDDEN)
    with pytest.raises(FormatError, match=r"expected model.layers.9.mlp.experts.0.up_proj.weight"):
        model.weights().get("blk.9.ffn_up_exps.weight")


def test_settings_of_experts(tmp_path: Path) -> None:
    models = {n: open_model(n, _made(tmp_path / n), None) for n in ("mixtral", "olmoe", "llama")}
    assert models["mixtral"].config.experts == ExpertConfig(EXPERTS, 2, normalize=True, width=FFN)
    assert models["olmoe"].config.experts == ExpertConfig(EXPERTS, 3, normalize=False, width=FFN)
    assert models["llama"].config.experts is None


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def test_unknown_architectures_raise_and_list_the_known() -> None:
    with pytest.raises(UnsupportedError, match=r"got gpt_os; expected .*gpt_oss") as caught:
        architecture("gpt_os")
    assert "the nearest is gpt_oss" in str(caught.value)
    assert {"llama", "deepseek_v2", "gemma3"} <= set(supported())
    assert "encoders" not in supported()
    with pytest.raises(UnsupportedError, match="unknown architecture"):
        architecture("encoders")


def test_deferred_parameters_are_made_once_and_let_go() -> None:
    rng = np.random.default_rng(0)
    w, calls = rng.standard_normal((64, 48), dtype=np.float32), []

    def make() -> np.ndarray:
        calls.append(1)
        return w

    module = GraphModule.define(
        "product", lambda g: g.linear(g.input("x", ["n", 64]), g.param("w", [64, 48]))
    )
    f = Session("cpu").compile(module)
    f.set_param("w", Deferred((64, 48), DType.of("f32"), make))
    x = rng.standard_normal((3, 64), dtype=np.float32)
    for _ in range(2):
        # sums of 64 terms of size 1 in another order: some units in the last place of 30
        np.testing.assert_allclose(f.run(x=x)[0], x @ w, rtol=0, atol=1e-4)
    assert calls == [1]


@pytest.mark.parametrize("scheme", [None, "Q8_0"])
def test_a_token_reads_the_experts_it_is_sent_to(scheme: str | None, tmp_path: Path) -> None:
    model = open_model("mixtral", tmp_path, scheme)  # 2 of 6 experts, three layers
    sizes = {n: t.nbytes for n, t in model.file.tensors.items()}
    experts = sum(s for n, s in sizes.items() if ".experts." in n or "_exps." in n)
    table = VOCAB * HIDDEN * 4
    assert experts > 0
    assert bytes_per_run(model) == sum(sizes.values()) - table - experts * 4 // 6
