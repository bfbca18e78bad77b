"""The compile pipeline: three stages, each cached, and components that are applied."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
from small_model import CLOSE, WIDTH, build, component, expected, inputs, weights

import rlx
from rlx import (
    BindingManifest,
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
)
from rlx.passes.report import counters
from rlx.specialize.options import CompilationMode


class Counting:
    """A builder that counts its calls."""

    def __init__(self, make: Callable[[], GraphModule] = build) -> None:
        self.make, self.calls = make, 0

    def __call__(self) -> GraphModule:
        self.calls += 1
        return self.make()


def pipeline(device: str = "cpu", **settings: object) -> ModelCompilePipeline:
    return ModelCompilePipeline(device, params=ParamStore(weights()), **settings)  # type: ignore[arg-type]


ONE = CompileOptions(threads=1)


def run(compiled: rlx.CompiledGraph, batch: int = 1, seq: int = 4) -> None:
    x = inputs(batch, seq)
    (y,) = compiled.run(x=x)
    np.testing.assert_allclose(y, expected(x, weights()), **CLOSE)


@pytest.mark.parametrize("device", ["reference", "cpu"])
def test_a_component_as_the_very_first_call(device: str) -> None:
    p = pipeline(device)
    compiled, manifest = p.get_or_compile_component(component(2, 3), build, ONE)
    assert isinstance(manifest, BindingManifest)
    assert manifest.find("x").shape.static_dims == (2, 3, WIDTH)
    assert manifest.find("y", "output").num_bytes == 2 * 3 * 8 * 4
    run(compiled, 2, 3)


def test_the_three_steps_one_by_one() -> None:
    p = pipeline()
    assert not p.has_template(ONE)
    template = p.build_template(build, ONE)
    assert p.has_template(ONE) and p.template_result(ONE) is template.result
    assert template.open_symbols == {"batch", "seq"}
    specialized = p.specialize_template(DimBinding(batch=1, seq=4), ONE)
    executable = p.compile_lir(specialized, ONE)
    assert [e.name for e in specialized.manifest] == [e.name for e in executable.manifest]
    assert p.binding_manifest_for_binding(DimBinding(batch=1, seq=4), ONE) == specialized.manifest
    assert p.template_binding_manifest(DimBinding(batch=1, seq=4)) == specialized.manifest
    with pytest.raises(OptionError, match=r"leaves symbols open.*sizes for seq"):
        p.specialize_template(DimBinding(batch=1), ONE)
    with pytest.raises(OptionError, match="no template of these options"):
        p.specialize_template(DimBinding(batch=1), CompileOptions(quant="Q8_0"))  # type: ignore[arg-type]


def test_passes_run_once_for_all_variants_and_again_for_other_options() -> None:
    p = pipeline(capacity=32)
    model = Counting()
    p.get_or_compile_component(component(1, 2), model, ONE)
    before = counters.passes
    for seq in range(3, 8):
        p.get_or_compile_component(component(1, seq), model, ONE)
        p.get_or_compile_component(component(1, seq), build, ONE)  # the same model again
    assert counters.passes == before and model.calls == 1
    other = component(1, 2).with_kernel_dispatch(KernelDispatchConfig(force_common_kinds={"silu"}))  # type: ignore[arg-type]
    p.get_or_compile_component(other, model, ONE)
    assert counters.passes > before and model.calls == 1
    assert len(p) == 7


def test_a_hit_rebuilds_nothing_and_costs_microseconds() -> None:
    p = pipeline()
    model, asked = Counting(), component()
    first = p.get_or_compile_component(asked, model, ONE)
    plans = counters.plans
    assert p.get_or_compile_component(asked, model, ONE)[0] is first[0]
    # the same component built again, and requested with another builder
    assert p.get_or_compile_component(component(), build, ONE)[0] is first[0]
    assert counters.plans == plans and model.calls == 1
    took = []
    for _ in range(200):
        start = time.perf_counter()
        p.get_or_compile_component(asked, model, ONE)
        took.append(time.perf_counter() - start)
    assert min(took) < 20e-6
    assert p.contains(asked) and p.contains(asked.cache_key()) and not p.contains("other")


def test_an_evicted_variant_costs_a_specialisation_and_no_compilation() -> None:
    from rlx.llvm.jit import counters as jit

    p = pipeline(capacity=2)
    p.get_or_compile_component(component(1, 4), build, ONE)
    for seq in (5, 6):
        p.get_or_compile_component(component(1, seq), build, ONE)
    assert not p.contains(component(1, 4)) and len(p) == 2
    assert "evicted (fifo" in p.explain(component(1, 4), ONE)
    passes, plans, llvm = counters.passes, counters.plans, jit.compilations
    compiled, _ = p.get_or_compile_component(component(1, 4), build, ONE)
    assert (counters.passes, counters.plans, jit.compilations) == (passes, plans + 1, llvm)
    run(compiled)


def test_pins_lru_and_bytes() -> None:
    p = pipeline(capacity=2, eviction="lru")
    keep = component(1, 4)
    p.get_or_compile_component(keep, build, ONE)
    p.pin(keep)
    for seq in range(5, 9):
        p.get_or_compile_component(component(1, seq), build, ONE)
    assert p.contains(keep) and p.contains(component(1, 8)) and len(p) == 2
    largest = p.binding_manifest_for_component(component(1, 7), ONE).arena_size
    small = pipeline(capacity=8, capacity_bytes=2 * largest)
    for seq in (4, 5, 6, 7):
        small.get_or_compile_component(component(1, seq), build, ONE)
    assert 2 <= len(small) < 4 and small.cache.num_bytes <= 2 * largest


def test_keys_of_the_callers_own() -> None:
    p = pipeline()
    binding = DimBinding(batch=1, seq=4)
    compiled, manifest = p.get_or_compile("mine", binding, build, ONE)
    assert manifest.arena_size == compiled.executable.arena.nbytes
    again, _ = p.get_or_compile(
        "mine", DimBinding(batch=1, seq=4), build, CompileOptions(threads=1)
    )
    assert again is compiled
    with pytest.raises(OptionError, match=r"one key for two.*binding.*seq: 4.*seq: 5"):
        p.get_or_compile("mine", DimBinding(batch=1, seq=5), build, ONE)


def test_a_miss_says_what_differs() -> None:
    p = pipeline()
    assert "empty" in p.explain(component(), ONE)
    p.get_or_compile_component(component(), build, ONE)
    p.get_or_compile_component(component(1, 5).with_compilation_mode("lazy"), build, ONE)
    reason = p.explain(component(1, 9), ONE)
    assert reason == (
        "miss: differs from the nearest entry in variant "
        "(prefill:1x4 cached, prefill:1x9 requested)"
    )
    assert "quant (None cached, Q8_0 requested)" in p.explain(component().with_quant("Q8_0"), ONE)
    assert p.explain(component(), ONE) == "hit"


def test_misses_say_why_when_asked_to(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    p = pipeline("reference")
    p.get_or_compile_component(component(1, 4), build, ONE)
    monkeypatch.setenv("RLX_DEBUG", "1")
    p.get_or_compile_component(component(1, 4), build, ONE)
    assert "cache:" not in capsys.readouterr().err
    p.get_or_compile_component(component(1, 5), build, ONE)
    said = capsys.readouterr().err
    assert "variant (prefill:1x4 cached, prefill:1x5 requested)" in said


def test_several_threads_compile_each_key_once() -> None:
    p = pipeline(capacity=32)
    model = Counting()
    plans = counters.plans
    found: list[object] = []

    def work(seed: int) -> None:
        for seq in (2, 3, 4, 5):
            compiled, _ = p.get_or_compile_component(component(1, seq), model, ONE)
            x = inputs(1, seq, seed)
            (y,) = compiled.run(x=x)
            np.testing.assert_allclose(y, expected(x, weights()), **CLOSE)
            found.append(compiled)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(found) == 24 and len(set(map(id, found))) == 4
    assert counters.plans == plans + 4


# -- what a component says is done ----------------------------------------------------------------


def test_eager_is_compiled_before_its_first_run_and_lazy_by_it() -> None:
    from rlx.llvm.jit import counters as jit

    p = pipeline()
    asked = ModelComponent(ModelVariant.prefill(3, 5), KernelDispatchConfig())
    lazy, manifest = p.get_or_compile_component(asked.with_compilation_mode("lazy"), build, ONE)
    before = (jit.compilations, jit.disk_hits, jit.memory_hits)
    assert manifest == lazy.manifest and manifest.find("x").num_bytes == 3 * 5 * WIDTH * 4
    assert (jit.compilations, jit.disk_hits, jit.memory_hits) == before
    run(lazy, 3, 5)
    after = (jit.compilations, jit.disk_hits, jit.memory_hits)
    assert after != before
    eager, _ = p.get_or_compile_component(asked, build, ONE)
    done = (jit.compilations, jit.disk_hits, jit.memory_hits)
    run(eager, 3, 5)
    assert done != after and (jit.compilations, jit.disk_hits, jit.memory_hits) == done


def test_dispatch_is_applied() -> None:
    p = pipeline()
    native = p.get_or_compile_component(component(), build, ONE)[0]
    dispatch = KernelDispatchConfig(force_common_kinds=frozenset({"rms_norm"}))
    asked = component().with_kernel_dispatch(dispatch)
    common = p.get_or_compile_component(asked, build, ONE)[0]
    op_names = [{n.op.name for n in c.executable.lir.graph.nodes} for c in (native, common)]
    assert "rms_norm" in op_names[0] and "rms_norm" not in op_names[1]
    run(common)


def test_the_profile_of_a_key_is_applied() -> None:
    p = pipeline("reference")
    slow = CompileProfile(fusion="fusable", passes=("lower_hir", "dce"))
    compiled, _ = p.get_or_compile_component(component().with_profile(slow), build, ONE)
    fused, _ = p.get_or_compile_component(component(), build, ONE)
    assert len(compiled.executable.lir.graph) >= 2 * len(fused.executable.lir.graph)
    run(compiled)
    given = CompileOptions(profile=CompileProfile(precision="bf16"), threads=1)
    asked = component().with_profile_key(given.profile.profile_key)
    half, _ = p.get_or_compile_component(asked, build, given)
    names = {v.shape.dtype.name for n in half.executable.lir.graph.nodes for v in n.outputs}
    assert "bf16" in names
    with pytest.raises(OptionError, match="unknown profile key"):
        p.get_or_compile_component(component().with_profile_key("f" * 64), build, ONE)


@pytest.mark.parametrize("scheme", ["Q8_0", "Q4_0", "int8_b32", "int4_b32_asym", "fp8_e4m3"])
@pytest.mark.parametrize("device", ["reference", "cpu"])
def test_quantisation_is_applied_to_plain_weights(scheme: str, device: str) -> None:
    from rlx.ir.quant.scheme import QuantScheme, decode, encode

    p = pipeline(device)
    compiled, manifest = p.get_or_compile_component(component().with_quant(scheme), build, ONE)
    plain, whole = p.get_or_compile_component(component(), build, ONE)
    assert manifest.params == whole.params  # what the user gives
    read = [c.executable.manifest.total_param_bytes for c in (compiled, plain)]
    assert read[0] < 0.6 * read[1]
    x = inputs(1, 4)
    (y,), (exact,) = compiled.run(x=x), plain.run(x=x)
    parsed = QuantScheme.parse(scheme)
    rounded = {
        name: w if w.ndim < 2 else decode(parsed, *encode(parsed, np.ascontiguousarray(w.T))).T
        for name, w in weights().items()
    }
    wanted = expected(x, rounded)
    error = np.abs(exact - wanted).max()
    assert error > 1e-3  # it makes a difference, so what follows says something
    # the CPU rounds activations to 8 bits, one part in 250 of the largest, in five products
    tolerance = 2e-5 if device == "reference" else 0.05
    np.testing.assert_allclose(y, wanted, rtol=tolerance, atol=tolerance)
    report = compiled.template.result.fusion_report  # type: ignore[attr-defined]
    assert report.count("quantised weight") == 5


def test_schemes_that_cannot_be_made_here_are_refused() -> None:
    with pytest.raises(OptionError, match=r"cannot be packed by this scheme.*IQ2_XXS"):
        pipeline().get_or_compile_component(component().with_quant("IQ2_XXS"), build, ONE)


def test_a_scheme_that_fits_no_weight_is_refused_and_one_that_fits_some_warns() -> None:
    with pytest.raises(OptionError, match=r"fits no weight.*not a multiple of the block of Q8_K"):
        pipeline().get_or_compile_component(component().with_quant("Q8_K"), build, ONE)
    scheme = "int8_b64"  # 64 rows have a whole block, 32 do not
    with pytest.warns(RuntimeWarning, match=r"a weight stays as it is: 32 rows.*and 2 more"):
        compiled, _ = pipeline().get_or_compile_component(
            component().with_quant(scheme), build, ONE
        )
    assert compiled.template.result.fusion_report.count("quantised weight") == 2  # type: ignore[attr-defined]


def test_the_layer_composition_is_applied() -> None:
    p = ModelCompilePipeline("reference", params=ParamStore(weights(5)))

    def stack(composition: LayerComposition) -> GraphModule:
        return build(composition.count)

    for count in (1, 5):
        key = LayerComposition.homogeneous("layers", count).key
        asked = component().with_layer_composition_key(key)
        compiled, _ = p.get_or_compile_component(asked, stack, ONE)
        x = inputs(1, 4)
        np.testing.assert_allclose(compiled.run(x=x)[0], expected(x, weights(5), count), **CLOSE)
    asked = component().with_layer_composition_key(LayerComposition.homogeneous("layers", 3).key)
    with pytest.raises(OptionError, match=r"does not match its layer composition.*got 2 layers"):
        p.get_or_compile_component(asked, build, ONE)
    with pytest.raises(OptionError, match="unknown layer composition"):
        p.get_or_compile_component(component().with_layer_composition_key("f" * 64), build, ONE)


def test_a_dynamic_variant_serves_every_length() -> None:
    p = pipeline()
    asked = ModelComponent(ModelVariant.prefill(1, rlx.UpTo(64)), KernelDispatchConfig())
    compiled, manifest = p.get_or_compile_component(asked, build, ONE)
    assert manifest.find("x").num_bytes == 64 * WIDTH * 4
    for seq in (1, 7, 64):
        run(compiled, 1, seq)
    assert len(p) == 1


def test_named_targets_are_applied() -> None:
    from rlx.llvm.target import Target

    if not Target.named("x86-64-v2").runs_on(Target.host()):
        pytest.skip("not an x86-64-v2 machine")
    p = pipeline()
    asked = component().with_profile(CompileProfile(target="x86-64-v2"))
    compiled, _ = p.get_or_compile_component(asked, build, ONE)
    assert compiled.template.backend.target_key == Target.named("x86-64-v2").key
    run(compiled)
    foreign = component().with_profile(CompileProfile(target="apple-m1"))
    if Target.host().arch == "x86_64":
        with pytest.raises(rlx.CodegenError, match="another CPU"):
            p.get_or_compile_component(foreign, build, ONE)


# -- memory ---------------------------------------------------------------------------------------

_RSS = """
import gc, os, sys
sys.path[:0] = {path!r}
import numpy as np, rlx
from rlx import GraphModule, ModelCompilePipeline, ModelComponent, ModelVariant, ParamStore

def resident():
    gc.collect()
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGESIZE")

N = 2048  # 4 matrices of 16 MB
def build():
    def body(g):
        x = g.input("x", ["seq", N])
        for i in range(4):
            x = g.linear(x, g.param(f"w{{i}}", [N, N]), activation="tanh")
        return x
    return GraphModule.define("wide", body)

rng = np.random.default_rng(0)
store = ParamStore({{f"w{{i}}": rng.standard_normal((N, N), dtype=np.float32) for i in range(4)}})
p = ModelCompilePipeline("cpu", capacity=64, params=store)
x = np.ones((24, N), np.float32)
def use(seq):
    variant = ModelVariant.prefill(1, seq)
    compiled, _ = p.get_or_compile_component(ModelComponent(variant), build, {{"threads": 1}})
    compiled.run(x=x[:seq])
    return compiled.executable.arena.nbytes
use(1)
use(9)
before = resident()
arenas = sum(use(seq) for seq in range(10, 24))
print(len(p), resident() - before, arenas, store.num_bytes, store.preparations)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads memory from /proc")
def test_parameters_are_held_once_however_many_variants_there_are() -> None:
    code = _RSS.format(path=[p for p in sys.path if p])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    variants, grown, arenas, held, preparations = map(int, done.stdout.split())
    assert variants == 16 and preparations == 1
    assert held == 2 * 4 * 2048 * 2048 * 4  # as given, and packed
    # what 14 more variants added: their arenas, and programs of some ten kilobytes each
    assert grown < arenas + 14 * (512 << 10)
    assert grown < held / 8


def test_modes_are_written_as_the_specification_has_them() -> None:
    assert CompilationMode.of("AOT") is CompilationMode.AOT
    with pytest.raises(OptionError):
        CompilationMode.of("later")
