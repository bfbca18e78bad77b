"""Changes one field of config.json at a time, and holds RLX against transformers.

    python tests/fuzz/config_fields.py [MODEL_TYPE …]

Runs where torch and transformers are installed. Every field of transformers' own configuration
class takes other valid values, and so do older names that it still reads. The result must be that
of transformers, or a refusal that names the field: never a difference in silence. A folder whose
weights have other sizes than the changed field says must be refused too.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import logging
import shutil
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers.activations import ACT2CLS

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "goldens")]
from variants import DECODERS, ENCODERS, TOKENS, values  # noqa: E402

from rlx import CompileOptions, DimBinding, RlxError, Session  # noqa: E402
from rlx.models.builder import EntryPoint, build_graph  # noqa: E402
from rlx.models.decoder_runner import DecoderRunner  # noqa: E402
from rlx.models.model_file import ModelFile  # noqa: E402

Config = dict[str, Any]
_NONE = "a field of no name"  # where nothing may be refused
BAR = 1e-4  # of the largest value, in f32
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
_LLAMA3 = {
    "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip


def _long(width: int) -> Config:
    return {
        "rope_type": "longrope", "original_max_position_embeddings": 32,
        "short_factor": [1.0 + 0.1 * i for i in range(width // 2)],
        "long_factor": [2.0 + 0.3 * i for i in range(width // 2)],
    }  # fmt: skip


def _ropes(config: Config) -> list[Any]:
    """Every kind of rotary embedding, with every key that it has."""
    width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    width = config.get("qk_rope_head_dim", width)
    long, more = _long(width), {"attention_factor": 1.3, "rope_theta": 500.0}
    return [
        {"rope_type": "default", "rope_theta": 777.0},
        {"rope_type": "default", "rope_theta": 777.0, "partial_rotary_factor": 0.25},
        {"rope_type": "linear", "factor": 3.0},
        {"type": "linear", "factor": 3.0},
        {"rope_type": "dynamic", "factor": 3.0},
        _YARN,
        {**_YARN, **more, "beta_fast": 8.0, "beta_slow": 2.0},
        {**_YARN, "truncate": False},
        {**_YARN, "mscale": 0.7, "mscale_all_dim": 1.2},
        {**_YARN, "mscale_all_dim": 1.2},
        {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 8},
        _LLAMA3,
        {**_LLAMA3, "low_freq_factor": 2.0, "rope_theta": 500.0},
        long,
        {**long, **more},
        {**long, "factor": 2.0},
        {**long, "type": "su", "rope_type": "su"},
        {"rope_type": "proportional", "partial_rotary_factor": 0.5},
        {"rope_type": "proportional", "factor": 2.0},
        {"rope_type": "spiral", "factor": 2.0},
        {"full_attention": {"rope_type": "linear", "factor": 3.0}},
        {"sliding_attention": {"rope_type": "default", "rope_theta": 55.0}},
        {
            "full_attention": {**_YARN, "rope_theta": 77.0},
            "sliding_attention": {"rope_type": "linear", "factor": 2.0},
        },
    ]


_SLIDING, _FULL, _LINEAR = "sliding_attention", "full_attention", "linear_attention"
# values by field, where its type does not tell
_VALUES: dict[str, list[Any]] = {
    "num_key_value_heads": [3, 1, 2, None],
    "num_attention_heads": [6, 4, 2, 1],
    "n_head": [4, 1], "n_heads": [4, 1],
    "num_hidden_layers": [1, 3], "n_layer": [1, 3], "n_layers": [1, 3],
    "head_dim": [8, 16, 6, None],
    "hidden_size": [48, 30], "n_embd": [48, 30], "dim": [48],
    "sliding_window": [None, 1, 3, 100, 0],
    "max_window_layers": [0, 1, 2, 9],
    "sliding_window_pattern": [1, 2, 3],
    "full_attention_interval": [1, 2, 3],
    "global_attn_every_n_layers": [1, 3],
    "decoder_sparse_step": [1, 2, 3],
    "mlp_only_layers": [[0], [1], [0, 1]],
    "first_k_dense_replace": [0, 2],
    "num_experts_per_tok": [1, 3, 5],
    "n_shared_experts": [1, 3],
    "topk_method": ["group_limited_greedy", "noaux_tc"],
    "n_group": [5], "topk_group": [1],
    "q_lora_rank": [None, 8],
    "clip_qkv": [0.5, 3.0],
    "n_inner": [None, 17],
    "time_step_limit": [[0.2, 0.5], [0.0, 0.3], [0.0, {"__float__": "Infinity"}]],
    "n_groups": [5], "num_heads": [10], "expand": [1, 4],
    "attn_logit_softcapping": [None, 2.0, 30.0],
    "final_logit_softcapping": [None, 1.0, 30.0],
    "query_pre_attn_scalar": [256, 4],
    "swiglu_limit": [0.5, 2.0], "swiglu_alpha": [1.0],
    "is_causal": [False, True], "is_decoder": [True], "add_cross_attention": [True],
    "use_bidirectional_attention": [True, False, "all", "vision"],
    "quantization_config": [{"quant_method": "fp8"}, {"quant_method": "gptq", "bits": 4}],
    "pad_token_id": [0, 3], "type_vocab_size": [1, 3, 0],
    "relative_attention_num_buckets": [8, 16, 32], "max_relative_positions": [5, 20, -1],
    "position_buckets": [4, 8, -1], "pos_att_type": [["c2p"], "c2p|p2c", ["p2c"], None],
    "norm_rel_ebd": ["none"], "classifier_pooling": ["mean", "cls"], "embedding_size": [24, 12],
    "num_hidden_groups": [1, 2], "inner_group_num": [2], "local_attention": [2, 8, 100],
    "position_embedding_type": ["absolute", "relative_key", "rotary"],
    "conv_kernel_size": [3], "id2label": [{"0": "x"}, {str(i): str(i) for i in range(5)}],
    "max_position_embeddings": [48], "n_positions": [48],
    "partial_rotary_factor": [1.0, 0.25, 0.75], "rotary_pct": [1.0, 0.25],
    "original_max_position_embeddings": [16, 64],
    "attention_multiplier": [1.0, 0.1], "logit_scale": [1.0, 0.3],
    "chunk_size": [4, 16], "state_size": [12], "conv_kernel": [4, 2],
    "linear_num_key_heads": [3], "linear_num_value_heads": [6, 2], "linear_key_head_dim": [4],
    "linear_value_head_dim": [4], "linear_conv_kernel_dim": [4, 2], "vocab_size": [97],
    "num_local_experts": [3, 8], "num_experts": [3, 8], "n_routed_experts": [3, 8],
    "routed_scaling_factor": [2.5], "pooler_hidden_size": [12], "attention_head_size": [10],
}  # fmt: skip
# keys that are no fields of the classes, but that transformers reads, or that files of others have
_MORE = (
    "head_dim", "rope_theta", "rope_scaling", "partial_rotary_factor", "sliding_window",
    "sliding_window_pattern", "rope_local_base_freq", "rotary_pct", "rotary_emb_base",
    "original_max_position_embeddings", "full_attention_interval", "is_causal", "is_decoder",
    "attn_logit_softcapping", "final_logit_softcapping", "quantization_config", "layer_types",
    "global_attn_every_n_layers", "global_rope_theta", "local_rope_theta", "num_key_value_heads",
    "position_embedding_type", "share_att_key", "norm_rel_ebd", "position_buckets",
    "conv_kernel_size", "attention_bias", "mlp_bias", "norm_topk_prob", "use_sliding_window",
    "max_window_layers", "hidden_act", "embedding_multiplier", "pooler_hidden_size",
    "attention_head_size", "embedding_size", "tie_word_embeddings",
)  # fmt: skip
_PASSED = (
    "transformers_version", "architectures", "dtype", "output_hidden_states", "return_dict",
    "label2id", "problem_type", "vision_config", "text_config",
)  # fmt: skip


def alternatives(name: str, value: Any, config: Config) -> list[Any]:
    """Other valid values of a field."""
    layers = config.get("num_hidden_layers", 2)
    if name in ("hidden_act", "activation_function", "hidden_activation", "activation"):
        return [*ACT2CLS, "nonsense"]
    if name in ("classifier_activation", "pooler_hidden_act"):
        return ["relu", "tanh", "mish", "nonsense"]
    if name in ("rope_parameters", "rope_scaling"):
        return _ropes(config) if "hidden_size" in config else []
    if name == "layer_types":
        mixed = [(_SLIDING, _FULL)[i % 2] for i in range(layers)]
        hybrid = [(_FULL, _LINEAR)[i % 2] for i in range(layers)]
        return [[_FULL] * layers, [_SLIDING] * layers, mixed[::-1], mixed, hybrid, [_FULL]]
    if name in _VALUES:
        return _VALUES[name]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, 2 * value]
    if isinstance(value, float):
        return [2 * value, value / 8 + 0.01]
    if isinstance(value, str):
        return [f"{value}_other"]
    return [True, 0.3]


def reference(kind: str, folder: Path) -> dict[str, np.ndarray]:
    """What transformers gives for a folder; an error if it lacks a weight, or leaves one out."""
    encoder = kind in ENCODERS
    classes = ["AutoModel", "AutoModelForSequenceClassification"] if encoder else []
    found = {}
    for name in classes or ["AutoModelForCausalLM"]:
        model, told = getattr(transformers, name).from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
        if told["mismatched_keys"] or (name != "AutoModel" and told["missing_keys"]):
            raise ValueError(f"other weights: {told}")
        if name != "AutoModel" and told["unexpected_keys"]:
            raise ValueError(f"weights left: {told['unexpected_keys']}")
        with torch.no_grad():
            said = model.eval()(input_ids=torch.tensor([TOKENS]))
        found["hidden" if name == "AutoModel" else "scores" if encoder else "logits"] = (
            said.last_hidden_state if name == "AutoModel" else said.logits
        )[0].numpy()
    return found


def ours(kind: str, folder: Path) -> dict[str, np.ndarray]:
    """What RLX gives."""
    model, found = ModelFile.open(folder), {}
    ids = np.array([TOKENS], np.int32)
    if kind in ENCODERS:
        for output in ("hidden", "scores"):
            built = build_graph(model, model.weights(), EntryPoint(output))
            binding = DimBinding().set_live("batch", 1).set_live("seq", len(TOKENS))
            f = Session("reference").compile(built.module, CompileOptions(binding=binding))
            found[output] = f.set_params(built.params).run(ids=ids)[0][0]
        return found
    runner = DecoderRunner(model, device="reference", context=40, kv="f32")
    return {"logits": runner.rows(TOKENS)}


def write(kind: str, config: Config, folder: Path) -> None:
    """A folder with weights for a configuration, saved by transformers; config.json as it is."""
    made = transformers.CONFIG_MAPPING[kind](**copy.deepcopy(_untagged(config)))
    auto = "AutoModelForSequenceClassification" if kind in ENCODERS else "AutoModelForCausalLM"
    model = getattr(transformers, auto).from_config(
        made, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if tensor.is_floating_point():
                tensor.copy_(torch.from_numpy(values(kind, name, tuple(tensor.shape))))
    model.save_pretrained(folder)
    saved = json.loads((folder / "config.json").read_text())
    (folder / "saved.json").write_text(json.dumps(saved))
    full = {"model_type": kind, "architectures": saved["architectures"], **config}
    (folder / "config.json").write_text(json.dumps(full))


def _untagged(config: Config) -> Config:
    return {n: v for n, v in config.items() if n not in ("quantization_config", "time_step_limit")}


def verdict(kind: str, folder: Path, fields: list[str]) -> str:
    """ "equal", "refused", "invalid" where transformers cannot run it, or what is wrong.

    `fields` are those of which a refusal names one; none: the weights may be of other sizes, and
    what transformers refuses must be refused.
    """
    wanted: Any = None
    try:
        wanted = reference(kind, folder)
    except Exception as e:  # an invalid value: transformers raises all kinds
        wanted = f"{type(e).__name__}: {e}"[:120]
        if fields:
            return "invalid"
    try:
        got = ours(kind, folder)
    except RlxError as e:
        if fields and not any(f in str(e) for f in fields):
            return f"WRONG: refused without a name of {fields}: {e}"
        return "invalid" if isinstance(wanted, str) else "refused"
    except Exception as e:
        return f"WRONG: {type(e).__name__}: {e}"[:300]
    if isinstance(wanted, str):
        return f"WRONG: runs, where transformers says {wanted}"
    for output, value in wanted.items():
        error = float(np.abs(got[output] - value).max() / np.abs(value).max())
        if not error <= BAR:
            return f"WRONG: {output} differ by {error:.2g}"
    return "equal"


def fuzz(kind: str, report: Any = print) -> list[str]:
    """All changes of one architecture; the lines about what is wrong."""
    base, wrong, counts = (DECODERS | ENCODERS)[kind], [], {}
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        write(kind, base, root / "good")

        def note(what: str, found: str) -> None:
            word = found.partition(":")[0]
            counts[word] = counts.get(word, 0) + 1
            if word == "WRONG":
                wrong.append(f"{kind} {what}: {found}")
                report(wrong[-1])

        note("as it is", verdict(kind, root / "good", [_NONE]))
        saved = shutil.copytree(root / "good", root / "saved")
        shutil.copy(saved / "saved.json", saved / "config.json")
        note("as transformers saves it", verdict(kind, saved, [_NONE]))
        for name, value in changes(kind, base):
            config = {**base, name: value}
            what, folder = f"{name} = {json.dumps(value)[:150]}", root / "changed"
            shutil.rmtree(folder, ignore_errors=True)
            try:
                write(kind, config, folder)
            except Exception:
                counts["invalid"] = counts.get("invalid", 0) + 1
                continue
            found = verdict(kind, folder, [name])
            note(what, found)
            if found == "invalid":
                continue
            # the same change over the weights of the good folder
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(root / "good", folder)
            full = json.loads((folder / "config.json").read_text()) | {name: value}
            (folder / "config.json").write_text(json.dumps(full))
            note(f"{what} over other weights", verdict(kind, folder, []))
    report(f"{kind}: {counts}")
    return wrong


def changes(kind: str, base: Config) -> list[tuple[str, Any]]:
    """(field, value) of all changes to a configuration."""
    made = transformers.CONFIG_MAPPING[kind]
    fields = {f.name: f.default for f in dataclasses.fields(made) if f.name not in _PASSED}
    fields |= {name: None for name in _MORE if name not in fields}
    found = []
    for name, default in fields.items():
        now = base.get(name, None if default is dataclasses.MISSING else default)
        for value in alternatives(name, now, base):
            if value != base.get(name, "absent"):
                found.append((name, value))
    return found


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    transformers.logging.set_verbosity(logging.CRITICAL)
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    failed: list[str] = []
    for each in sys.argv[1:] or [*DECODERS, *ENCODERS]:
        failed += fuzz(each, lambda line: print(line, flush=True))
    print(f"{len(failed)} wrong")
    sys.exit(bool(failed))
