"""Encoders as they are published: files of sentence-transformers in all their forms, other names of
weights, and files that do not fit each other."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "goldens"))
from encoder_files import write_model, write_modules, write_tokenizer
from tiny import write_safetensors
from tiny_encoders import HIDDEN, batch, weights

import rlx
from rlx.models.builder import EntryPoint, build_graph
from rlx.models.model_file import ModelFile
from rlx.models.rope_tables import RopeConfig, rope_tables

GOLDENS = Path(__file__).resolve().parent.parent / "goldens"
TEXTS = ["the cat", "a", "cats!"]
MEAN = ("Pooling", {"word_embedding_dimension": HIDDEN, "pooling_mode_mean_tokens": True})
TRANSFORMER = ("Transformer", {})


@pytest.fixture(autouse=True, scope="module")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RLX_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Means of the tokens' vectors, nothing done to them."""
    folder = write_model(tmp_path_factory.mktemp("plain"))
    with rlx.load(folder, device="reference") as model:
        yield model.embed(TEXTS)


def embedded(folder: Path, texts: Any = TEXTS, **options: Any) -> Any:
    with rlx.load(folder, device="reference") as model:
        return model.embed(texts, **options)


def write_json(path: Path, value: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(value), encoding="utf-8")


def write_weights(path: Path, seed: int = 1, **shapes: tuple[int, ...]) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    made = {
        name.replace("_", "."): rng.standard_normal(shape).astype(np.float32)
        for name, shape in shapes.items()
    }
    write_safetensors(path, made)
    return made


def unit(rows: Any) -> Any:
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def close(got: Any, wanted: Any) -> None:
    """Sums of 64 products in another order, numbers of size 10 at most."""
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-5)


# -- modules ---------------------------------------------------------------------------------------


def test_what_follows_pooling_is_done_in_its_order(tmp_path: Path, plain: Any) -> None:
    """Normalize before a dense layer is not the same as after it."""
    write_model(tmp_path)
    relu = {"in_features": HIDDEN, "out_features": 6,
            "activation_function": "torch.nn.modules.activation.ReLU"}  # fmt: skip
    write_modules(
        tmp_path, TRANSFORMER, MEAN, ("Normalize", {}), ("Dense", relu), ("Dropout", {}),
        ("LayerNorm", {"dimension": 6}),
    )  # fmt: skip
    dense = write_weights(tmp_path / "3_Dense" / "model.safetensors", linear_weight=(6, HIDDEN))
    norm = write_weights(
        tmp_path / "5_LayerNorm" / "model.safetensors", norm_weight=(6,), norm_bias=(6,)
    )
    hidden = np.maximum(unit(plain) @ dense["linear.weight"].T, 0)
    centred = hidden - hidden.mean(1, keepdims=True)
    scaled = centred / np.sqrt((centred**2).mean(1, keepdims=True) + 1e-5)
    close(embedded(tmp_path), scaled * norm["norm.weight"] + norm["norm.bias"])


@pytest.mark.parametrize("out", [HIDDEN, 6])
def test_dense_layers_with_a_residual(tmp_path: Path, plain: Any, out: int) -> None:
    write_model(tmp_path)
    config = {"in_features": HIDDEN, "out_features": out, "use_residual": True,
              "activation_function": "torch.nn.modules.activation.Tanh"}  # fmt: skip
    write_modules(tmp_path, TRANSFORMER, MEAN, ("Dense", config))
    shapes = {"linear_weight": (out, HIDDEN), "linear_bias": (out,)}
    if out != HIDDEN:
        shapes["residual_weight"] = (out, HIDDEN)
    w = write_weights(tmp_path / "2_Dense" / "model.safetensors", **shapes)
    other = plain @ w["residual.weight"].T if out != HIDDEN else plain
    close(embedded(tmp_path), np.tanh(plain @ w["linear.weight"].T + w["linear.bias"]) + other)


def test_a_changed_dense_layer_is_not_taken_from_the_cache(tmp_path: Path) -> None:
    write_model(tmp_path)
    config = {"in_features": HIDDEN, "out_features": 6,
              "activation_function": "torch.nn.modules.linear.Identity"}  # fmt: skip
    write_modules(tmp_path, TRANSFORMER, MEAN, ("Dense", config))
    path = tmp_path / "2_Dense" / "model.safetensors"
    first = write_weights(path, linear_weight=(6, HIDDEN))
    with rlx.load(tmp_path) as model:
        before = model.embed(TEXTS)
    write_safetensors(path, {name: -array for name, array in first.items()})
    with rlx.load(tmp_path) as model:
        close(model.embed(TEXTS), -before)


@pytest.mark.parametrize(
    ("shapes", "problem"),
    [
        ({}, "no safetensors weights"),
        ({"weight": (6, HIDDEN)}, "a weight is missing"),
        ({"linear_weight": (6, 16)}, "does not fit what comes before it"),
        ({"linear_weight": (HIDDEN,)}, "does not fit what comes before it"),
        ({"linear_weight": (6, HIDDEN), "linear_bias": (5,)}, "does not fit what comes before it"),
    ],
)
def test_dense_layers_that_cannot_be_are_refused_when_loaded(
    tmp_path: Path, shapes: dict[str, Any], problem: str
) -> None:
    write_model(tmp_path)
    write_modules(tmp_path, TRANSFORMER, MEAN, ("Dense", {"in_features": HIDDEN}))
    (tmp_path / "2_Dense" / "pytorch_model.bin").write_bytes(b"pickle")
    if shapes:
        write_weights(tmp_path / "2_Dense" / "model.safetensors", **shapes)
    with pytest.raises(rlx.FormatError, match=problem) as caught:
        rlx.load(tmp_path)
    assert shapes or "pickled" in caught.value.hint


@pytest.mark.parametrize(
    ("name", "text", "error"),
    [
        ("modules.json", "[]", rlx.FormatError),
        ("modules.json", "{}", rlx.FormatError),
        ("modules.json", "[" * 100_000, rlx.FormatError),
        ("modules.json", '[{"type": "a.Pooling", "path": "a\\u0000b"}]', rlx.FormatError),
        ("modules.json", '[{"type": "a.Pooling", "path": 3}]', rlx.FormatError),
        ("1_Pooling/config.json", '{"pooling_mode": 3}', rlx.UnsupportedError),
        ("1_Pooling/config.json", '{"pooling_mode": []}', rlx.UnsupportedError),
        ("config_sentence_transformers.json", '{"prompts": "x"}', rlx.FormatError),
        ("config_sentence_transformers.json", '{"prompts": {"a": 3}}', rlx.FormatError),
        ("config_sentence_transformers.json", '{"default_prompt_name": "a"}', rlx.FormatError),
        ("config_sentence_transformers.json", '{"default_prompt_name": [3]}', rlx.FormatError),
    ],
)
def test_settings_of_the_wrong_type(tmp_path: Path, name: str, text: str, error: type) -> None:
    write_model(tmp_path)
    write_modules(tmp_path, TRANSFORMER, MEAN)
    (tmp_path / name).write_text(text)
    with pytest.raises(error):
        rlx.load(tmp_path)


def test_a_model_in_a_folder_of_its_own(tmp_path: Path, plain: Any) -> None:
    """As sentence-transformers wrote them at first."""
    inner = tmp_path / "0_Transformer"
    inner.mkdir()
    write_model(inner)
    write_json(inner / "sentence_bert_config.json", {"max_seq_length": 11})
    write_modules(tmp_path, TRANSFORMER, MEAN, ("Normalize", {}))
    write_prompts(tmp_path)
    with rlx.load(tmp_path, device="reference") as model:
        assert model.max_tokens == 11
        close(model.embed(TEXTS), unit(plain))
        close(model.embed(["cat"], prompt="query"), model.embed(["a b cat"]))


def test_settings_under_the_name_of_the_architecture(tmp_path: Path) -> None:
    write_model(tmp_path, "roberta")
    write_json(tmp_path / "sentence_roberta_config.json", {"max_seq_length": 9})
    with rlx.load(tmp_path) as model:
        assert model.max_tokens == 9


def test_lower_case_leaves_special_tokens_alone(tmp_path: Path) -> None:
    write_model(tmp_path)
    described = json.loads((tmp_path / "tokenizer.json").read_text())
    described["normalizer"] = None
    write_json(tmp_path / "tokenizer.json", described)
    write_json(tmp_path / "sentence_bert_config.json", {"do_lower_case": True})
    with rlx.load(tmp_path) as model:
        assert model.tokenizer.encode("CAT[SEP]") == [*model.tokenizer.encode("cat"), 3]


# -- prompts ---------------------------------------------------------------------------------------


def write_prompts(folder: Path, default: str | None = None) -> None:
    prompts = {"query": "a b ", "document": ""}
    write_json(
        folder / "config_sentence_transformers.json",
        {"prompts": prompts, "default_prompt_name": default},
    )


def test_an_empty_prompt_is_a_prompt(tmp_path: Path, plain: Any) -> None:
    write_model(tmp_path)
    write_prompts(tmp_path, default="query")
    close(embedded(tmp_path, prompt="document"), plain)
    close(embedded(tmp_path), embedded(tmp_path, [f"a b {t}" for t in TEXTS], prompt=""))


def test_ranking_puts_the_prompts_of_queries_and_documents(tmp_path: Path) -> None:
    write_model(tmp_path)
    write_prompts(tmp_path)
    with rlx.load(tmp_path, device="reference") as model:
        wanted = model.similarity("a b the cat", TEXTS)[0]
        close(model.scores("the cat", TEXTS), wanted)


def test_a_prompt_that_is_not_pooled_is_refused(tmp_path: Path, plain: Any) -> None:
    write_model(tmp_path)
    write_modules(tmp_path, TRANSFORMER, (MEAN[0], {**MEAN[1], "include_prompt": False}))
    close(embedded(tmp_path), plain)
    with pytest.raises(rlx.UnsupportedError, match="leaves prompts out"):
        embedded(tmp_path, prompt="query: ")


# -- pairs -----------------------------------------------------------------------------------------


def test_the_tokenizer_says_how_pairs_are_marked(tmp_path: Path) -> None:
    """A BERT with the tokenizer of XLM-RoBERTa, as multilingual MiniLM is."""
    write_model(tmp_path, classifier=True)
    with rlx.load(tmp_path) as model:
        (pair,) = model.reader.pairs("cat", ["a"], "cut")
        assert (len(pair), pair.second) == (5, 3)
    write_tokenizer(tmp_path, like_roberta=True)
    with rlx.load(tmp_path) as model:
        (pair,) = model.reader.pairs("cat", ["a"], "cut")
        assert (len(pair), pair.second) == (6, -1)


def test_the_activation_of_a_cross_encoder(tmp_path: Path) -> None:
    write_model(tmp_path, classifier=True)
    with rlx.load(tmp_path, device="reference") as model:
        scores, logits = model.scores("cat", TEXTS), model.logits("cat", TEXTS)
    assert logits.shape == (3, 1)
    close(scores, 1 / (1 + np.exp(-logits[:, 0])))
    identity = {"activation_fn": "torch.nn.modules.linear.Identity"}
    write_json(tmp_path / "config_sentence_transformers.json", identity)
    with rlx.load(tmp_path, device="reference") as model:
        close(model.scores("cat", TEXTS), logits[:, 0])


def test_three_labels_are_no_rank(tmp_path: Path) -> None:
    write_model(tmp_path, classifier=True, id2label={str(i): str(i) for i in range(3)})
    given = weights("bert")
    given["classifier.weight"] = np.repeat(given["classifier.weight"], 3, 0) * [[1], [2], [3]]
    given["classifier.weight"] = given["classifier.weight"].astype(np.float32)
    given["classifier.bias"] = np.zeros(3, np.float32)
    write_safetensors(tmp_path / "model.safetensors", given)
    with rlx.load(tmp_path, device="reference") as model:
        with pytest.raises(rlx.UnsupportedError, match="a classifier, not a reranker"):
            model.rerank("cat", TEXTS)
        logits = model.logits("cat", TEXTS)
    close(logits, logits[:, :1] * [1, 2, 3])


# -- weights and settings --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"num_hidden_layers": 3}, "more layers"),
        ({"hidden_size": 64}, "word_embeddings.weight does not have the size.*hidden_size"),
        ({"vocab_size": 1000}, "word_embeddings.weight does not have the size.*vocab_size"),
        ({"max_position_embeddings": 64}, "position_embeddings.weight does not have the size"),
        ({"max_position_embeddings": 2}, "position_embeddings.weight does not have the size"),
        ({"id2label": {"0": "a", "1": "b"}}, "classifier.weight does not have the size"),
        ({"hidden_size": True}, "wrong type"),
        ({"layer_norm_eps": -1.0}, "epsilon"),
        ({"layer_norm_eps": 10**400}, "wrong type"),
        ({"model_type": ["bert"]}, "model_type"),
    ],
)
def test_settings_that_are_not_those_of_the_weights(
    tmp_path: Path, changes: dict[str, Any], problem: str
) -> None:
    write_model(tmp_path, classifier=True, **changes)
    with pytest.raises(rlx.FormatError, match=problem):
        rlx.load(tmp_path)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("mpnet", {"relative_attention_num_buckets": 16}),
        ("modernbert", {"layer_types": ["full_attention"]}),
        ("modernbert", {"layer_types": ["near"] * 4}),
        ("modernbert", {"rope_parameters": {"full_attention": 3}}),
        ("roberta", {"pad_token_id": -2}),
        ("nomic_bert", {"rope_parameters": {"rope_theta": "far"}}),
    ],
)
def test_settings_of_one_architecture(tmp_path: Path, name: str, changes: dict[str, Any]) -> None:
    write_model(tmp_path, name, **changes)
    with pytest.raises((rlx.FormatError, rlx.UnsupportedError)):
        rlx.load(tmp_path)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("modernbert", {"classifier_pooling": "late"}),
        ("modernbert", {"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}),
        ("gte", {"rope_parameters": {"rope_type": "yarn"}}),
        ("gte", {"logn_attention_scale": True}),
        ("roberta", {"position_embedding_type": "rotary"}),
        ("albert", {"inner_group_num": 2}),
    ],
)
def test_what_is_not_known_is_refused(tmp_path: Path, name: str, changes: dict[str, Any]) -> None:
    write_model(tmp_path, name, **changes)
    with pytest.raises(rlx.UnsupportedError):
        rlx.load(tmp_path)


def test_a_classifier_without_its_first_layer_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path, classifier=True)
    kept = {name: array for name, array in weights("bert").items() if "pooler" not in name}
    write_safetensors(tmp_path / "model.safetensors", kept)
    with pytest.raises(rlx.FormatError, match="a weight is missing"):
        rlx.load(tmp_path)


def test_weights_that_are_no_numbers_give_no_vectors(tmp_path: Path) -> None:
    write_model(tmp_path)
    given = weights("bert")
    given["bert.embeddings.word_embeddings.weight"][5] = np.nan  # the letter a
    write_safetensors(tmp_path / "model.safetensors", given)
    with rlx.load(tmp_path) as model:
        assert np.isfinite(model.embed("cat")).all()
        with pytest.raises(rlx.NumericsError, match="text 1 is not finite"):
            model.embed(["cat", "a"])
        with pytest.raises(rlx.NumericsError, match="text 4 is not finite"):
            list(model.embed_stream(["cat"] * 4 + ["a"], window=2))


# -- other names of weights ------------------------------------------------------------------------


def hidden(folder: Path, name: str) -> Any:
    """What the model makes of the longest text of the golden batch."""
    file = ModelFile.open(folder)
    described = build_graph(file, file.weights(), EntryPoint("hidden"))
    f = rlx.Session("reference").compile(described.module).set_params(described.params)
    (got,) = f.run(ids=batch(name)[0][2:].astype(np.int32))
    return got[0]


def same_as_golden(folder: Path, name: str) -> None:
    wanted = np.load(GOLDENS / "encoders.npz")[f"{name}_hidden"][2]
    np.testing.assert_allclose(
        hidden(folder, name), wanted, rtol=0, atol=1e-5 * float(np.abs(wanted).max())
    )


def test_roberta_with_joined_weights(tmp_path: Path) -> None:
    """Jina AI's rerankers call their weights as jina_embeddings_v3 does, with q, k, v as one."""
    write_model(tmp_path, "roberta")
    renamed = {
        "embeddings.LayerNorm": "emb_ln", "encoder.layer.": "encoder.layers.",
        "attention.output.dense": "mixer.out_proj", "attention.output.LayerNorm": "norm1",
        "output.LayerNorm": "norm2", "intermediate.dense": "mlp.fc1", "output.dense": "mlp.fc2",
    }  # fmt: skip
    found, given = {}, weights("roberta")
    for name, array in given.items():
        if ".self.query." in name:
            parts = [given[name.replace("query", p)] for p in ("query", "key", "value")]
            array, name = np.concatenate(parts), name.replace("attention.self.query", "mixer.Wqkv")
        for old, new in renamed.items():
            name = name.replace(old, new)
        if ".self." not in name:
            found[name] = array
    write_safetensors(tmp_path / "model.safetensors", found)
    same_as_golden(tmp_path, "roberta")


@pytest.mark.parametrize("prefix", ["", "new."])
def test_gte_as_it_was_first_published(tmp_path: Path, prefix: str) -> None:
    write_model(tmp_path, "gte", model_type="new", rope_parameters=None, rope_theta=500)
    found = {name.replace("gte.", prefix, 1): a for name, a in weights("gte").items()}
    write_safetensors(tmp_path / "model.safetensors", found)
    same_as_golden(tmp_path, "gte")


def test_frequencies_stretched_as_gte_does() -> None:
    """theta grows by the factor, and every frequency is divided by its 2/d-th power."""
    theta, factor, size = 500.0, 8.0, 8
    cos, _ = rope_tables(RopeConfig(theta, scaling="ntk", factor=factor), size, 50)
    at = np.arange(50)[:, None]
    turns = (theta * factor) ** (-np.arange(0, size, 2) / size) / factor ** (2 / size)
    np.testing.assert_allclose(cos, np.cos(at * turns), rtol=0, atol=1e-6)
