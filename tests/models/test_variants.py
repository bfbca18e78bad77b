"""Every declared field of every architecture against transformers, on small configurations."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "goldens"))
from tiny import write_safetensors
from variants import ENCODERS, TOKENS, VARIANTS, config, values

from rlx import CompileOptions, DimBinding, Session, UnsupportedError
from rlx.models.arch import architecture, encoder_architecture
from rlx.models.batch.kv_pool import KVPool
from rlx.models.builder import LOGITS, EntryPoint, build_graph
from rlx.models.config_fields import Field
from rlx.models.config_hf import HF_ENCODERS
from rlx.models.decoder_runner import DecoderRunner
from rlx.models.model_file import ModelFile
from rlx.models.recurrent import CARRIED
from rlx.models.rope_tables import LONG_ROPE

GOLDEN = np.load(Path(__file__).resolve().parent.parent / "goldens" / "variants.npz")
CONTEXT = 32
IDS = np.array([TOKENS], np.int32)
DECODERS = [name for name, (kind, _) in VARIANTS.items() if kind not in ENCODERS]
DEVICES = ["reference", pytest.param("cpu", marks=pytest.mark.slow)]


def write_variant(name: str, folder: Path) -> Path:
    """The folder of a variant, with weights from its seed."""
    stored = f"{name}/config"
    text = bytes(GOLDEN[stored]) if stored in GOLDEN else json.dumps(config(name)).encode()
    (folder / "config.json").write_bytes(text)
    shapes = json.loads(bytes(GOLDEN[f"{name}/tensors"]))
    arrays = {tensor: values(name, tensor, tuple(shape)) for tensor, shape in shapes.items()}
    write_safetensors(folder / "model.safetensors", arrays)
    return folder


def close(got: Any, wanted: Any) -> None:
    """f32 all the way, at most three layers: 1e-4 of the largest value is the stated bar, a hundred
    times what is seen."""
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-4 * float(np.abs(wanted).max()))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", DECODERS)
def test_prompt_chunks_and_tokens_equal_transformers(
    name: str, device: str, tmp_path: Path
) -> None:
    model = ModelFile.open(write_variant(name, tmp_path))
    built = build_graph(model, model.weights(), LOGITS, context=CONTEXT, kv="f32")
    binding = DimBinding().set_live("seq", CONTEXT).set_live("past_seq", CONTEXT - 1)
    f = Session(device).compile(built.module, CompileOptions(binding=binding))
    f.set_params(built.params)
    switch = model.config.rope.switches_at(CONTEXT)
    wanted = GOLDEN[f"{name}/logits"]

    def run(start: int, stop: int) -> None:
        for state in f.manifest.states:
            if start == 0 and state.name.startswith(CARRIED):
                f.read_state(state.name).fill(0)
            if state.name == LONG_ROPE:  # as the runner sets it for so long a sequence
                f.read_state(state.name).fill(len(TOKENS) > switch)
        (logits,) = f.run(ids=IDS[:, start:stop], sizes={"past_seq": start})
        close(logits[0], wanted[start:stop])

    run(0, len(TOKENS))
    for start, stop in ((0, 3), (3, 10), (10, len(TOKENS))):
        run(start, stop)
    for i in range(len(TOKENS)):
        run(i, i + 1)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", [name for name in VARIANTS if name not in DECODERS])
def test_encoders_equal_transformers(name: str, device: str, tmp_path: Path) -> None:
    model = ModelFile.open(write_variant(name, tmp_path))
    for output, golden in (("hidden", "hidden"), ("scores", "logits")):
        built = build_graph(model, model.weights(), EntryPoint(output))
        binding = DimBinding().set_live("batch", 1).set_live("seq", len(TOKENS))
        f = Session(device).compile(built.module, CompileOptions(binding=binding))
        (got,) = f.set_params(built.params).run(ids=IDS)
        close(got[0], GOLDEN[f"{name}/{golden}"])


def test_longrope_is_chosen_by_the_length_of_the_sequence(tmp_path: Path) -> None:
    """Eight tokens have the short factors, more have the long ones from the beginning: a generation
    that outgrows the original context draws what prompts of each length draw."""
    model = ModelFile.open(write_variant("phi3_long", tmp_path))
    assert model.config.rope.switches_at(CONTEXT) == 8

    def runner() -> DecoderRunner:
        return DecoderRunner(model, device="reference", context=CONTEXT, kv="f32", chunk=5)

    one = runner()
    close(one.rows(TOKENS), GOLDEN["phi3_long/logits"])
    short = one.rows(TOKENS[:6])
    assert np.abs(short - GOLDEN["phi3_long/logits"][:6]).max() > 0.1  # the other factors
    rng, settings = np.array([1, 2], np.uint64), np.array([0, 0, 1, 0], np.float32)  # greedy
    close(one.rows(TOKENS[:6]), short)  # back to short ones
    one.tokens, seen = [], TOKENS[:6]
    token, _ = one.step(seen, rng, settings)
    while len(seen) < 14:
        wanted = runner().rows(seen)[-1]
        close(one.last_logits.reshape(-1), wanted)
        assert token == int(wanted.argmax())
        seen = [*seen, token]
        (*more, token), _ = one.decode_n(token, rng, settings, 4, ())
        seen += more


def test_batches_stay_within_the_original_context(tmp_path: Path) -> None:
    folder = write_variant("phi3_long", tmp_path)
    with pytest.raises(UnsupportedError, match="longrope"):
        KVPool.of(ModelFile.open(folder), context=CONTEXT)
    assert KVPool.of(ModelFile.open(folder), context=8).context == 8


@pytest.mark.parametrize("kind", dict.fromkeys(kind for kind, _ in VARIANTS.values()))
def test_every_declared_field_differs_from_its_default_somewhere(kind: str) -> None:
    """Else a page could leave it out, and no golden would tell."""
    if kind in ENCODERS:
        page = encoder_architecture(HF_ENCODERS[kind])
    else:
        page = architecture(kind.removesuffix("_text"))
    # types that share a page share their variants
    same = [t for t in HF_ENCODERS if HF_ENCODERS.get(t) == HF_ENCODERS.get(kind, "")] or [kind]
    configs = [config(name) for name, (k, _) in VARIANTS.items() if k in same]
    assert [f for f in page.FIELDS if not _is_tried(f, page.FIELDS[f], configs)] == []


# of folders that only first releases have, and names for what others say; tests/fuzz has them
_OLDER = (
    "architectures", "num_labels", "rotary_emb_base", "max_trained_positions",
    "rotary_scaling_factor", "qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias", "expand",
    "pooler_hidden_size", "attention_head_size", "sinusoidal_pos_embds",
)  # fmt: skip
_SAME_AS_OTHERS = {  # it must be what follows from other fields
    "gpt_neox": ("head_dim", "num_key_value_heads"), "stablelm": ("head_dim",),
    "nomic_bert": ("head_dim",), "deberta-v2": ("embedding_size",), "olmoe": ("head_dim",),
    "deepseek_v2": ("num_key_value_heads", "partial_rotary_factor"),
}  # fmt: skip


def _is_tried(name: str, field: Field, configs: list[dict[str, Any]]) -> bool:
    if field.values or name in (*_OLDER, *_SAME_AS_OTHERS.get(configs[0]["model_type"], ())):
        return True
    names = (name, *field.also)
    inner = [v for c in configs for n, v in c.items() if n in ("rope_parameters", "rope_scaling")]
    inner += [v for c in inner for v in c.values() if isinstance(v, dict)]
    ropes = ("rope_parameters", "rope_scaling")
    if name in ropes:
        return bool(inner)
    return any(c[n] != field.default for c in (*configs, *inner) for n in names if n in c)
