"""Keys: the same in every process, different for different contents."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys

import pytest

from rlx.errors import OptionError
from rlx.ir.binding import UpTo
from rlx.specialize.compile_profile import CompileProfile, KernelDispatchConfig, KernelPolicy
from rlx.specialize.options import CompilationMode, LayerComposition, ModelComponent
from rlx.specialize.variant import ModelPhase, ModelVariant, encode, make_key

HERE = os.path.dirname(__file__)
PREFILL = ModelVariant.prefill(2, 128)


def components() -> dict[str, ModelComponent]:
    """One component for each thing that must change the key."""
    plain = ModelComponent(PREFILL, KernelDispatchConfig())
    dispatch = KernelDispatchConfig
    return {
        "plain": plain,
        "decode": plain.with_variant(ModelVariant.decode(2, 0, 128)),
        "encoder": plain.with_variant(ModelVariant.encoder(2, 128)),
        "batch": plain.with_variant(ModelVariant.prefill(128, 2)),
        "live": plain.with_variant(ModelVariant.prefill(2, UpTo(128))),
        "extra": plain.with_variant(PREFILL.with_extra("frames", 3)),
        "lazy": plain.with_compilation_mode("lazy"),
        "aot": plain.with_compilation_mode(CompilationMode.AOT),
        "profile": plain.with_profile_key(CompileProfile(fusion="fusable").profile_key),
        "policy": plain.with_kernel_dispatch(dispatch(KernelPolicy.FORCE_COMMON)),
        "common": plain.with_kernel_dispatch(dispatch(force_common_kinds=frozenset({"softmax"}))),
        "native": plain.with_kernel_dispatch(dispatch(force_native_kinds=frozenset({"softmax"}))),
        "quant": plain.with_quant("Q4_K"),
        "quant2": plain.with_quant("Q8_0"),
        "stack": plain.with_layer_composition_key(LayerComposition.homogeneous("llama", 28).key),
        "pair": plain.with_layer_composition_key(LayerComposition.pair("a", "b").key),
    }


def test_every_part_of_a_component_changes_its_key() -> None:
    keys = {name: c.cache_key() for name, c in components().items()}
    for a, b in itertools.combinations(keys, 2):
        assert keys[a] != keys[b], (a, b)


def test_keys_are_pinned() -> None:
    # A change here orphans every artifact on users' disks: change it knowingly.
    assert PREFILL.cache_key() == PINNED_VARIANT
    component = ModelComponent(PREFILL, KernelDispatchConfig()).with_quant("Q4_K")
    assert component.cache_key() == PINNED_COMPONENT
    assert component.aot_disk_base() == f"rlx_{PINNED_COMPONENT[:16]}"


def test_other_processes_and_hash_seeds_agree() -> None:
    code = (
        "from test_keys import components\nprint(*[c.cache_key() for c in components().values()])"
    )
    expected = " ".join(c.cache_key() for c in components().values())
    for seed in ("0", "1", "4242"):
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join([*sys.path, HERE])},
            check=True,
        )
        assert done.stdout.strip() == expected


def test_encoding_is_injective_where_python_is_not() -> None:
    values = [1, 1.0, True, "1", b"1", None, 0, False, "", (), (1,), ((1,),), ("1", ""), {}, {1: 2}]
    values += [("ab", "c"), ("a", "bc"), {"a": 1}, {"a": "1"}, -0.0, 0.0, frozenset({1}), "n"]
    encoded = [encode(v) for v in values]
    assert len(set(encoded)) == len(values)


def test_order_of_mappings_and_sets_does_not_matter() -> None:
    assert make_key("k", {"a": 1, "b": 2}) == make_key("k", {"b": 2, "a": 1})
    assert make_key("k", {"x", "y"}) == make_key("k", {"y", "x"})
    assert make_key("k", 1) != make_key("other", 1)
    with pytest.raises(OptionError, match="part of a key"):
        make_key("k", object())


def test_variants_bind_what_they_say() -> None:
    assert PREFILL.dim_binding().sizes == {"batch": 2, "seq": 128}
    assert PREFILL.dim_binding().get("rows") == 256
    decode = ModelVariant.decode(1, 64, 1).dim_binding()
    assert decode.sizes == {"batch": 1, "past_seq": 64, "seq": 1}
    assert decode.get("rows") == 1
    assert ModelVariant.encoder(4, 16).phase is ModelPhase.ENCODER
    extra = PREFILL.with_extra("frames", 7)
    assert extra.dim_binding().get("frames") == 7
    with pytest.raises(OptionError, match="already bound"):
        extra.with_extra("frames", 8)
    assert str(decode) == "{batch: 1, past_seq: 64, seq: 1}"


def test_profiles_from_toml_and_presets() -> None:
    profile = CompileProfile.from_toml('fusion = "fusable"\nprecision = "bf16"\n')
    assert profile == CompileProfile(fusion="fusable", precision="bf16")
    assert (
        profile.profile_key
        == CompileProfile.from_table({"precision": "bf16", "fusion": "fusable"}).profile_key
    )
    assert CompileProfile.preset("default", "decode") == CompileProfile()
    with pytest.raises(OptionError, match="did you mean debug"):
        CompileProfile.preset("debgu")
    with pytest.raises(OptionError, match="did you mean fusion"):
        CompileProfile.from_toml('fusoin = "direct"')
    with pytest.raises(OptionError, match="direct, fusable"):
        CompileProfile.from_toml('fusion = "some"')
    with pytest.raises(OptionError, match="not TOML"):
        CompileProfile.from_toml("fusion =")
    with pytest.raises(OptionError, match="cannot be read"):
        CompileProfile.load("no-such-file.toml")


def test_dispatch_precedence() -> None:
    both = KernelDispatchConfig("native", {"gelu", "silu"}, {"gelu"})  # type: ignore[arg-type]
    assert both.choose("gelu", True, True) == "native"
    assert both.choose("silu", True, True) == "common"
    assert both.choose("tanh", False, True) == "unsupported"
    plain = KernelDispatchConfig()
    assert plain.choose("x", True, True) == "native"
    assert plain.choose("x", False, True) == "common"
    assert plain.choose("x", False, False) == "unsupported"
    common = KernelDispatchConfig("common")  # type: ignore[arg-type]
    assert common.choose("x", True, True) == "common"
    assert common.choose("x", True, False) == "native"
    with pytest.raises(OptionError, match="unknown kernel policy"):
        KernelDispatchConfig("fastest")  # type: ignore[arg-type]


def test_the_environment_sets_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLX_KERNEL_DISPATCH", "common")
    assert ModelComponent(PREFILL).kernel_dispatch.policy is KernelPolicy.FORCE_COMMON
    monkeypatch.setenv("RLX_KERNEL_DISPATCH", "nonsense")
    with pytest.raises(OptionError):
        ModelComponent(PREFILL)


PINNED_VARIANT = "dd583fa519d9fb243d46507f269da155113621d5b4d1df55fd78474bf75d18d9"
PINNED_COMPONENT = "cd3256949162b97609c76c07b98c4a3fb5a7668618a1befb09156e7630221fbc"
