"""Tiny models as llama.cpp's converter writes them: its names, its keys, its order of rows.

Names and keys come from the `gguf` package, so that none of ours can agree with itself alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tiny import CONFIGS, EXPERTS, HEAD, HEADS, KV, VOCAB, weights

ARCHS = {
    "gemma3_text": "gemma3", "mistral": "llama", "mixtral": "llama", "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe", "deepseek_v2": "deepseek2", "gpt_oss": "gpt-oss", "phi": "phi2",
    "gpt_neox": "gptneox", "qwen3_next": "qwen3next",
    "qwen3_5_text": "qwen35", "qwen3_5_moe_text": "qwen35moe",
}  # fmt: skip
Tensors = dict[str, np.ndarray]


def write_model(
    name: str, path: Path, pack: Callable[[str, np.ndarray], Any] | None = None
) -> None:
    """The tiny model `name`; `pack` may give (bytes, type) for a tensor that is not to be f32."""
    config = CONFIGS[name]
    kind = config["model_type"]
    arch = ARCHS.get(kind, kind)
    number = next(a for a, n in gguf.MODEL_ARCH_NAMES.items() if n == arch)
    writer = gguf.GGUFWriter(path, arch)
    _numbers(writer, config)
    names = gguf.get_tensor_name_map(number, config.get("num_hidden_layers", 3))
    for tensor, array in _converted(config, weights(name)).items():
        base, _, end = tensor.rpartition(".")
        found = names.get_name(base) or names.get_name(tensor)
        assert found is not None, f"llama.cpp has no name for {tensor}"
        bare = end in ("A_log", "D")
        stored = found if bare else f"{found}.{'bias' if end == 'bias' else 'weight'}"
        packed = pack(stored, array) if pack is not None else None
        if packed is None:
            writer.add_tensor(stored, np.ascontiguousarray(array, np.float32))
        else:
            writer.add_tensor(stored, packed[0], raw_dtype=packed[1])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def packed_experts(scheme: str) -> Callable[[str, np.ndarray], Any]:
    """A `pack` that puts the experts into blocks."""
    kind = gguf.GGMLQuantizationType[scheme]

    def pack(name: str, array: np.ndarray) -> Any:
        return (gguf.quants.quantize(array, kind), kind) if "_exps.weight" in name else None

    return pack


def _numbers(w: gguf.GGUFWriter, c: dict[str, Any]) -> None:
    if c["model_type"] == "gpt2":
        c = {
            "num_hidden_layers": c["n_layer"], "num_attention_heads": c["n_head"],
            "num_key_value_heads": c["n_head"], "hidden_size": c["n_embd"],
            "intermediate_size": 4 * c["n_embd"], "max_position_embeddings": c["n_positions"],
            "layer_norm_eps": c["layer_norm_epsilon"], **c,
        }  # fmt: skip
    w.add_vocab_size(VOCAB)
    if c["model_type"] == "mamba2":
        _mamba2_numbers(w, c)
        return
    given: dict[str, Callable[[Any], None]] = {
        "max_position_embeddings": w.add_context_length,
        "hidden_size": w.add_embedding_length,
        "num_hidden_layers": w.add_block_count,
        "intermediate_size": w.add_feed_forward_length,
        "num_attention_heads": w.add_head_count,
        "num_key_value_heads": w.add_head_count_kv,
        "rope_theta": w.add_rope_freq_base,
        "sliding_window": w.add_sliding_window,
        "attn_logit_softcapping": w.add_attn_logit_softcapping,
        "final_logit_softcapping": w.add_final_logit_softcapping,
        "embedding_multiplier": w.add_embedding_scale,
        "residual_multiplier": w.add_residual_scale,
        "attention_multiplier": w.add_attention_scale,
        "logits_scaling": w.add_logit_scale,
        "logit_scale": w.add_logit_scale,
        "use_parallel_residual": w.add_parallel_residual,
        "num_experts_per_tok": w.add_expert_used_count,
        "moe_intermediate_size": w.add_expert_feed_forward_length,
        "shared_expert_intermediate_size": w.add_expert_shared_feed_forward_length,
        "routed_scaling_factor": w.add_expert_weights_scale,
        "n_shared_experts": w.add_expert_shared_count,
        "first_k_dense_replace": w.add_leading_dense_block_count,
    }
    for key, add in given.items():
        if c.get(key) is not None:
            add(c[key])
    if "num_experts_per_tok" in c:
        w.add_expert_count(EXPERTS)
    centred = ("gpt2", "starcoder2", "stablelm", "cohere2", "phi", "gpt_neox")
    add_eps = w.add_layer_norm_eps if c["model_type"] in centred else w.add_layer_norm_rms_eps
    add_eps(1e-5)
    _rope(w, c)
    if "linear_conv_kernel_dim" in c:
        w.add_ssm_conv_kernel(c["linear_conv_kernel_dim"])
        w.add_ssm_state_size(c["linear_key_head_dim"])
        w.add_ssm_group_count(c["linear_num_key_heads"])
        w.add_ssm_time_step_rank(c["linear_num_value_heads"])
        w.add_ssm_inner_size(c["linear_value_head_dim"] * c["linear_num_value_heads"])
        w.add_full_attention_interval(c["full_attention_interval"])


def _mamba2_numbers(w: gguf.GGUFWriter, c: dict[str, Any]) -> None:
    w.add_context_length(2**20)
    w.add_embedding_length(c["hidden_size"])
    w.add_feed_forward_length(0)
    w.add_head_count(0)
    w.add_block_count(c["num_hidden_layers"])
    w.add_ssm_conv_kernel(c["conv_kernel"])
    w.add_ssm_inner_size(c["num_heads"] * c["head_dim"])
    w.add_ssm_state_size(c["state_size"])
    w.add_ssm_time_step_rank(c["num_heads"])
    w.add_ssm_group_count(c["n_groups"])
    w.add_layer_norm_rms_eps(c["layer_norm_epsilon"])


def _rope(w: gguf.GGUFWriter, c: dict[str, Any]) -> None:
    scaling = c.get("rope_scaling", {})
    kind = scaling.get("rope_type")
    if kind is not None:
        w.add_rope_scaling_type(gguf.RopeScalingType(kind))
        w.add_rope_scaling_factor(scaling["factor"])
    if kind == "yarn":
        w.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
    if "mscale_all_dim" in scaling:
        w.add_rope_scaling_yarn_log_mul(0.1 * scaling["mscale_all_dim"])
    share = c.get("partial_rotary_factor", c.get("rotary_pct"))
    if share is not None:
        w.add_rope_dimension_count(int(share * HEAD))
    if "kv_lora_rank" in c:
        rank, turned = c["kv_lora_rank"], c["qk_rope_head_dim"]
        w.add_kv_lora_rank(rank)
        w.add_rope_dimension_count(turned)
        w.add_key_length(rank + turned)
        w.add_value_length(rank)
        w.add_key_length_mla(c["qk_nope_head_dim"] + turned)
        w.add_value_length_mla(c["v_head_dim"])


def _converted(config: dict[str, Any], tensors: Tensors) -> Tensors:
    """Weights as the converter changes them."""
    kind = config["model_type"]
    if kind == "gpt_oss":
        tensors = _divided(tensors)
    made: Tensors = {}
    for name, array in tensors.items():
        found = re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+)\.weight", name)
        if found is not None:
            if found[2] == "0":
                rows = [tensors[f"{found[1]}.{e}.{found[3]}.weight"] for e in range(EXPERTS)]
                made[_expert_name(found[1], found[3])] = np.stack(rows)
        elif kind == "deepseek_v2" and "kv_b_proj" in name:
            made |= _unfolding(config, name, array)
        elif kind == "mamba2" or "linear_conv_kernel_dim" in config:
            made |= _recurrent(config, name, array)
        else:
            made[name] = _changed(kind, name, array)
    return made


def _expert_name(base: str, part: str) -> str:
    if "block_sparse_moe" in base:
        base = base.removeprefix("model.").replace("block_sparse_moe", "feed_forward")
    return f"{base}.{part}.weight"


def _changed(kind: str, name: str, array: np.ndarray) -> np.ndarray:
    if kind in ("llama", "mistral", "mixtral", "granite") and re.search(r"\.[qk]_proj\.", name):
        heads = HEADS if ".q_proj." in name else KV
        halves = array.reshape(heads, 2, -1, *array.shape[1:])  # pairs become neighbours
        return halves.swapaxes(1, 2).reshape(array.shape)
    if kind.startswith("gemma") and "norm" in name:
        return array + 1
    if kind == "gpt2" and re.search(r"\.c_\w+\.weight", name):
        return array.T
    if kind == "gpt_neox" and "query_key_value" in name:
        heads_first = array.reshape(HEADS, 3, HEAD, *array.shape[1:])
        return heads_first.swapaxes(0, 1).reshape(array.shape)
    return array


def _unfolding(config: dict[str, Any], name: str, joined: np.ndarray) -> Tensors:
    plain = config["qk_nope_head_dim"]
    heads = joined.reshape(HEADS, -1, joined.shape[1])
    return {
        name.replace("kv_b_proj", "k_b_proj"): heads[:, :plain].transpose(0, 2, 1),
        name.replace("kv_b_proj", "v_b_proj"): heads[:, plain:],
    }


def _recurrent(config: dict[str, Any], name: str, array: np.ndarray) -> Tensors:
    if config["model_type"].startswith("qwen3_5") and "linear_attn" in name:
        array = _all_of(config, name.rpartition("linear_attn.")[2], array)
    if name.endswith("A_log"):
        array = -np.exp(array)
    if name.endswith(("A_log", "mixer.D")) and config["model_type"] == "mamba2":
        array = array[:, None]
    if name.endswith("mixer.norm.weight"):
        array = array.reshape(config["n_groups"], -1)
    if name.endswith("conv1d.weight"):
        array = array[:, 0]
    if name.endswith("dt_bias"):
        name = name.replace("dt_bias", "dt_proj.bias")
    if re.search(r"norm\.weight", name) and "linear" not in name and "backbone" not in name:
        array = array + 1
    if name.endswith("experts.gate_up_proj"):
        gate, up = np.split(array, 2, axis=1)
        base = name.removesuffix("gate_up_proj")
        return {f"{base}gate_proj.weight": gate, f"{base}up_proj.weight": up}
    if "in_proj_qkvz" not in name:
        return {name: array}
    groups, key = config["linear_num_key_heads"], config["linear_key_head_dim"]
    values = config["linear_num_value_heads"] // groups * config["linear_value_head_dim"]
    heads = array.reshape(groups, -1, array.shape[1])
    q, k, v, z = np.split(heads, [key, 2 * key, 2 * key + values], axis=1)
    rows = [part.reshape(-1, array.shape[1]) for part in (q, k, v)]
    return {  # by the names that the map has for them
        name.replace("in_proj_qkvz", "in_proj_qkv"): np.concatenate(rows),
        name.replace("in_proj_qkvz", "in_proj_z"): z.reshape(-1, array.shape[1]),
    }


def _all_of(config: dict[str, Any], name: str, array: np.ndarray) -> np.ndarray:
    """Heads of values as qwen35 has them: the first of each key, the second of each, …"""
    groups, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    keys, width = 2 * groups * config["linear_key_head_dim"], config["linear_value_head_dim"]
    if name.startswith("norm."):
        return array
    if name.startswith("out_proj."):
        columns = array.reshape(-1, groups, heads // groups, width)
        return columns.swapaxes(1, 2).reshape(array.shape)
    first = keys if name.startswith(("in_proj_qkv.", "conv1d.")) else 0
    rows = array[first:].reshape(groups, heads // groups, -1, *array.shape[1:])
    return np.concatenate([array[:first], rows.swapaxes(0, 1).reshape(array[first:].shape)])


def _divided(tensors: Tensors) -> Tensors:
    """gpt-oss: gate and up apart, all weights [experts, out, in]."""
    made: Tensors = {}
    for name, array in tensors.items():
        base, is_bias = name.removesuffix("_bias"), name.endswith("_bias")
        end = ".bias" if is_bias else ".weight"
        turned = array if is_bias or ".experts." not in name else array.swapaxes(1, 2)
        if base.endswith("gate_up_proj"):
            stem = base.removesuffix("gate_up_proj")
            made[f"{stem}gate_proj{end}"] = turned[:, 0::2]
            made[f"{stem}up_proj{end}"] = turned[:, 1::2]
        elif base.endswith("experts.down_proj"):
            made[base + end] = turned
        else:
            made[name] = array
    return made
