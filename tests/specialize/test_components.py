"""Variants, components, options and profiles: what they take, and what they refuse."""

from __future__ import annotations

import re
import subprocess
import sys

import numpy as np
import pytest

import rlx
from rlx import (
    CompileOptions,
    CompileProfile,
    DimBinding,
    GraphModule,
    KernelDispatchConfig,
    KernelDispatchPolicy,
    LayerComposition,
    ModelCompilePipeline,
    ModelComponent,
    ModelPhase,
    ModelVariant,
    OptionError,
    Session,
    sym,
)


def linear() -> GraphModule:
    return GraphModule.define(
        "linear", lambda g: g.linear(g.input("x", ["batch", 8]), g.param("w", [8, 8]))
    )


def compiled(component: ModelComponent, options: object = None) -> rlx.CompiledGraph:
    pipeline = ModelCompilePipeline("reference")
    return pipeline.get_or_compile_component(component, linear, options)[0]  # type: ignore[arg-type]


PLAIN = ModelComponent(ModelVariant.encoder(2, 1), KernelDispatchConfig())


# -- variants -------------------------------------------------------------------------------------


def test_extras_are_one_set_whatever_their_order() -> None:
    base = ModelVariant.encoder(2, 1)
    one = base.with_extra("b", 2).with_extra("a", 1)
    two = ModelVariant(2, 1, 0, ModelPhase.ENCODER, {"a": 1, "b": 2})  # type: ignore[arg-type]
    assert one == two and str(one) == str(two) and one.cache_key() == two.cache_key()
    pipeline = ModelCompilePipeline("reference")

    def build() -> GraphModule:
        return GraphModule.define(
            "two", lambda g: g.concat([g.input("x", ["a"]), g.input("y", ["b"])], axis=0)
        )

    first = pipeline.get_or_compile_component(ModelComponent(one), build, {"threads": 1})
    # other options objects make the pipeline compare what the key stands for
    second = pipeline.get_or_compile_component(
        ModelComponent(two), build, CompileOptions(threads=1)
    )
    assert first[0] is second[0] and len(pipeline) == 1


def test_extras_may_be_symbols() -> None:
    key = ModelVariant.encoder(1, 8).with_extra(sym("frames"), 5).cache_key()
    assert key == ModelVariant.encoder(1, 8).with_extra("frames", 5).cache_key()
    with pytest.raises(rlx.BindingError, match="only a plain symbol"):
        ModelVariant.encoder(1, 8).with_extra(sym("frames") + 1, 5)


def test_a_decode_variant_without_a_past_leaves_it_unbound() -> None:
    variant = ModelVariant(1, 1, None, ModelPhase.DECODE)
    assert variant.dim_binding().sizes == {"batch": 1, "seq": 1}
    assert variant.cache_key() != ModelVariant.decode(1, 0).cache_key()


@pytest.mark.parametrize("symbol", ["batch", "seq", "past_seq", "rows"])
def test_symbols_of_the_variant_itself_are_no_extras(symbol: str) -> None:
    with pytest.raises(OptionError, match=f"already bound; got {symbol}"):
        ModelVariant.encoder(1, 8).with_extra(symbol, 3)
    with pytest.raises(OptionError, match=f"already bound; got {symbol}"):
        ModelVariant(1, 8, extra=((symbol, 3),))


def test_phases_are_those_of_the_enum() -> None:
    assert ModelVariant(1, 8, 0, "decode").phase is ModelPhase.DECODE  # type: ignore[arg-type]
    with pytest.raises(OptionError, match=r"unknown model phase.*\n.*did you mean decode"):
        ModelVariant(1, 8, 0, "decod")  # type: ignore[arg-type]


@pytest.mark.parametrize("sizes", [(-1, 8), (1, 2.5), (True, 8), ("1", 8), (rlx.UpTo(0), 8)])
def test_sizes_are_checked_when_a_variant_is_made(sizes: tuple[object, object]) -> None:
    with pytest.raises(rlx.BindingError, match=r"a size is|an upper bound is"):
        ModelVariant(*sizes)  # type: ignore[arg-type]


# -- components -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [("variant", "prefill"), ("kernel_dispatch", "common"), ("profile_key", 5), ("quant", 4),
     ("layer_composition_key", None), ("compilation_mode", "later")],
)  # fmt: skip
def test_a_component_takes_what_it_names(field: str, value: object) -> None:
    given = {"variant": ModelVariant.encoder(2, 1), field: value}
    with pytest.raises(OptionError, match=r"wrong type|unknown compilation mode"):
        ModelComponent(**given)  # type: ignore[arg-type]


def test_a_profile_key_that_nobody_registered_is_a_typed_error() -> None:
    with pytest.raises(OptionError, match=r"unknown profile key; got ffff.*"):
        compiled(PLAIN.with_profile_key("f" * 64))


def test_compositions_nest() -> None:
    stack = LayerComposition.homogeneous(LayerComposition.pair("attention", "mamba"), 3)
    assert stack.counts() == {"attention": 3, "mamba": 3}
    assert str(stack) == "(attention + mamba) × 3"
    pair = LayerComposition.pair(stack, LayerComposition.single("attention"))
    assert pair.counts() == {"attention": 4, "mamba": 3}
    assert len({stack.key, pair.key, LayerComposition.pair("attention", "mamba").key}) == 3
    with pytest.raises(OptionError, match="not a layer"):
        LayerComposition.pair("attention", 3)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="at least one layer"):
        LayerComposition.homogeneous("attention", 0)


# -- nothing is ignored ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"dispatch": KernelDispatchConfig("common")}, "dispatch"),
        ({"binding": {"batch": 7}}, "binding"),
    ],
)
def test_options_beside_a_component_must_agree_with_it(options: object, what: str) -> None:
    with pytest.raises(OptionError, match=rf"options.{what}.*give another {what} each"):
        compiled(PLAIN, options)


def test_a_binding_in_options_beside_a_binding_must_be_the_same() -> None:
    pipeline = ModelCompilePipeline("reference")
    options = CompileOptions(binding=DimBinding(batch=7))
    with pytest.raises(OptionError, match="two bindings"):
        pipeline.get_or_compile("k", DimBinding(batch=2), linear, options)
    pipeline.get_or_compile("k", DimBinding(batch=7), linear, options)


def test_a_profile_or_a_quant_in_both_places_must_be_one() -> None:
    half = CompileProfile(precision="bf16")
    with pytest.raises(OptionError, match="another profile each"):
        compiled(PLAIN.with_profile(CompileProfile(fusion="fusable")), {"profile": half})
    with pytest.raises(OptionError, match="another quant each"):
        compiled(PLAIN.with_quant("Q8_0"), {"quant": "Q4_0"})
    # the same twice is no conflict
    compiled(PLAIN.with_profile(half), {"profile": half, "binding": {"batch": 2, "seq": 1}})


def test_misspelt_ops_in_a_dispatch_are_refused() -> None:
    for field in ("force_common_kinds", "force_native_kinds"):
        with pytest.raises(OptionError, match=r"unknown ops; got softmaxx.*\n.*mean softmax"):
            KernelDispatchConfig(**{field: {"softmaxx"}})  # type: ignore[arg-type]
    with pytest.raises(OptionError, match=r"unknown ops; got hir\.linear"):
        KernelDispatchConfig(force_common_kinds=frozenset({"hir.linear"}))


def test_a_fusion_policy_is_for_blocks() -> None:
    module = linear()
    assert module.with_fusion_policy("fusable").fusion_policy.value == "fusable"
    with pytest.raises(rlx.StageError, match=r"with_fusion_policy.*stage MIR"):
        module.lower().with_fusion_policy("fusable")
    lir = Session("reference").compile(module, {"binding": {"batch": 1}}).executable.lir
    with pytest.raises(rlx.StageError, match=r"with_fusion_policy.*stage LIR"):
        GraphModule.from_lir(lir).with_fusion_policy("direct")


def test_unknown_symbols_in_a_binding_are_refused() -> None:
    with pytest.raises(rlx.BindingError, match=r"unknown symbols.*got bacth.*\n.*mean batch"):
        Session("reference").compile(linear(), {"binding": {"bacth": 2}})
    pipeline = ModelCompilePipeline("reference")
    with pytest.raises(rlx.BindingError, match=r"unknown symbols.*got frames"):
        pipeline.get_or_compile("k", DimBinding(batch=2, frames=3), linear)
    with pytest.raises(rlx.BindingError, match=r"unknown symbols.*got frames"):
        compiled(PLAIN.with_variant(ModelVariant.encoder(2, 1).with_extra("frames", 3)))
    x = np.ones((2, 8), np.float32)
    f = Session("reference").compile(linear()).set_param("w", np.eye(8, dtype=np.float32))
    with pytest.raises(rlx.BindingError, match=r"unknown symbols.*got frames"):
        f.run(x=x, sizes={"frames": 3})
    with pytest.raises(rlx.BindingError, match=r"unknown symbols.*got frames"):
        rlx.bind_graph(linear().into_graph(), {"frames": 3})
    # sizes that every variant has may be bound in a model that has no use for them
    assert Session("reference").compile(linear(), {"binding": DimBinding.batch_seq(2, 5)})


def test_a_quant_that_fits_no_weight_is_refused() -> None:
    with pytest.raises(OptionError, match=r"fits no weight.*8 rows are not a multiple"):
        compiled(PLAIN.with_quant("Q4_K"))


def test_a_module_without_outputs_is_refused() -> None:
    module = GraphModule.hir("empty")
    x = module.input("x", [2])
    with pytest.raises(rlx.InputError, match="no outputs"):
        Session("reference").compile(module)
    with pytest.raises(rlx.InputError, match="no outputs"):
        module.finish_hir([])
    module.state_update(module.state("s", [2]), x)  # an effect is a result
    f = Session("reference").compile(module)
    assert f.run(x=np.array([1, 2], np.float32)) == ()
    assert f.read_state("s").tolist() == [1, 2]


# -- profiles -------------------------------------------------------------------------------------


def test_no_two_presets_are_equal() -> None:
    from rlx.specialize.compile_profile import PRESETS

    assert len(set(PRESETS.values())) == len(PRESETS) > 1
    assert len({p.profile_key for p in PRESETS.values()}) == len(PRESETS)
    with pytest.raises(OptionError, match="unknown model phase"):
        CompileProfile.preset("debug", "warmup")


def norm_and_ffn() -> GraphModule:
    def body(g: GraphModule) -> rlx.Value:
        h = g.rms_norm(g.input("x", ["batch", 32]), g.param("gamma", [32]))
        up = g.linear(h, g.param("up", [32, 64]), activation="silu")
        return g.softmax(g.linear(up, g.param("down", [64, 32])) * 1.0)

    return GraphModule.define("ffn", body)


@pytest.mark.parametrize("device", ["reference", "cpu"])
@pytest.mark.parametrize(
    "profile", [CompileProfile.preset("debug"), CompileProfile(passes=())], ids=["debug", "none"]
)
def test_few_passes_still_make_a_program(device: str, profile: CompileProfile) -> None:
    rng = np.random.default_rng(0)
    weights = {
        "gamma": np.ones(32, np.float32),
        "up": rng.normal(size=(32, 64)).astype(np.float32),
        "down": rng.normal(size=(64, 32)).astype(np.float32),
    }
    x = rng.normal(size=(3, 32)).astype(np.float32)
    f = Session(device).compile(norm_and_ffn(), {"profile": profile}).set_params(weights)
    h = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)
    up = h.astype(np.float64) @ weights["up"]
    scores = up / (1 + np.exp(-up)) @ weights["down"]
    wanted = np.exp(scores - scores.max(-1, keepdims=True))
    wanted /= wanted.sum(-1, keepdims=True)
    (y,) = f.run(x=x)
    # f32 sums of 64 products of order 8, then an exponential
    np.testing.assert_allclose(y, wanted, rtol=1e-4, atol=1e-6)


# -- names ----------------------------------------------------------------------------------------

SPECIFIED = re.findall(
    r"\w+",
    """
    sym Shape DimBinding bind_graph GraphModule Graph GraphStage StageError RlxError HirModule
    FusionPolicy MaskKind Phase derive_phases PhaseSchedule ModelPhase ModelVariant
    ModelComponent CompilationMode KernelDispatchConfig KernelDispatchPolicy QuantScheme
    CompileProfile LayerComposition ModelCompilePipeline BindingManifest AotCache CompileCache
    BucketedCompileCache Device Session CompiledGraph ParamStore Lir print_lir parse_lir f32 f16
    bf16 f64 i8 i16 i32 i64 u8 u16 u32 u64 bool_ f8e4m3 f8e5m2 c64 c128
    """,
)


def test_names_of_the_specification_are_public() -> None:
    for name in SPECIFIED:
        assert getattr(rlx, name) is not None and name in rlx.__all__
    assert rlx.KernelPolicy is KernelDispatchPolicy  # an older name
    assert KernelDispatchConfig(KernelDispatchPolicy.FORCE_COMMON).policy.value == "force_common"


@pytest.mark.slow
def test_a_star_import_has_every_public_name() -> None:
    code = "from rlx import *\nprint(Session, ModelCompilePipeline, sym('n'), parse_lir)"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
