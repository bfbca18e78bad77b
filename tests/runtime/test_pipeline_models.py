"""The compile pipeline with several models, layer stacks and phases, and what its manifests say."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from small_model import CLOSE, WIDTH, build, component, expected, inputs, weights
from test_aot import python

import rlx
from rlx import (
    AotCache,
    CompileOptions,
    CompileProfile,
    DimBinding,
    GraphModule,
    KernelDispatchConfig,
    LayerComposition,
    ModelCompilePipeline,
    ModelComponent,
    ModelVariant,
    OptionError,
    ParamStore,
    Phase,
)

ONE = CompileOptions(threads=1)
DEVICES = ["reference", "cpu"]
ROW = ModelComponent(ModelVariant.encoder(2, 1), KernelDispatchConfig())


def scaled(by: float) -> GraphModule:
    return GraphModule.define(
        "scaled", lambda g: g.linear(g.input("x", ["batch", 8]), g.param("w", [8, 8])) * by
    )


X = np.random.default_rng(1).normal(size=(2, 8)).astype(np.float32)
EYE = np.eye(8, dtype=np.float32)


# -- a model is what its HIR contains -------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
def test_one_component_of_two_models_is_two_executables(device: str, tmp_path: Path) -> None:
    p = ModelCompilePipeline(device, params=ParamStore({"w": EYE}), aot=AotCache(tmp_path))
    for by in (1.0, 3.0, 1.0):
        f, _ = p.get_or_compile_component(ROW, lambda by=by: scaled(by), ONE)
        np.testing.assert_array_equal(f.run(x=X)[0], np.float32(by) * X)
    assert len(p) == 2 and p.contains(ROW)  # the third is the first
    aot = ROW.with_compilation_mode("aot")
    for by in (1.0, 3.0):
        f, _ = p.get_or_specialize_aot(aot, lambda by=by: scaled(by), ONE)
        np.testing.assert_array_equal(f.run(x=X)[0], np.float32(by) * X)
    p.get_or_compile("mine", DimBinding(batch=2), lambda: scaled(1.0), ONE)
    with pytest.raises(OptionError, match=r"one key for two.*model"):
        p.get_or_compile("mine", DimBinding(batch=2), lambda: scaled(3.0), ONE)


def test_a_fusion_policy_makes_another_model() -> None:
    p = ModelCompilePipeline("reference", params=ParamStore(weights()))

    def under(policy: str) -> list[str]:
        f, _ = p.get_or_compile_component(
            component(), lambda: build().with_fusion_policy(policy).into_hir(), ONE
        )
        graph = f.template.source  # type: ignore[attr-defined]
        return [n.op.name for n in graph.nodes]

    assert "rms_norm" in under("direct") and "rms_norm" not in under("fusable")


def test_hir_is_taken_as_a_graph_module_is() -> None:
    module = scaled(2.0)
    f = rlx.Session("cpu").compile(module.as_hir()).set_param("w", EYE)  # type: ignore[arg-type]
    np.testing.assert_array_equal(f.run(x=X)[0], 2 * X)
    p = ModelCompilePipeline("cpu")
    f, manifest = p.get_or_compile_component(ROW, lambda: scaled(2.0).into_hir())  # type: ignore[arg-type,return-value]
    assert manifest.param_names == ["w"]
    np.testing.assert_array_equal(f.set_param("w", EYE).run(x=X)[0], 2 * X)
    with pytest.raises(OptionError, match="not a graph; got NoneType"):
        p.get_or_compile_component(ROW, lambda: None)  # type: ignore[arg-type,return-value]


def test_copies_of_hir_stay_hir_and_keep_their_policy() -> None:
    module = GraphModule.define("m", lambda g: scaled_body(g), fusion_policy="fusable")
    copy = module.copy()
    assert copy.stage is rlx.GraphStage.HIR
    assert copy.fusion_policy is rlx.FusionPolicy.FUSABLE
    hir = module.as_hir()
    assert isinstance(hir, rlx.HirModule)
    again = hir.copy()
    assert isinstance(again, rlx.HirModule) and again.fusion_policy is rlx.FusionPolicy.FUSABLE
    assert isinstance(rlx.bind_graph(hir, {"batch": 2}), rlx.HirModule)
    assert again.same_as(hir) and again.nodes[0].graph is again
    copy.exp(copy.as_hir().outputs[0])  # type: ignore[union-attr]
    assert len(copy) == len(module) + 1
    lir = rlx.Session("reference").compile(module, {"binding": {"batch": 2}}).executable.lir
    held = GraphModule.from_lir(lir).copy()
    assert rlx.print_lir(held.as_lir()) == rlx.print_lir(lir)  # type: ignore[arg-type]
    assert held.as_lir().graph is not lir.graph  # type: ignore[union-attr]


def scaled_body(g: GraphModule) -> rlx.Value:
    return g.linear(g.input("x", ["batch", 8]), g.param("w", [8, 8]), activation="gelu")


# -- manifests ------------------------------------------------------------------------------------


def stack(composition: LayerComposition) -> GraphModule:
    return build(composition.count)


def test_the_manifest_is_that_of_the_layer_composition() -> None:
    p = ModelCompilePipeline("reference")

    def of(count: int) -> ModelComponent:
        return component().with_layer_composition(LayerComposition.homogeneous("layers", count))

    for count in (2, 5):
        p.get_or_compile_component(of(count), stack, ONE)
    for count in (2, 5):
        manifest = p.binding_manifest_for_component(of(count), ONE)
        assert len(manifest.params) == 3 * count + 1
        assert sorted(manifest.param_names) == sorted(weights(count))
    with pytest.raises(OptionError, match="no template of these options and layers"):
        p.binding_manifest_for_component(of(3), ONE)
    assert len(p.binding_manifest_for_component(of(3), ONE, stack).params) == 10


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", ["eager", "lazy", "aot"])
def test_a_manifest_is_usable_for_binding(device: str, mode: str, tmp_path: Path) -> None:
    p = ModelCompilePipeline(device, aot=AotCache(tmp_path))
    f, manifest = p.get_or_compile_component(component().with_compilation_mode(mode), build, ONE)
    given = weights()
    assert manifest.param_names == list(dict.fromkeys(manifest.param_names))
    assert set(manifest.param_names) == set(given)
    assert manifest.total_param_bytes == sum(a.nbytes for a in given.values())
    assert set(manifest.weight_blocks()) == {"layers", "head"}
    for entry in manifest.params:
        array = given[entry.name]
        assert entry.shape.static_dims == array.shape and entry.num_bytes == array.nbytes
        assert entry.dtype == "f32" and entry.arena_offset is None
        f.set_param(entry.name, array)
    x = inputs(1, 4)
    entry = manifest.find("x")
    assert f.manifest == manifest and entry.arena_offset is not None
    # it is the truth: writing at its offsets works
    f.slot("x")[...] = x
    f.run_slots()
    np.testing.assert_allclose(f.slot("y"), expected(x, given), **CLOSE)


def test_a_template_has_a_symbolic_manifest() -> None:
    p = ModelCompilePipeline("cpu")
    with pytest.raises(OptionError, match="no template yet"):
        p.template_binding_manifest()
    p.build_template(build, ONE)
    manifest = p.template_binding_manifest()
    x = manifest.find("x")
    assert str(x.shape) == f"[batch, seq, {WIDTH}] f32" and x.arena_offset is None
    assert str(x.num_bytes) == f"{4 * WIDTH} * batch * seq"
    assert set(manifest.param_names) == set(weights())
    assert manifest.total_param_bytes == sum(a.nbytes for a in weights().values())
    assert [e.name for e in manifest.outputs] == ["y"]
    assert f"{4 * WIDTH} * batch * seq bytes" in str(manifest)
    bound = p.template_binding_manifest(DimBinding(batch=2, seq=3))
    assert bound.find("x").num_bytes == 2 * 3 * WIDTH * 4


# -- variants -------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
def test_compile_lir_gives_a_compiled_graph(device: str) -> None:
    p = ModelCompilePipeline(device)
    p.build_template(build, ONE)
    specialized = p.specialize_template(DimBinding(batch=1, seq=4), ONE)
    f = p.compile_lir(specialized, ONE)
    for name, array in weights().items():
        f.set_param(name, array)
    x = inputs(1, 4)
    np.testing.assert_allclose(f.run(x=x)[0], expected(x, weights()), **CLOSE)
    other = p.compile_lir(p.specialize_template(DimBinding(batch=1, seq=2), ONE))
    x = inputs(1, 2)
    np.testing.assert_allclose(other.run(x=x)[0], expected(x, weights()), **CLOSE)
    with pytest.raises(OptionError, match="other options than the variant was planned with"):
        p.compile_lir(specialized, CompileOptions(quant="Q8_0"))  # type: ignore[arg-type]


@pytest.mark.parametrize("device", DEVICES)
def test_phases_of_one_variant_are_its_own(device: str) -> None:
    p = ModelCompilePipeline(device, params=ParamStore(weights()))
    p.build_template(build, ONE)
    one, two = (p.specialize_template(DimBinding(batch=1, seq=n), ONE) for n in (4, 4))
    before = list(two.lir.phases)
    last = one.lir.outputs[0].node
    assert one.lir.phases.get(last) is Phase.STEADY_STATE
    one.lir.phases.set(last, "epilogue")
    assert list(two.lir.phases) == before
    assert list(p.specialize_template(DimBinding(batch=1, seq=4), ONE).lir.phases) == before
    x = inputs(1, 4)
    edited, plain = p.compile_lir(one), p.compile_lir(two)
    assert plain.run(x=x, until="steady_state")[0] is not None
    assert edited.run(x=x, until="steady_state")[0] is None
    np.testing.assert_array_equal(edited.run(phase="epilogue")[0], plain.run(x=x)[0])
    one.lir.phases.set(last, "steady_state")
    one.lir.phases.set(last.inputs[0].node, "epilogue")
    with pytest.raises(OptionError, match="a node before one that it needs"):
        p.compile_lir(one)


@pytest.mark.parametrize("device", DEVICES)
def test_a_plan_is_compiled_as_it_is(device: str) -> None:
    p = ModelCompilePipeline(device)
    p.build_template(build, ONE)
    binding = DimBinding(batch=1).set_dynamic("seq", 9)
    text = rlx.print_lir(p.specialize_template(binding, ONE).lir)
    size = rlx.parse_lir(text).arena_size
    edited = text.replace(f"lir {size} ", f"lir {size + 4096} ", 1)
    module = GraphModule.from_lir(rlx.parse_lir(edited))
    f = rlx.Session(device).compile(module, ONE).set_params(weights())
    assert f.manifest.arena_size == size + 4096 and set(f.manifest.param_names) == set(weights())
    for seq in (2, 9):
        x = inputs(1, seq)
        np.testing.assert_allclose(f.run(x=x)[0], expected(x, weights()), **CLOSE)
    for options in ({"quant": "Q8_0"}, {"binding": {"seq": 4}}):
        with pytest.raises(OptionError, match="a plan is bound, fused and packed already"):
            rlx.Session(device).compile(module, options)
    with pytest.raises(OptionError, match="a plan is bound, fused and packed already"):
        rlx.Session(device).compile(module, binding={"seq": 4})


def counting() -> GraphModule:
    """Sums the rows it is given to those it has seen."""

    def body(g: GraphModule) -> rlx.Value:
        seen = g.state("seen", [4])
        return g.state_update(seen, g.sum(g.input("x", ["seq", 4]), 0) + seen)

    return GraphModule.define("counting", body)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", ["eager", "lazy", "aot"])
def test_components_of_a_pipeline_share_states(device: str, mode: str, tmp_path: Path) -> None:
    p = ModelCompilePipeline(device, aot=AotCache(tmp_path))
    prefill, decode = (
        p.get_or_compile_component(
            ModelComponent(variant).with_compilation_mode(mode), counting, ONE
        )[0]
        for variant in (ModelVariant.prefill(1, 3), ModelVariant.decode(1, None))
    )
    rows = np.arange(16, dtype=np.float32).reshape(4, 4)
    prefill.run(x=rows[:3])
    np.testing.assert_array_equal(decode.read_state("seen"), rows[:3].sum(0))
    np.testing.assert_array_equal(decode.run(x=rows[3:])[0], rows.sum(0))
    np.testing.assert_array_equal(prefill.read_state("seen"), rows.sum(0))
    # a buffer of its own is that graph's alone
    decode.bind_state("seen", np.zeros(4, np.float32))
    decode.run(x=rows[:1])
    np.testing.assert_array_equal(prefill.read_state("seen"), rows.sum(0))
    # and another pipeline has its own
    other = ModelCompilePipeline(device)
    g, _ = other.get_or_compile_component(ModelComponent(ModelVariant.prefill(1, 3)), counting, ONE)
    assert not g.read_state("seen").any()


# -- artifacts ------------------------------------------------------------------------------------

_ELSEWHERE = """
from rlx import AotCache, ModelCompilePipeline, ModelComponent, ModelVariant, ParamStore
from rlx.passes.report import counters
from small_model import build, component, inputs, weights
cache = AotCache({root!r})
p = ModelCompilePipeline("cpu", params=ParamStore(weights()), aot=cache)
asked = component().with_profile_key({key!r}).with_compilation_mode("aot")
f, _ = p.get_or_compile_component(asked, build, {{"threads": 1}})
assert counters.passes == 0 and cache.counters.hits == 1, cache.counters
print(f.template.options.profile.precision, f.template.artifact.profile.precision)
"""


@pytest.mark.slow
def test_a_profile_travels_with_its_artifact(tmp_path: Path) -> None:
    """A process that knows nothing but the key of a profile finds the profile with the artifact."""
    cache = AotCache(tmp_path)
    profile = CompileProfile(precision="bf16", passes=("simplify", "fuse", "dce"))
    asked = component().with_profile(profile).with_compilation_mode("aot")
    p = ModelCompilePipeline("cpu", params=ParamStore(weights()), aot=cache)
    p.get_or_compile_component(asked, build, ONE)
    code = _ELSEWHERE.format(root=str(tmp_path), key=profile.profile_key)
    done = python(code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["bf16", "bf16"]
    done = python(code.replace(repr(str(tmp_path)), repr(str(tmp_path / "empty"))))
    assert "unknown profile key" in done.stderr


def test_a_bundle_has_the_profiles_of_its_variants(tmp_path: Path) -> None:
    half = component().with_profile(CompileProfile(precision="bf16"))
    file = rlx.compile_bundle(tmp_path / "m.rlx", build, {"half": half, "full": component()})
    loaded = rlx.load_bundle(file)
    found = {name: loaded.artifacts[name].profile.precision for name in loaded}
    assert found == {"half": "bf16", "full": "f32"}


def test_an_artifact_says_for_how_many_workers_it_is(tmp_path: Path) -> None:
    cache = AotCache(tmp_path / "cache")
    p = ModelCompilePipeline("cpu", params=ParamStore(weights()), aot=cache)
    p.get_or_specialize_aot(component(), build, ONE)
    with pytest.raises(OptionError, match=r"options.threads \(1 cached, 2 requested\)"):
        p.get_or_specialize_aot(component(), build, CompileOptions(threads=2))
    variants = {"one": component()}
    file = rlx.compile_bundle(tmp_path / "m.rlx", build, variants, options=ONE, params=weights())
    with pytest.warns(RuntimeWarning, match=r"compiled for 1 workers, and 2 threads are asked for"):
        f = rlx.load_bundle(file, options={"threads": 2})["one"]
    x = inputs(1, 4)
    np.testing.assert_allclose(f.run(x=x)[0], expected(x, weights()), **CLOSE)
