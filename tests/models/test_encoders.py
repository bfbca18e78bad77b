"""Encoders against Hugging Face transformers, on tiny weights from a seed and on real ones."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "goldens"))
from tiny_encoders import CONFIGS, LENGTHS, SENTENCES, batch, weights, write_folder

import rlx
from rlx import CompileOptions, DimBinding, Session
from rlx.formats.fetch import cached
from rlx.ir.attrs import MaskKind
from rlx.models.arch.encoders.deberta_v2 import position_buckets
from rlx.models.builder import EntryPoint, build_graph
from rlx.models.config import EncoderConfig
from rlx.models.encoder_builder import buckets
from rlx.models.model_file import ModelFile

GOLDENS = Path(__file__).resolve().parent.parent / "goldens"
SEQ = max(LENGTHS)


def compiled(folder: Path, device: str, use: EntryPoint) -> Any:
    """A use of the model, batch and sequence both dynamic."""
    model = ModelFile.open(folder)
    described = build_graph(model, model.weights(), use)
    binding = DimBinding().set_live("batch", 4).set_live("seq", SEQ + 3)
    return (
        Session(device)
        .compile(described.module, CompileOptions(binding=binding))
        .set_params(described.params)
    )


def close(got: Any, wanted: Any) -> None:
    """f32 all the way: sums of at most 48 terms in another order, four layers with norms between;
    1e-5 of the largest value is the stated bar."""
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-5 * float(np.abs(wanted).max()))


@pytest.fixture(params=CONFIGS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def folder(name: str, tmp_path: Path) -> Path:
    write_folder(name, tmp_path)
    return tmp_path


@pytest.mark.parametrize("device", ["reference", "cpu"])
def test_padded_batches_equal_transformers(name: str, folder: Path, device: str) -> None:
    wanted = np.load(GOLDENS / "encoders.npz")[f"{name}_hidden"]
    ids = batch(name)[0].astype(np.int32)
    lengths = np.array(LENGTHS, np.int32)
    padded = compiled(folder, device, EntryPoint("hidden", padded=True))
    (got,) = padded.run(ids=ids, lengths=lengths)
    real = np.arange(SEQ) < lengths[:, None]
    close(got[real], wanted[real])
    ids[~real] = 7  # what stands in the padding must not matter
    (again,) = padded.run(ids=ids, lengths=lengths)
    assert np.array_equal(again[real], got[real])
    wider = np.full((3, SEQ + 3), 9, np.int32)
    wider[:, :SEQ] = ids
    (got,) = padded.run(ids=wider, lengths=lengths)
    close(got[:, :SEQ][real], wanted[real])


def test_unpadded_texts_equal_transformers(name: str, folder: Path) -> None:
    wanted = np.load(GOLDENS / "encoders.npz")[f"{name}_hidden"]
    plain = compiled(folder, "cpu", EntryPoint("hidden"))
    for row, length in enumerate(LENGTHS):
        ids = batch(name)[0][row : row + 1, :length].astype(np.int32)
        (got,) = plain.run(ids=ids)
        close(got[0], wanted[row, :length])


@pytest.mark.parametrize("device", ["reference", "cpu"])
def test_classifiers_equal_transformers(name: str, folder: Path, device: str) -> None:
    wanted = np.load(GOLDENS / "encoders.npz")[f"{name}_logits"]
    typed = CONFIGS[name].get("type_vocab_size", 0) > 1
    scores = compiled(folder, device, EntryPoint("scores", padded=True, typed=typed))
    ids, types = (a.astype(np.int32) for a in batch(name))
    given = {"types": types} if typed else {}
    (got,) = scores.run(ids=ids, lengths=np.array(LENGTHS, np.int32), **given)
    close(got, wanted)


POOLINGS = {
    "cls": lambda x: x[0],
    "lasttoken": lambda x: x[-1],
    "max": lambda x: x.max(0),
    "mean": lambda x: x.mean(0),
    "mean_sqrt_len_tokens": lambda x: x.sum(0) / np.sqrt(len(x)),
    "weightedmean": lambda x: (
        (x * np.arange(1, len(x) + 1)[:, None]).sum(0) / (len(x) * (len(x) + 1) / 2)
    ),
}


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("mode", POOLINGS)
def test_pooling_takes_real_tokens_only(mode: str, padded: bool, tmp_path: Path) -> None:
    write_folder("bert", tmp_path)
    (tmp_path / "modules.json").write_text(
        '[{"type": "sentence_transformers.models.Transformer", "path": ""},'
        ' {"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"}]'
    )
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(
        f'{{"word_embedding_dimension": 32, "pooling_mode": "{mode}"}}'
    )
    hidden = np.load(GOLDENS / "encoders.npz")["bert_hidden"].astype(np.float64)
    wanted = [POOLINGS[mode](hidden[row, :length]) for row, length in enumerate(LENGTHS)]
    f = compiled(tmp_path, "cpu", EntryPoint("embedding", padded=padded))
    ids = batch("bert")[0].astype(np.int32)
    if padded:
        (got,) = f.run(ids=ids, lengths=np.array(LENGTHS, np.int32))
    else:
        rows = [f.run(ids=ids[i : i + 1, :n])[0][0] for i, n in enumerate(LENGTHS)]
        got = np.array(rows)
    close(got, np.array(wanted))


def test_relative_positions_fall_into_buckets_as_published() -> None:
    """T5's rule, by hand: 16 buckets a side, 8 exact, the rest logarithmic up to 128."""
    distances = np.array([0, -1, -7, -8, -15, -16, -127, -128, -400, 1, 7, 8, 127, 500])
    wanted = [0, 1, 7, 8, 9, 10, 15, 15, 15, 17, 23, 24, 31, 31]
    assert buckets(distances, 32, 128).tolist() == wanted


def test_places_of_distances_as_published() -> None:
    """DeBERTa's rule, by hand: of 256 places a side 128 exact, the rest logarithmic up to 511."""
    config = SimpleNamespace(context=600)
    encoder = EncoderConfig(distance_buckets=512, farthest=512)
    found = position_buckets(config, encoder)  # type: ignore[arg-type]
    far = [math.ceil(math.log(d / 128) / math.log(511 / 128) * 127) + 128 for d in (200, 400)]
    wanted = [256, 257, 384, 256 + far[0], 256 + far[1], 511, 511]
    assert [int(found[599 + d]) for d in (0, 1, 128, 200, 400, 511, 599)] == wanted
    assert [int(found[599 - d]) for d in (1, 128, 200)] == [255, 128, 256 - far[0]]


def test_first_published_names_of_nomic_bert(tmp_path: Path) -> None:
    """The folder as it was first published: joined q, k, v; other names; other config keys."""
    from tiny import write_safetensors

    write_folder("nomic_bert", tmp_path)
    old, given = {}, weights("nomic_bert")
    renamed = {
        "post_attention_layernorm": "norm1", "post_mlp_layernorm": "norm2",
        "self_attn.o_proj": "attn.out_proj", "mlp.up_proj": "mlp.fc11",
        "mlp.gate_proj": "mlp.fc12", "mlp.down_proj": "mlp.fc2",
    }  # fmt: skip
    for tensor, array in given.items():
        tensor = tensor.removeprefix("nomic_bert.").replace("embeddings.LayerNorm", "emb_ln")
        for new, first in renamed.items():
            tensor = tensor.replace(new, first)
        if tensor.startswith("layers."):
            tensor = f"encoder.{tensor}"
        if ".q_proj" in tensor:
            source = tensor.replace("encoder.", "nomic_bert.", 1)
            parts = [given[source.replace("q_proj", f"{p}_proj")] for p in "qkv"]
            tensor = tensor.replace("self_attn.q_proj", "attn.Wqkv")
            array = np.concatenate(parts)
        if "k_proj" not in tensor and "v_proj" not in tensor:
            old[tensor] = array
    write_safetensors(tmp_path / "model.safetensors", old)
    (tmp_path / "config.json").write_text(
        '{"model_type": "nomic_bert", "vocab_size": 120, "n_embd": 32, "n_layer": 4, "n_head": 4,'
        ' "n_inner": 48, "n_positions": 40, "activation_function": "swiglu",'
        ' "layer_norm_epsilon": 1e-12, "rotary_emb_base": 1000, "rotary_emb_fraction": 1.0,'
        ' "prenorm": false, "rotary_emb_interleaved": false}'
    )
    wanted = np.load(GOLDENS / "encoders.npz")["nomic_bert_hidden"]
    f = compiled(tmp_path, "cpu", EntryPoint("hidden"))
    (got,) = f.run(ids=batch("nomic_bert")[0][2:].astype(np.int32))
    close(got[0], wanted[2])


# -- the default encoder ---------------------------------------------------------------------------

MINILM = cached("all-minilm-l6-v2")
assert MINILM is not None, "tests/install.py fetches the models that tests need"


@pytest.fixture
def uncached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLX_CACHE", "0")


def test_real_weights_equal_transformers(uncached: None) -> None:
    wanted = np.load(GOLDENS / "minilm.npz")["vectors"]
    with rlx.load(str(MINILM)) as model:
        assert model.max_tokens == 256
        got = model.embed(SENTENCES, overlong="cut")
        np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-5)
        for text, row in zip(SENTENCES, wanted, strict=True):
            np.testing.assert_allclose(model.embed(text, overlong="cut"), row, rtol=0, atol=1e-5)


@pytest.mark.parametrize("strassen", [False, True])
def test_dense_layers_ask_for_fewer_multiplications_if_told(strassen: bool) -> None:
    file = ModelFile.open(MINILM)
    point = EntryPoint("embedding", padded=True)
    graph = build_graph(file, file.weights(), point, strassen=strassen).module.into_graph()
    records = [n.op for n in graph.nodes if n.op.name == "fused_matmul_bias_act"]
    asking = sum(record.strassen for record in records)
    assert asking == (6 * file.config.layers if strassen else 0)


def test_strassen_stays_close(uncached: None) -> None:
    wanted = np.load(GOLDENS / "minilm.npz")["vectors"]
    with rlx.load(str(MINILM), strassen=True) as model:
        got = model.embed(SENTENCES, overlong="cut")
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("padded", [False, True])
def test_local_layers_see_a_window(tmp_path: Path, padded: bool) -> None:
    """A window of its own kind, so that keys outside are never multiplied."""
    write_folder("modernbert", tmp_path)
    file = ModelFile.open(tmp_path)
    graph = build_graph(
        file, file.weights(), EntryPoint("hidden", padded=padded)
    ).module.into_graph()
    masks = [n.op.mask_kind for n in graph.nodes if n.op.name == "attention"]
    whole = MaskKind.CUSTOM if padded else MaskKind.NONE
    local = MaskKind.LOCAL(CONFIGS["modernbert"]["local_attention"] // 2)
    layers = range(file.config.layers)
    assert masks == [local if i in file.config.encoder.local_layers else whole for i in layers]


@pytest.mark.parametrize("kept", [{"dtype": "bf16"}, {"quant": "int8"}, {"quant": "Q8_0"}])
def test_smaller_weights_stay_close(uncached: None, kept: dict[str, str]) -> None:
    wanted = np.load(GOLDENS / "minilm.npz")["vectors"]
    with rlx.load(str(MINILM), **kept) as model:
        cosines = (model.embed(SENTENCES, overlong="cut") * wanted).sum(-1)
    assert cosines.min() >= 0.995
