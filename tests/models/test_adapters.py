"""LoRA adapters: the same as merged weights, chosen for each request, and files that are wrong."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "goldens"))
import gguf
from gguf_files import write_model
from test_generate import Letters
from tiny import (
    CONFIGS,
    HEADS,
    KV,
    PROMPT,
    shapes,
    weights,
    write_config,
    write_folder,
    write_safetensors,
)

import rlx
from rlx.errors import FormatError, InputError, OptionError, RlxError, UnsupportedError
from rlx.models.model_file import ModelFile
from rlx.models.rope_tables import pairs_apart, pairs_together

ATTENTION = ("q_proj", "v_proj")
EVERYTHING = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
Tensors = dict[str, np.ndarray]


@pytest.fixture(autouse=True)
def letters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelFile, "tokenizer", lambda self: Letters())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    write_folder("llama", path)
    return path


def low_rank(model: str, targets: tuple[str, ...], rank: int, seed: int = 0) -> Tensors:
    """A and B by module, as PEFT has them: [rank, in] and [out, rank]."""
    rng = np.random.default_rng(seed)
    found = {}
    for name, shape in shapes(CONFIGS[model]).items():
        module = name.removesuffix(".weight")
        if module.endswith(targets) and name != module:
            out, inner = shape if "gpt2" not in model else shape[::-1]
            found[f"{module}.lora_A.weight"] = rng.standard_normal((rank, inner), np.float32)
            found[f"{module}.lora_B.weight"] = rng.standard_normal((out, rank), np.float32) * 0.1
    return {f"base_model.model.{n}": np.asarray(x, np.float32) for n, x in found.items()}


def write_peft(path: Path, tensors: Tensors, rank: int, **settings: Any) -> Path:
    path.mkdir(exist_ok=True)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, **settings}
    (path / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    write_safetensors(path / "adapter_model.safetensors", tensors)
    return path


def write_merged(
    path: Path, model: str, tensors: Tensors, scale: float, base: Tensors | None = None
) -> Path:
    """The model with the adapter's products in its weights."""
    path.mkdir()
    write_config(model, path)
    made = weights(model) if base is None else base
    for name, a in tensors.items():
        if ".lora_A." in name:
            stored = name.removeprefix("base_model.model.").replace(".lora_A.", ".")
            change = scale * tensors[name.replace("lora_A", "lora_B")] @ a
            made[stored] = made[stored] + (change.T if model == "gpt2" else change)
    write_safetensors(path / "model.safetensors", made)
    return path


def load(path: Path, **options: Any) -> Any:
    return rlx.load(path, context=40, kv="f32", **options)


def same(got: np.ndarray, wanted: np.ndarray) -> None:
    """f32 all the way, sums in another order."""
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-5 * float(np.abs(wanted).max()))


@pytest.mark.parametrize(
    ("name", "targets", "rank"),
    [
        ("llama", EVERYTHING, 4),
        ("llama", (*ATTENTION, "lm_head"), 9),
        ("qwen2", ATTENTION, 8),  # with biases
        ("gpt2", ("c_attn", "c_fc"), 3),  # stored [in, out], an activation after the product
        ("mamba2", ("in_proj", "out_proj"), 2),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_unmerged_and_merged_equal_changed_weights(
    name: str, targets: tuple[str, ...], rank: int, device: str, tmp_path: Path
) -> None:
    (tmp_path / "base").mkdir()
    write_folder(name, tmp_path / "base")
    tensors = low_rank(name, targets, rank)
    adapter = write_peft(tmp_path / "adapter", tensors, rank)
    with load(write_merged(tmp_path / "merged", name, tensors, 2.0), device=device) as changed:
        wanted = changed.logits(PROMPT)
    with load(tmp_path / "base", device=device, adapters=[adapter]) as model:
        plain = model.logits(PROMPT)
        same(model.logits(PROMPT, adapter="adapter"), wanted)
        np.testing.assert_array_equal(model.logits(PROMPT), plain)
        assert np.abs(plain - wanted).max() > 0.1
    with load(tmp_path / "base", device=device, adapters=[adapter], merge=True) as model:
        same(model.logits(PROMPT), wanted)


def test_each_request_has_its_own(folder: Path, tmp_path: Path) -> None:
    """Also where answers take turns; the cache of one adapter is nothing to another."""
    settings = {"temperature": 0.0, "max_tokens": 8}
    wanted = {}
    with load(folder) as model:
        for name, rank in {"one": 4, "two": 8, "wide": 20}.items():
            tensors = low_rank("llama", EVERYTHING, rank, seed=rank)
            write_peft(tmp_path / name, tensors, rank)
            assert model.load_adapter(tmp_path / name) == name
            with load(write_merged(tmp_path / f"{name}_merged", "llama", tensors, 2.0)) as changed:
                wanted[name] = changed.generate(PROMPT, stream=False, **settings).tokens
        with load(folder) as base:
            wanted[None] = base.generate(PROMPT, stream=False, **settings).tokens
        assert len({tuple(w) for w in wanted.values()}) == 4
        streams = {n: model.generate(PROMPT, adapter=n, **settings) for n in wanted}
        for _ in range(8):
            for stream in streams.values():
                next(stream)
        assert {n: s.result.tokens for n, s in streams.items()} == wanted
        again = model.generate(PROMPT, stream=False, adapter="one", **settings)
        assert (again.tokens, again.reused_tokens) == (wanted["one"], 0)
        again = model.generate(PROMPT, stream=False, adapter="one", **settings)
        assert (again.tokens, again.reused_tokens) == (wanted["one"], len(PROMPT) - 1)
        drafted = model.generate(PROMPT, stream=False, adapter="one", speculate=3, **settings)
        assert drafted.tokens == wanted["one"]


def test_adapters_of_one_shape_share_executables(folder: Path, tmp_path: Path) -> None:
    with load(folder) as model:
        for name, rank in {"a": 3, "b": 8}.items():
            tensors = low_rank("llama", ATTENTION, rank, seed=rank)
            model.load_adapter(write_peft(tmp_path / name, tensors, rank))
        first = model.logits(PROMPT, adapter="a")
        made = set(model.runner._by_entry_point)
        second = model.logits(PROMPT, adapter="b")
        assert set(model.runner._by_entry_point) == made
        assert np.abs(first - second).max() > 0.1
        np.testing.assert_array_equal(model.logits(PROMPT, adapter="a"), first)


def test_beside_packed_weights(tmp_path: Path) -> None:
    """What an adapter adds is not quantised: it is added to what blocks of Q8_0 stand for."""
    tensors = low_rank("llama", EVERYTHING, 4)
    adapter = write_peft(tmp_path / "adapter", tensors, 4)
    write_model("llama", tmp_path / "packed.gguf", _packed)
    kind = gguf.GGMLQuantizationType.Q8_0
    base = {
        name: gguf.quants.dequantize(gguf.quants.quantize(x, kind), kind) if "_proj" in name else x
        for name, x in weights("llama").items()
    }
    with load(write_merged(tmp_path / "merged", "llama", tensors, 2.0, base)) as changed:
        wanted = changed.logits(PROMPT)
    with load(tmp_path / "packed.gguf", adapters=[adapter], device="reference") as model:
        same(model.logits(PROMPT, adapter="adapter"), wanted)
    with load(tmp_path / "packed.gguf", adapters=[adapter]) as model:  # rows of x are rounded, too
        error = model.logits(PROMPT, adapter="adapter") - wanted
        assert np.square(error).mean() < 1e-3 * np.square(wanted).mean()
    model = load(tmp_path / "packed.gguf", adapters=[adapter], merge=True)
    with model, pytest.raises(UnsupportedError, match="packed"):
        model.logits(PROMPT)


def _packed(name: str, array: np.ndarray) -> Any:
    kind = gguf.GGMLQuantizationType.Q8_0
    is_matrix = array.ndim == 2 and name.startswith("blk.")
    return (gguf.quants.quantize(array, kind), kind) if is_matrix else None


def write_gguf(path: Path, arch: str, tensors: Tensors, alpha: float, **meta: str) -> Path:
    """As convert_lora_to_gguf.py of llama.cpp does."""
    writer = gguf.GGUFWriter(path, arch)
    writer.add_type(meta.get("type", gguf.GGUFType.ADAPTER))
    writer.add_string(gguf.Keys.Adapter.TYPE, meta.get("adapter", "lora"))
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, alpha)
    for name, array in tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def as_gguf(tensors: Tensors) -> Tensors:
    """Names of llama.cpp; rows of q and k so that what turns together are neighbours."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 3)
    found = {}
    for name, array in tensors.items():
        module, part = (
            name.removeprefix("base_model.model.").removesuffix(".weight").split(".lora_")
        )
        if part == "B" and module.endswith(("q_proj", "k_proj")):
            array = pairs_together(array, HEADS if "q_proj" in module else KV)
        found[f"{names.get_name(module)}.weight.lora_{part.lower()}"] = array
    return found


def test_every_kind_of_adapter_for_every_kind_of_file(folder: Path, tmp_path: Path) -> None:
    tensors = low_rank("llama", EVERYTHING, 4)
    peft = write_peft(tmp_path / "peft", tensors, 4)
    packed = write_gguf(tmp_path / "packed.gguf", "llama", as_gguf(tensors), 8.0)
    write_model("llama", tmp_path / "model.gguf")
    with load(write_merged(tmp_path / "merged", "llama", tensors, 2.0)) as changed:
        wanted = changed.logits(PROMPT)
    for file in (folder, tmp_path / "model.gguf"):
        with load(file, adapters=[peft, packed]) as model:
            same(model.logits(PROMPT, adapter="peft"), wanted)
            same(model.logits(PROMPT, adapter="packed"), wanted)


def test_heads_in_another_order_are_refused(tmp_path: Path) -> None:
    write_model("qwen3_5", tmp_path / "model.gguf")
    with load(tmp_path / "model.gguf") as model:
        spread = write_peft(tmp_path / "spread", low_rank("qwen3_5", ("in_proj_z",), 4), 4)
        with pytest.raises(UnsupportedError, match="another order"):
            model.load_adapter(spread)
        plain = write_peft(tmp_path / "plain", low_rank("qwen3_5", ("up_proj",), 4), 4)
        got = model.logits(PROMPT, adapter=model.load_adapter(plain))
    changed = write_merged(
        tmp_path / "merged", "qwen3_5", low_rank("qwen3_5", ("up_proj",), 4), 2.0
    )
    with load(changed) as model:
        same(got, model.logits(PROMPT))


def test_rows_come_back() -> None:
    rows = np.arange(24.0).reshape(12, 2)
    np.testing.assert_array_equal(pairs_apart(pairs_together(rows, 3), 3), rows)


def test_scales_that_configurations_state(folder: Path, tmp_path: Path) -> None:
    tensors = low_rank("llama", ("q_proj",), 4)
    found = {}
    with load(folder) as model:
        for name, settings in {
            "plain": {"lora_alpha": 6.0},
            "roots": {"lora_alpha": 3.0, "use_rslora": True},
            "some": {"lora_alpha": 1, "alpha_pattern": {"q_proj": 6.0}, "r": 2,
                     "rank_pattern": {"self_attn.q_proj": 4}},
        }.items():  # fmt: skip
            model.load_adapter(write_peft(tmp_path / name, tensors, 4, **settings))
            found[name] = model.logits(PROMPT, adapter=name)
    same(found["roots"], found["plain"])
    same(found["some"], found["plain"])


def _without(part: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {n: x for n, x in tensors.items() if part not in n}


def _renamed(old: str, new: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {n.replace(old, new): x for n, x in tensors.items()}


@pytest.mark.parametrize(
    ("settings", "change", "error"),
    [
        ({"r": 5}, dict, FormatError),
        ({"r": "4"}, dict, FormatError),
        ({"lora_alpha": float("nan")}, dict, FormatError),
        ({"lora_alpha": None}, dict, FormatError),
        ({"peft_type": "IA3"}, dict, UnsupportedError),
        ({"use_dora": True}, dict, FormatError),
        ({"bias": "all"}, dict, UnsupportedError),
        ({"modules_to_save": ["lm_head"]}, dict, UnsupportedError),
        ({"rank_pattern": {"(a+)+$": 4}}, dict, UnsupportedError),
        ({"alpha_pattern": [1]}, dict, UnsupportedError),
        ({}, lambda tensors: {}, FormatError),
        ({}, _without("lora_B"), FormatError),
        ({}, _renamed("q_proj", "x_proj"), FormatError),
        ({}, _renamed("layers.0", "layers.7"), FormatError),
        ({}, _renamed("layers.0.self_attn.q_proj", "embed_tokens"), UnsupportedError),
        ({}, _renamed("layers.0.self_attn.q_proj", "layers.0.input_layernorm"), UnsupportedError),
        ({}, _renamed("lora_A", "lora_magnitude_vector"), UnsupportedError),
        ({}, lambda tensors: {n: x[:, :-1] for n, x in tensors.items()}, FormatError),
        ({}, lambda tensors: {n: x[None] for n, x in tensors.items()}, UnsupportedError),
        ({}, lambda tensors: {n: x.view(np.uint8) for n, x in tensors.items()}, UnsupportedError),
    ],
)
def test_what_does_not_fit_is_named(
    settings: dict[str, Any], change: Any, error: type[RlxError], folder: Path, tmp_path: Path
) -> None:
    tensors = change(low_rank("llama", ("q_proj",), 4))
    adapter = write_peft(tmp_path / "adapter", tensors, 4, **settings)
    with load(folder) as model:
        with pytest.raises(error):
            model.load_adapter(adapter)
        assert not model.adapters


def test_gguf_files_that_are_no_adapter_for_this(folder: Path, tmp_path: Path) -> None:
    tensors = as_gguf(low_rank("llama", ("q_proj",), 4))
    with load(folder) as model:
        for name, arch, meta, error in (
            ("arch.gguf", "qwen2", {}, FormatError),
            ("kind.gguf", "llama", {"type": "model"}, UnsupportedError),
            ("lora.gguf", "llama", {"adapter": "control_vector"}, UnsupportedError),
        ):
            with pytest.raises(error):
                model.load_adapter(write_gguf(tmp_path / name, arch, tensors, 8.0, **meta))
        write_model("llama", tmp_path / "model.gguf")
        with pytest.raises(FormatError):
            model.load_adapter(tmp_path / "model.gguf")


def test_names_and_uses_that_are_wrong(folder: Path, tmp_path: Path) -> None:
    adapter = write_peft(tmp_path / "adapter", low_rank("llama", ("q_proj",), 4), 4)
    with load(folder, adapters=[adapter]) as model:
        with pytest.raises(OptionError, match="loaded"):
            model.load_adapter(adapter)
        assert model.load_adapter(adapter, name="other") == "other"
        with pytest.raises(OptionError, match="adapter, other"):
            model.generate(PROMPT, adapter="third")
        with pytest.raises(OptionError):
            model.generate(PROMPT, adapter=3)
        with pytest.raises(InputError):
            model.load_adapter(tmp_path / "nothing")
        with pytest.raises(FormatError):
            model.load_adapter(folder)
    with pytest.raises(OptionError, match="loaded"):
        rlx.Engine(folder, requests=1, context=40, adapters=[adapter, adapter])
    with rlx.Engine(folder, requests=1, context=40) as engine, pytest.raises(OptionError):
        engine.submit(PROMPT, adapter="adapter")


def test_many_requests_with_adapters_of_their_own(folder: Path, tmp_path: Path) -> None:
    """Of other weights and ranks, the head among them; equal prompts share no page."""
    one = write_peft(tmp_path / "one", low_rank("llama", ATTENTION, 4, seed=1), 4)
    two = write_peft(tmp_path / "two", low_rank("llama", (*EVERYTHING, "lm_head"), 12, seed=2), 12)
    prompt = [int(t) for t in np.random.default_rng(3).integers(0, 90, 70)]  # more than a page
    asked = [(p, a) for p in (prompt, PROMPT) for a in ("one", None, "two")]
    same: dict[str, Any] = {"temperature": 0, "max_tokens": 8}
    with rlx.load(folder, adapters=[one, two], kv="f32") as model:
        wanted = [model.generate(p, stream=False, adapter=a, **same).tokens for p, a in asked]
    assert len({tuple(tokens) for tokens in wanted[:3]}) == 3
    with rlx.Engine(folder, requests=4, kv="f32", adapters=[one, two]) as engine:
        for _ in range(2):  # the second time pages are known
            replies = [engine.submit(p, adapter=a, **same) for p, a in asked]
            assert [reply.wait().tokens for reply in replies] == wanted
