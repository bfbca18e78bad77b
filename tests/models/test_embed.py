"""Texts to vectors and ranks: order, padding, limits, options, files around the model."""

from __future__ import annotations

import json
import os
import pickle
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "goldens"))
from encoder_files import write_gguf_copy, write_model, write_modules
from tiny import write_folder as write_language_model
from tiny import write_safetensors
from tiny_encoders import SENTENCES, batch

import rlx
from rlx.formats.fetch import cached
from rlx.models.builder import EntryPoint, build_graph
from rlx.models.encoder_inputs import Tokens
from rlx.models.encoder_runner import BATCH_TOKENS
from rlx.models.model_file import ModelFile
from rlx.passes.report import counters

GOLDENS = Path(__file__).resolve().parent.parent / "goldens"
MINILM = cached("all-minilm-l6-v2")  # before the cache is elsewhere


@pytest.fixture(autouse=True, scope="module")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Artifacts of these models are nobody else's business."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RLX_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("bert"))


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    with rlx.load(folder) as loaded:
        yield loaded


def many(count: int) -> list[str]:
    """Texts of every length the model takes, in no order."""
    rng = np.random.default_rng(0)
    return [" ".join("abcdefg"[: rng.integers(0, 7)]) * rng.integers(0, 6) for _ in range(count)]


def test_encode_is_embed_and_both_show_progress(model: Any) -> None:
    texts = many(9)
    seen: list[tuple[int, int]] = []
    found = model.encode(texts, batch=2, progress=lambda *at: seen.append(at))
    np.testing.assert_array_equal(found, model.embed(texts, batch=2))
    assert seen[-1] == (9, 9) and len(seen) >= 4
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})


def test_a_text_in_a_batch_gives_the_vector_it_gives_alone(model: Any) -> None:
    texts = many(50)
    alone = np.array([model.embed(t) for t in texts])
    assert len({len(model.tokenizer.encode(t)) for t in texts}) > 10
    for size in (None, 1, 7, 50):
        got = model.embed(texts, batch=size)
        assert got.dtype == np.float32
        np.testing.assert_allclose(got, alone, rtol=0, atol=1e-5)


def test_vectors_are_the_mean_of_hidden_states(model: Any, folder: Path) -> None:
    text = "the cat sat."
    file = ModelFile.open(folder)
    described = build_graph(file, file.weights(), EntryPoint("hidden"))
    f = rlx.Session("reference").compile(described.module).set_params(described.params)
    ids = np.array([[2, *model.tokenizer.encode(text, add_special=False), 3]], np.int32)
    (hidden,) = f.run(ids=ids)
    np.testing.assert_allclose(model.embed(text), hidden[0].mean(0), rtol=0, atol=1e-5)


def test_shapes_of_results(model: Any) -> None:
    assert model.embed("cat").shape == (32,)
    assert model.embed(["cat"]).shape == (1, 32)
    assert model.embed([]).shape == (0, 32)
    empty = model.embed(["", "cat"])  # a text of special tokens alone is a text
    assert np.abs(empty[0]).max() > 0.1
    # Alone it has fewer rows, whose sums may run in another order; numbers reach 2.4.
    np.testing.assert_allclose(empty[0], model.embed(""), rtol=0, atol=4e-6)


def test_normalising_and_truncating(model: Any) -> None:
    texts = ["cat", "the cats", "a b c"]
    plain = model.embed(texts)
    unit = plain / np.linalg.norm(plain, axis=1, keepdims=True)
    np.testing.assert_allclose(model.embed(texts, normalize=True), unit, rtol=0, atol=1e-6)
    short = model.embed(texts, truncate_dim=5)
    assert np.array_equal(short, plain[:, :5])
    wanted = plain[:, :5] / np.linalg.norm(plain[:, :5], axis=1, keepdims=True)
    got = model.embed(texts, truncate_dim=5, normalize=True)
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-6)
    cosines = model.similarity(texts, "cat")
    np.testing.assert_allclose(cosines[:, 0], unit @ unit[0], rtol=0, atol=1e-6)


def test_long_texts_are_cut_with_a_warning_or_refused(model: Any) -> None:
    long = "a " * 100
    assert model.max_tokens == 40
    kept = "a " * 38
    with pytest.warns(
        UserWarning, match=r"cut to 40 tokens: 1 of 2 texts, the first of them nu.* 1"
    ):
        got = model.embed(["cat", long])
    np.testing.assert_allclose(got[1], model.embed(kept), rtol=0, atol=1e-6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert np.array_equal(model.embed(["cat", long], overlong="cut"), got)
    with pytest.raises(rlx.InputError, match=r"text 1 is too long.*40 tokens"):
        model.embed(["cat", long], overlong="error")


@pytest.mark.parametrize("bad", ["caf\udce9", 3, None, b"cat"])
def test_what_is_no_text_is_refused_by_number(model: Any, bad: Any) -> None:
    with pytest.raises(rlx.InputError, match=r"text 2\].*only text"):
        model.embed(["a", "b", bad])
    with pytest.raises(rlx.InputError, match=r"text 5\].*only text"):
        list(model.embed_stream(iter(["a"] * 5 + [bad]), window=3))


def test_options_out_of_range_are_refused(model: Any) -> None:
    for options in ({"batch": 0}, {"truncate_dim": 0}, {"truncate_dim": 33}, {"overlong": "x"}):
        with pytest.raises(rlx.OptionError, match=next(iter(options))):
            model.embed(["a"], **options)
    with pytest.raises(rlx.OptionError, match="window"):
        next(model.embed_stream(["a"], window=0))


@pytest.mark.parametrize("bad", [None, 3, b"cat", bytearray(b"cat")])
def test_what_is_no_list_of_texts_is_refused(model: Any, bad: Any) -> None:
    calls = [model.embed, model.embed_stream, lambda b: model.similarity("cat", b)]
    calls += [lambda b: model.rerank("cat", b), lambda b: model.scores("cat", b)]
    for call in calls:
        with pytest.raises(rlx.InputError, match="not several texts"):
            call(bad)
    for query in (bad, ["cat"]):
        with pytest.raises(rlx.InputError, match="not a query"):
            model.rerank(query, ["cat"])
    for call in (model.embed_stream, lambda b: model.scores("cat", b)):
        with pytest.raises(rlx.InputError, match="not several texts"):
            call("cat")  # one text would be taken for one text a letter


def test_texts_may_come_from_anything_that_gives_them(model: Any) -> None:
    texts = ["cat", "the cats", ""]
    wanted = model.embed(texts)
    for given in (tuple(texts), iter(texts), np.array(texts), dict.fromkeys(texts)):
        assert np.array_equal(model.embed(given), wanted)
    with pytest.raises(rlx.InputError, match="text 1"):
        model.embed(t for t in ("cat", None))
    with pytest.raises(rlx.InputError, match="text 1"):
        model.embed(["cat", None], prompt="the ")


@pytest.mark.parametrize(
    "options", [{"batch": 2.5}, {"batch": "3"}, {"batch": True}, {"truncate_dim": 2.5},
                {"truncate_dim": "8"}, {"prompt": 3}, {"prompt": b"x"}],
)  # fmt: skip
def test_options_of_the_wrong_kind_are_refused(model: Any, options: dict[str, Any]) -> None:
    with pytest.raises(rlx.OptionError, match=rf"\[{next(iter(options))}\]"):
        model.embed(["a"], **options)
    with pytest.raises(rlx.OptionError, match="window"):
        model.embed_stream(["a"], window=2.5)
    for top in (-1, "x"):
        with pytest.raises(rlx.OptionError, match="top"):
            model.rerank("a", ["b"], top=top)


def test_a_model_is_not_pickled(model: Any) -> None:
    with pytest.raises(rlx.UnsupportedError, match="cannot be pickled"):
        pickle.dumps(model)


def test_warnings_name_the_line_of_the_user(tmp_path: Path) -> None:
    write_model(tmp_path, classifier=True)
    with rlx.load(tmp_path) as model:
        for call in (model.rerank, model.scores, model.logits):
            with pytest.warns(UserWarning, match="cut to 40") as caught:
                call("cat", ["a " * 100])
            assert caught[0].filename == __file__
        with pytest.warns(UserWarning, match="cut to 40") as caught:
            model.similarity("cat", "a " * 100)
        assert caught[0].filename == __file__


def test_streams_hold_a_window_and_keep_the_order(model: Any) -> None:
    taken = []

    def source() -> Any:
        for i, text in enumerate(many(30)):
            taken.append(i)
            yield text

    stream = model.embed_stream(source(), window=8)
    first = next(stream)
    assert len(taken) == 8
    got = np.array([first, *stream])
    assert len(taken) == 30
    np.testing.assert_allclose(got, model.embed(many(30)), rtol=0, atol=1e-5)


def test_batches_are_bounded_and_little_padded(model: Any) -> None:
    texts = many(3000)
    tokens = model.reader.read(texts, "", "error")
    parts = model.runner.batches(tokens, None)
    assert sorted(i for p in parts for i in p.places) == list(range(3000))
    used = sum(len(t) for t in tokens)
    room = sum(p.seq * len(p.places) for p in parts)
    assert all(p.seq * len(p.places) <= BATCH_TOKENS for p in parts)
    assert room < 1.03 * used  # lengths of 2 to 40 in some 40 batches
    limited = [len(p.places) for p in model.runner.batches(tokens[:50], 2)]
    assert sum(limited) == 50 and max(limited) == 2


def test_few_texts_are_padded_only_where_a_batch_would_cost_more(model: Any) -> None:
    def lengths(*given: int) -> list[list[int]]:
        parts = model.runner.batches([Tokens([5] * n) for n in given], None)
        assert {p.padded for p in parts if len({*map(len, p.tokens)}) > 1} <= {True}
        assert len({p.padded for p in parts if p.seq <= 64}) <= 1, "one executable for a step"
        return [[len(t) for t in p.tokens] for p in parts]

    assert lengths(3, 40, 3, 3, 3, 3, 3, 3) == [[40], [3] * 7]
    assert lengths(7, 6, 7) == [[7, 7, 6]]
    assert lengths(*[20] * 9) == [[20] * 9]
    assert lengths() == []


def test_any_shape_runs_on_few_executables(folder: Path) -> None:
    with rlx.load(folder) as model:
        for text in many(40):
            model.embed([text, "cat", text])
        assert len(model.runner._graphs) <= 4  # two steps of lengths, padded or not
        assert len(model.runner._pipelines) <= 2


def test_a_second_start_neither_compiles_nor_packs(tmp_path: Path) -> None:
    write_model(tmp_path, "nomic_bert")
    with rlx.load(tmp_path) as first:
        wanted = first.embed(["the cat", "a"])
        assert first.runner.params.preparations > 0
    before = counters.passes
    with rlx.load(tmp_path) as second:
        assert np.array_equal(second.embed(["the cat", "a"]), wanted)
        assert second.runner.params.preparations == 0
    assert counters.passes == before
    stamp = (tmp_path / "model.safetensors").stat()
    os.utime(tmp_path / "model.safetensors", ns=(stamp.st_atime_ns, stamp.st_mtime_ns + 1))
    with rlx.load(tmp_path) as changed:  # the file may have other weights now
        changed.embed("a")
        assert changed.runner.params.preparations > 0


def test_threads_may_share_a_model(model: Any) -> None:
    texts, results = many(12), {}

    def work(i: int) -> None:
        results[i] = model.embed(texts[i:] + texts[:i])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for i, got in results.items():
        np.testing.assert_allclose(got, model.embed(texts[i:] + texts[:i]), rtol=0, atol=1e-5)
    assert len(results) == 4


def test_a_closed_model_says_so(folder: Path) -> None:
    with rlx.load(folder) as model:
        pass
    model.close()
    with pytest.raises(rlx.InputError, match="closed"):
        model.embed("cat")


# -- ranking ---------------------------------------------------------------------------------------


def test_rerank_by_vectors(model: Any) -> None:
    texts = ["a b", "the cat", "cats"]
    ranks = model.rerank("the cat", texts)
    cosines = model.similarity("the cat", texts)[0]
    assert [r.index for r in ranks] == np.argsort(-cosines).tolist()
    assert ranks[0].index == 1
    np.testing.assert_allclose([r.score for r in ranks], np.sort(cosines)[::-1], atol=1e-6)
    assert model.rerank("the cat", texts, top=1) == ranks[:1]
    assert model.rerank("the cat", []) == []
    with pytest.raises(rlx.InputError, match="list of texts"):
        model.rerank("the cat", "a b")


@pytest.mark.parametrize("name", ["bert", "roberta"])
def test_cross_encoders_score_pairs(name: str, tmp_path: Path) -> None:
    """[CLS] query [SEP] text [SEP], the second text of another kind in BERT; RoBERTa has two marks
    between and one kind."""
    write_model(tmp_path, name, classifier=True)
    query, texts = "the cat", ["a b c d e", "cats", ""]
    with rlx.load(tmp_path, warm=True) as model:
        assert model.is_reranker
        made = set(model.runner._graphs)
        got = model.scores(query, texts)
        assert made and set(model.runner._graphs) == made
        encode = lambda t: model.tokenizer.encode(t, add_special=False)  # noqa: E731
    file = ModelFile.open(tmp_path)
    described = build_graph(file, file.weights(), EntryPoint("scores", typed=name == "bert"))
    f = rlx.Session("reference").compile(described.module).set_params(described.params)
    for text, score in zip(texts, got, strict=True):
        head = [2, *encode(query), 3] + [3] * (name == "roberta")
        ids = np.array([[*head, *encode(text), 3]], np.int32)
        types = (np.arange(ids.shape[1]) >= len(head)).astype(np.int32)[None]
        given = {"types": types} if name == "bert" else {}
        (logit,) = f.run(ids=ids, **given)
        assert score == pytest.approx(1 / (1 + np.exp(-logit[0, 0])), abs=1e-6)
    order = [r.index for r in model_ranks(tmp_path, query, texts)]
    assert order == np.argsort(-got, kind="stable").tolist()


def model_ranks(folder: Path, query: str, texts: list[str]) -> Any:
    with rlx.load(folder) as model:
        return model.rerank(query, texts, batch=2)


def test_long_pairs_are_cut_at_the_longer_text(tmp_path: Path) -> None:
    write_model(tmp_path, classifier=True)
    with rlx.load(tmp_path) as model:
        (pair,) = model.reader.pairs("cat", ["a " * 100], "cut")
        assert len(pair) == model.max_tokens == 40
        assert pair.second == 3  # [CLS] cat [SEP]
        (pair,) = model.reader.pairs("b " * 50, ["a " * 100], "cut")
        assert (len(pair), pair.second) == (40, 20)  # 18 and 19 tokens and three marks
        with pytest.raises(rlx.InputError, match="text 1 is too long"):
            model.rerank("cat", ["a", "a " * 100], overlong="error")


# -- files around the model ------------------------------------------------------------------------


def test_modules_of_sentence_transformers_are_followed(tmp_path: Path) -> None:
    write_model(tmp_path)
    old = {"word_embedding_dimension": 32, "pooling_mode_cls_token": True,
           "pooling_mode_mean_tokens": True}  # fmt: skip
    dense = {"in_features": 64, "out_features": 6, "bias": True,
             "activation_function": "torch.nn.modules.activation.Tanh"}  # fmt: skip
    write_modules(
        tmp_path, ("Transformer", {}), ("Pooling", old), ("Dense", dense), ("Normalize", {})
    )
    rng = np.random.default_rng(1)
    w, b = (rng.standard_normal(s).astype(np.float32) for s in ((6, 64), (6,)))
    write_safetensors(
        tmp_path / "2_Dense" / "model.safetensors", {"linear.weight": w, "linear.bias": b}
    )
    settings = {"max_seq_length": 12, "do_lower_case": False}
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps(settings))
    prompts = {"prompts": {"query": "the "}, "default_prompt_name": "query"}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    plain = ModelFile.open(tmp_path)
    described = build_graph(plain, plain.weights(), EntryPoint("hidden"))
    f = rlx.Session("reference").compile(described.module).set_params(described.params)
    with rlx.load(tmp_path) as model:
        assert (model.max_tokens, model.width) == (12, 6)
        (hidden,) = f.run(ids=np.array([model.tokenizer.encode("the cat")], np.int32))
        pooled = np.concatenate([hidden[0, 0], hidden[0].mean(0)])
        wanted = np.tanh(w @ pooled + b)
        wanted /= np.linalg.norm(wanted)
        np.testing.assert_allclose(model.embed("cat"), wanted, rtol=0, atol=1e-5)
        np.testing.assert_allclose(model.embed(["cat", "a"])[0], wanted, rtol=0, atol=1e-5)
        np.testing.assert_allclose(model.embed("the cat", prompt=""), wanted, rtol=0, atol=1e-5)
        assert not np.allclose(model.embed("cat", prompt=""), wanted, atol=1e-3)


@pytest.mark.parametrize(
    ("modules", "error"),
    [
        ("{", rlx.FormatError),
        ("[3]", rlx.FormatError),
        ('[{"type": "a.Pooling", "path": "../x"}]', rlx.FormatError),
        ('[{"type": "a.Pooling", "path": "/x"}]', rlx.FormatError),
        ('[{"type": "a.LSTM", "path": ""}]', rlx.UnsupportedError),
        ('[{"type": "a.Pooling", "path": "nowhere"}]', rlx.InputError),
    ],
)
def test_bad_modules_are_typed_errors(modules: str, error: type, tmp_path: Path) -> None:
    write_model(tmp_path)
    (tmp_path / "modules.json").write_text(modules)
    with pytest.raises(error):
        rlx.load(tmp_path)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"hidden_size": "wide"}, rlx.FormatError),
        ({"num_attention_heads": 5}, rlx.FormatError),
        ({"vocab_size": None}, rlx.FormatError),
        ({"hidden_act": "sparkle"}, rlx.UnsupportedError),
        ({"position_embedding_type": "relative_key"}, rlx.UnsupportedError),
    ],
)
def test_bad_configs_are_typed_errors(changes: dict[str, Any], error: type, tmp_path: Path) -> None:
    write_model(tmp_path, **changes)
    with pytest.raises(error):
        rlx.load(tmp_path)


def test_load_tells_kinds_of_models_apart(folder: Path, tmp_path: Path) -> None:
    write_language_model("llama", tmp_path)
    with pytest.raises(rlx.OptionError, match="encoders only"):
        rlx.load(tmp_path, dtype="bf16")
    with pytest.raises(rlx.OptionError, match="unknown type"):
        rlx.load(folder, dtype="int8")
    with pytest.raises(rlx.OptionError, match="not both"):
        rlx.load(folder, dtype="bf16", quant="int8")
    with pytest.raises(rlx.OptionError, match=r"\[context\]"):
        rlx.load(folder, context=41)
    for options in ({"kv": "q8_0"}, {"draft": "x"}, {"merge": True}, {"adapters": ["x"]}):
        with pytest.raises(rlx.OptionError, match="language models only"):
            rlx.load(folder, **options)
    for options in ({"context": "8"}, {"threads": 1.5}, {"quant": 8}):
        with pytest.raises(rlx.OptionError, match=next(iter(options))):
            rlx.load(folder, **options)
    write_language_model("llama", tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**settings, "model_type": "robberta"}))
    with pytest.raises(rlx.UnsupportedError, match="the nearest is roberta"):
        rlx.load(tmp_path)
    with rlx.load(folder, context=10) as model:
        assert isinstance(model, rlx.EncoderModel)
        assert model.max_tokens == 10


@pytest.mark.parametrize("name", ["bert", "nomic_bert", "modernbert"])
def test_gguf_gives_what_the_folder_gives(name: str, tmp_path: Path) -> None:
    write_model(tmp_path, name)
    write_gguf_copy(tmp_path, tmp_path / "model.gguf")
    ids = batch(name)[0][2:].astype(np.int32)
    file = ModelFile.open(tmp_path / "model.gguf")
    described = build_graph(file, file.weights(), EntryPoint("hidden"))
    f = rlx.Session("cpu").compile(described.module).set_params(described.params)
    wanted = np.load(GOLDENS / "encoders.npz")[f"{name}_hidden"][2]
    (got,) = f.run(ids=ids)
    np.testing.assert_allclose(got[0], wanted, rtol=0, atol=1e-5 * float(np.abs(wanted).max()))
    with rlx.load(tmp_path) as plain, rlx.load(tmp_path / "model.gguf") as packed:
        texts = ["the cats, a cat!", "", "xyz"]
        np.testing.assert_allclose(packed.embed(texts), plain.embed(texts), rtol=0, atol=1e-5)


def test_a_reranker_whose_classifier_is_not_whole(tmp_path: Path) -> None:
    """llama.cpp leaves out BERT's pooler, without which its classifier says nothing."""
    write_model(tmp_path)
    write_gguf_copy(tmp_path, tmp_path / "model.gguf", pooling=4)
    with pytest.raises(rlx.UnsupportedError, match="without the last layer of its classifier"):
        rlx.load(tmp_path / "model.gguf")


def test_real_weights_in_q8_0_stay_close(tmp_path: Path) -> None:
    assert MINILM is not None, "tests/install.py fetches the models that tests need"
    write_gguf_copy(MINILM, tmp_path / "minilm.gguf", "Q8_0")
    wanted = np.load(GOLDENS / "minilm.npz")["vectors"]
    with rlx.load(tmp_path / "minilm.gguf", context=256) as model:
        got = model.embed(SENTENCES, normalize=True, overlong="cut")
    assert (got * wanted).sum(-1).min() >= 0.995
