"""Every field is applied or refused, every tensor used or refused: before anything is built."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "goldens"))
from gguf_files import write_model
from test_variants import GOLDEN, write_variant
from tiny import write_safetensors
from variants import DECODERS, ENCODERS

import rlx
from rlx.formats.gguf import GgufFile
from rlx.formats.gguf.writer import write_gguf
from rlx.formats.hf import HfFolder
from rlx.models.arch import architecture, encoder_architecture
from rlx.models.config_hf import HF_ENCODERS
from rlx.models.model_file import ModelFile


def change(folder: Path, fields: dict[str, Any], drop: tuple[str, ...] = ()) -> Path:
    path = folder / "config.json"
    given = json.loads(path.read_text(encoding="utf-8")) | fields
    kept = {name: value for name, value in given.items() if name not in drop}
    path.write_text(json.dumps(kept), encoding="utf-8")
    return folder


def add_tensors(folder: Path, more: dict[str, tuple[int, ...]], drop: str = "") -> Path:
    with HfFolder(folder) as file:
        arrays = {n: np.array(file.array(n)) for n in file.tensors if not drop or drop not in n}
    arrays |= {name: np.ones(shape, np.float32) for name, shape in more.items()}
    write_safetensors(folder / "model.safetensors", arrays)
    return folder


@pytest.mark.parametrize("method", ["bitsandbytes", "torchao", "hqq"])
def test_quantised_folders_are_refused_by_method(method: str, tmp_path: Path) -> None:
    folder = change(
        write_variant("llama_saved", tmp_path), {"quantization_config": {"quant_method": method}}
    )
    with pytest.raises(rlx.UnsupportedError, match=f"quantization_config.*got '{method}'"):
        rlx.load(folder)


@pytest.mark.parametrize("method", ["fp8", "compressed-tensors", "gptq", "awq"])
def test_a_method_that_no_matrix_follows_is_refused(method: str, tmp_path: Path) -> None:
    settings = {"quant_method": method, "bits": 4}
    folder = change(write_variant("llama_saved", tmp_path), {"quantization_config": settings})
    with pytest.raises(rlx.FormatError, match=f"quantization_config.*got {method}"):
        rlx.load(folder)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("llama_saved", {"hidden_act": "nonsense"}),
        ("llama_saved", {"hidden_act": "prelu"}),  # with weights of its own
        ("llama_saved", {"is_causal": False}),
        ("llama_saved", {"attn_logit_softcapping": 30.0}),
        ("llama_saved", {"partial_rotary_factor": 0.5}),
        ("llama_saved", {"something_new": 3}),
        ("llama_saved", {"rope_scaling": {"rope_type": "spiral", "factor": 2.0}}),
        ("llama_saved", {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "bend": 1}}),
        ("llama_saved", {"rope_scaling": {"rope_type": "yarn"}}),
        ("gemma3_text_saved", {"use_bidirectional_attention": True}),
        ("gemma3_text_saved", {"sliding_window": None}),
        ("qwen2_saved", {"layer_types": ["full_attention"]}),
        ("qwen2_saved", {"layer_types": ["chunked_attention"] * 2}),
        ("qwen2_saved", {"use_sliding_window": False, "layer_types": ["sliding_attention"] * 2}),
        ("olmoe_saved", {"clip_qkv": 2.0}),
        ("stablelm_saved", {"qk_layernorm": True}),
        ("deepseek_v2_saved", {"topk_method": "group_limited_greedy"}),
        ("bert_saved", {"is_decoder": True}),
        ("nomic_bert_saved", {"rope_parameters": {"rope_type": "longrope"}}),
        ("mpnet_saved", {"relative_attention_num_buckets": 16}),
    ],
)
def test_fields_that_would_change_results_are_named(
    name: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    folder = change(write_variant(name, tmp_path), fields)
    with pytest.raises(rlx.UnsupportedError, match=list(fields)[-1]):
        rlx.load(folder)


def test_fields_that_say_nothing_pass(tmp_path: Path) -> None:
    harmless = {"attention_dropout": 0.3, "eos_token_id": 7, "temperature": 2.0, "unsloth_fixed": 1}
    unset = {"sliding_window": 4, "no_such_feature": False, "nor_this": None}  # llama has no window
    folder = change(write_variant("llama_saved", tmp_path), harmless | unset)
    assert ModelFile.open(folder).config.sliding_window == 0


@pytest.mark.parametrize(
    ("name", "more", "problem"),
    [
        ("llama_saved", {"model.layers.0.self_attn.q_proj.bias": (36,)}, "attention_bias"),
        ("llama_saved", {"model.layers.1.self_attn.q_norm.weight": (12,)}, "q_norm"),
        ("llama_saved", {"model.layers.0.mlp.gate_proj.weight_scale": (36, 1)}, "weight_scale"),
        ("deepseek_v2_saved", {"model.layers.0.mlp.up_proj.bias": (36,)}, "mlp_bias"),
        ("bert_saved", {"bert.encoder.adapter.weight": (3, 3)}, "adapter"),
    ],
)
def test_tensors_that_are_not_read_are_listed(
    name: str, more: dict[str, tuple[int, ...]], problem: str, tmp_path: Path
) -> None:
    folder = add_tensors(write_variant(name, tmp_path), more)
    with pytest.raises(rlx.UnsupportedError, match=problem) as caught:
        rlx.load(folder)
    assert next(iter(more)) in str(caught.value)


def test_buffers_that_follow_from_the_configuration_pass(tmp_path: Path) -> None:
    buffers = {"model.layers.0.self_attn.rotary_emb.inv_freq": (6,), "model.position_ids": (1, 64)}
    ModelFile.open(add_tensors(write_variant("llama_saved", tmp_path), buffers))


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"hidden_size": 48}, r"embed_tokens.weight .*got \(61, 24\).*hidden_size"),
        ({"vocab_size": 60}, r"embed_tokens.weight .*vocab_size"),
        ({"num_attention_heads": 6}, r"q_proj.weight .*num_attention_heads head_dim"),
        ({"intermediate_size": 40}, r"gate_proj.weight .*intermediate_size"),
        ({"num_hidden_layers": 1}, "more layers than num_hidden_layers"),
        ({"num_hidden_layers": 3}, "a weight is missing.*model.layers.2"),
        ({"attention_bias": True}, "q_proj.bias(.|\n)*attention_bias"),
    ],
)
def test_sizes_that_are_not_those_of_the_weights_are_named(
    fields: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    folder = change(write_variant("llama_saved", tmp_path), fields)
    with pytest.raises(rlx.FormatError, match=problem):
        rlx.load(folder)


def test_an_untied_head_must_be_there(tmp_path: Path) -> None:
    folder = add_tensors(write_variant("llama_saved", tmp_path), {}, drop="lm_head")
    with pytest.raises(rlx.FormatError, match=r"lm_head.weight(.|\n)*tie_word_embeddings"):
        rlx.load(folder)
    ModelFile.open(change(folder, {"tie_word_embeddings": True}))


def test_gpt2_without_positions_takes_the_default(tmp_path: Path) -> None:
    folder = change(write_variant("gpt2_saved", tmp_path), {}, drop=("n_positions",))
    with pytest.raises(rlx.FormatError, match=r"wpe.weight .*expected \(1024, 24\)"):
        rlx.load(folder)


@pytest.mark.parametrize("kind", [*DECODERS, *ENCODERS])
def test_declared_defaults_are_those_of_transformers(kind: str) -> None:
    """The golden has the defaults of its configuration classes."""
    if kind in ENCODERS:
        page = encoder_architecture(HF_ENCODERS[kind])
    else:
        page = architecture(kind.removesuffix("_text"))
    wanted, checked = json.loads(bytes(GOLDEN[f"{kind}/defaults"])), 0
    for name, field in page.FIELDS.items():
        stored = [wanted[n] for n in (name, *field.also) if n in wanted]
        # XLM-RoBERTa shares a page with RoBERTa, whose vocabulary is another
        if (
            not stored
            or isinstance(field.default, (dict, list))
            or kind + name == "robertavocab_size"
        ):
            continue
        default = False if stored[0] is None and field.type is bool else stored[0]
        assert field.default == default, name
        checked += 1
    assert checked >= 7


_HOSTILE = (
    -1, 0, 2**40, 10**400, 1e300, float("nan"), float("inf"), "x", [], {}, [None], True, [-1, "y"],
    {"rope_type": []}, {"rope_type": "yarn", "factor": 0}, {"full_attention": {"factor": "z"}},
    {"rope_type": "llama3", "factor": 2, "low_freq_factor": 0, "high_freq_factor": 0},
    {"rope_type": "longrope", "short_factor": [0], "long_factor": "no"}, {"__float__": "NaN"},
)  # fmt: skip


@pytest.mark.parametrize("kind", [*DECODERS, *ENCODERS])
def test_hostile_values_give_typed_errors(kind: str, tmp_path: Path) -> None:
    """Every third value for a field, in turn: all fields and all values of every page."""
    check_hostile(kind, tmp_path, every=3)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", [*DECODERS, *ENCODERS])
def test_all_hostile_values_give_typed_errors(kind: str, tmp_path: Path) -> None:
    check_hostile(kind, tmp_path, every=1)


def check_hostile(kind: str, tmp_path: Path, every: int) -> None:
    """No field of any page takes a value that ends in anything but a typed error, or a model."""
    with HfFolder(write_variant(f"{kind}_saved", tmp_path)) as folder:
        fields, good = sorted(folder.config), dict(folder.config)
        page = HF_ENCODERS.get(kind)
        known = encoder_architecture(page) if page else architecture(kind.removesuffix("_text"))
        for i, name in enumerate(sorted({*fields, *known.FIELDS})):
            for value in _HOSTILE[i % every :: every]:
                folder.config = {**good, name: value}
                with contextlib.suppress(rlx.RlxError):
                    ModelFile.of(tmp_path, folder)


# -- GGUF ------------------------------------------------------------------------------------------


def changed_gguf(folder: Path, name: str, keys: dict[str, Any], tensors: dict[str, Any]) -> Path:
    write_model(name, folder / "good.gguf")
    with GgufFile(folder / "good.gguf") as file:
        arrays = {n: np.array(file.array(n)) for n in file.tensors}
        write_gguf(folder / "changed.gguf", {**file.metadata, **keys}, {**arrays, **tensors})
    return folder / "changed.gguf"


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("llama", "llama.attention.clamp_kqv", 3.0),
        ("llama", "llama.attention.max_alibi_bias", 8.0),
        ("llama", "llama.attention.causal", False),
        ("llama", "llama.rope.scaling.yarn_ext_factor", 0.5),
        ("llama", "llama.rope.scaling.type", "spiral"),
        ("llama", "llama.attention.value_length", 8),
        ("olmoe", "olmoe.expert_group_count", 2),
        ("gemma3", "gemma3.attention.sliding_window_pattern", [True]),
    ],
)
def test_gguf_keys_that_would_change_results_are_named(
    name: str, key: str, value: Any, tmp_path: Path
) -> None:
    path = changed_gguf(tmp_path, name, {key: value}, {})
    with pytest.raises(rlx.UnsupportedError, match=key.rpartition(".")[2].replace("_", ".")):
        rlx.load(path)


def test_gguf_windows_and_bases_are_read(tmp_path: Path) -> None:
    keys = {"gemma3.attention.sliding_window_pattern": 2, "gemma3.rope.freq_base_swa": 55.0}
    config = ModelFile.open(changed_gguf(tmp_path, "gemma3", keys, {})).config
    assert config.window_layers == {0, 2, 4, 6}
    assert config.local_rope is not None and config.local_rope.theta == 55.0


def test_gguf_tensors_that_are_not_read_are_listed(tmp_path: Path) -> None:
    more = {"blk.0.attn_q.scale": np.ones(1, np.float32)}
    with pytest.raises(rlx.UnsupportedError, match=r"blk\.0\.attn_q\.scale"):
        rlx.load(changed_gguf(tmp_path, "llama", {}, more))
    wrong = {"blk.1.ffn_up.weight": np.ones((95, 64), np.float32)}
    with pytest.raises(rlx.FormatError, match=r"ffn_up.weight .*got \(95, 64\)"):
        rlx.load(changed_gguf(tmp_path, "llama", {}, wrong))
