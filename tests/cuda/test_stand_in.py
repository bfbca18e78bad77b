"""The whole device on the host: its own lowering, programs, graphs and memory, with the threads of
a launch as numbers in a loop. Only PTX and the GPU itself are missing."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "parity"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "goldens"))
import checks_of_bits  # noqa: F401  (adds checks)
import checks_on_gpu
from cases import Case, cases
from fake_driver import FakeDriver, installed, make_stand_in
from layer_checks import LAYERS

import rlx
from rlx.backends import registry
from rlx.backends.base import PlanInfo
from rlx.backends.cuda import nest_kernel
from rlx.backends.cuda.backend import CudaBackend
from rlx.backends.cuda.driver import Gpu
from rlx.backends.cuda.lowering import lower_graph
from rlx.backends.decode_loop import LoopSpec
from rlx.ir.graph import Graph
from rlx.ir.interp import evaluate
from rlx.models.model_file import ModelFile
from rlx.runtime.compiled import CompiledGraph
from rlx.runtime.template import make_template
from rlx.specialize.options import CompileOptions


@pytest.fixture(scope="module")
def backend() -> Iterator[CudaBackend]:
    with installed(FakeDriver()):
        yield make_stand_in()


def compiled(backend: CudaBackend, graph: Graph, **options: Any) -> CompiledGraph:
    return CompiledGraph(make_template(graph, CompileOptions(**options), backend))


@pytest.fixture
def as_cuda(backend: CudaBackend, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The stand-in under the name of the device."""
    monkeypatch.setitem(registry._backends, "cuda", backend)
    monkeypatch.setattr(ModelFile, "tokenizer", ModelFile.tokenizer)  # put back afterwards
    checks_on_gpu.backend.cache_clear()
    yield
    checks_on_gpu.backend.cache_clear()


@pytest.mark.usefixtures("as_cuda")
@pytest.mark.parametrize("case", cases(), ids=lambda c: c.id)
def test_parity(case: Case) -> None:
    """Kernels of blocks are simulated, which takes long for large ones."""
    if case.op in ("attention", "paged_attention", "sample"):
        checks_on_gpu.compare_case(case, runs=1, largest=5 if case.op == "sample" else 67)
    else:
        checks_on_gpu.compare_case(case)


TINY = ("llama", "qwen3", "gemma2", "gpt_oss", "mixtral", "mamba2")  # the others run on GPUs alone
LONG = ("engine llama", "engine gemma2", "engine gpt_oss", "engine qwen3 f16 cache")  # 30 s each
LONG += ("a stop of mamba2", "a stop of qwen3_next", "tokens behind a stop are forgotten")
LONG += ("constrained answers", "two requests of llama")
WIDE = [n for n in checks_on_gpu.CHECKS if n.startswith("same bits") and "tiny" not in n]  # on GPUs
SIMULATED = [
    pytest.param(name, marks=pytest.mark.nightly) if name in LONG else name
    for name in checks_on_gpu.CHECKS
    if name not in ("figures", *WIDE) and (not name.startswith("tiny") or name.split()[-1] in TINY)
]


@pytest.mark.usefixtures("as_cuda")
@pytest.mark.parametrize("name", SIMULATED)
def test_what_the_script_for_gpus_checks(name: str) -> None:
    checks_on_gpu.CHECKS[name]()


def test_loops_are_stored(backend: CudaBackend) -> None:
    """A program with jumps, constants of bodies and states that runs replace, from its parts."""
    from layer_checks import nested

    graph, options = graph_of(nested), CompileOptions(binding={"n": rlx.UpTo(20)})
    template = make_template(graph, options, backend)
    plan = template.plan({})
    parts = backend.export(plan, options)
    stored = backend.restore(parts, PlanInfo.of(plan), options)
    w = np.random.default_rng(1).normal(size=(6, 6)).astype(np.float32) / 3
    for n in (20, 3):
        rng = np.random.default_rng(n)
        data: dict[str, Any] = {"s": rng.normal(size=(1, 6)), "x": rng.normal(size=(n, 5, 6))}
        data = {k: v.astype(np.float32) for k, v in data.items()}
        data |= {"f": rng.integers(0, 2, n).astype(bool), "w": w, "limit": np.float32(50)}
        wanted = evaluate(graph, data, {"n": n})
        entries = stored.manifest
        given = [backend.allocator.put(np.asarray(data[e.name])) for e in entries.inputs]
        results = [backend.allocator.alloc(v.shape, v.dtype) for v in wanted]
        stored.run(given, results, {"n": n})
        for got, want in zip(results, wanted, strict=True):
            np.testing.assert_allclose(got.copy_out(), want, rtol=2e-5, atol=1e-5)


@pytest.mark.usefixtures("as_cuda")
@pytest.mark.parametrize("name", LAYERS)
def test_layers_that_the_script_for_gpus_checks(name: str) -> None:
    LAYERS[name]()


REDUCING = ("sum", "mean", "max", "min", "prod", "any", "all", "argmax", "argmin", "softmax")
REDUCING += ("log_softmax", "rms_norm", "layer_norm", "group_norm", "l2_norm")


SHOWN = ("sum", "argmax", "softmax", "layer_norm")  # the others run at night


@pytest.mark.parametrize(
    "op", [op if op in SHOWN else pytest.param(op, marks=pytest.mark.nightly) for op in REDUCING]
)
def test_warps_that_share_rows(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads run side by side for each row, however short it is."""
    monkeypatch.setattr(nest_kernel, "_LONG", 1)
    with installed(FakeDriver(warp=2)):
        made = make_stand_in()
        monkeypatch.setitem(registry._backends, "cuda", made)
        checks_on_gpu.backend.cache_clear()
        for case in [c for c in cases() if c.op == op][::5]:
            checks_on_gpu.compare_case(case)
        shares = [k for k in made.kernels._units if getattr(k, "shares_rows", False)]
        assert shares
        assert all("atomicrmw" in made.kernels.unit(k).text for k in shares)
    checks_on_gpu.backend.cache_clear()


def two_kernels(g: Graph) -> Any:
    x, w = g.input("x", [5, 8]), g.param("w", [8, 3])
    return g.softmax(g.matmul(x, w))


def graph_of(build: Any) -> Graph:
    g = Graph("test")
    out = build(g)
    g.set_outputs(*(out if isinstance(out, tuple) else [out]))
    return g


def test_args_are_written_only_when_they_change(backend: CudaBackend) -> None:
    made = compiled(backend, graph_of(two_kernels))
    made.set_param("w", np.ones((8, 3), np.float32))
    x = np.ones((5, 8), np.float32)
    made.run(x=x)
    made.run(x=x)
    fake: Any = backend.gpu._driver
    fake.calls.clear()
    made.run(x=x)
    assert fake.calls.count("cuMemcpyHtoDAsync_v2") == 1  # the input
    assert fake.calls.count("cuGraphLaunch") == 1
    assert "cuLaunchKernelEx" not in fake.calls


def test_dynamic_sizes_change_the_args_and_not_the_graph(backend: CudaBackend) -> None:
    def build(g: Graph) -> Any:
        x = g.input("x", ["n", 4])
        return g.softmax(g.add(g.transpose(x, (1, 0)), 1.0)), g.sum(x)

    graph = graph_of(build)
    made = compiled(backend, graph, binding={"n": rlx.UpTo(64)})
    fake: Any = backend.gpu._driver
    for n in (3, 64, 17, 3):
        x = np.random.default_rng(n).normal(size=(n, 4)).astype(np.float32)
        fake.calls.clear()
        for got, want in zip(made.run(x=x), evaluate(graph, {"x": x}), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-5)
    assert "cuGraphLaunch" in fake.calls
    assert "cuLaunchKernelEx" not in fake.calls
    assert backend.compile_count == 0


@pytest.mark.parametrize("stop", [{}, {70}, {40}, {3}, {31}, {32}], ids=str)
def test_states_are_put_back_behind_a_stop(backend: CudaBackend, stop: set[int]) -> None:
    """Runs are queued ahead of the host; a state that each run replaces is that of the last run
    whose token is wanted, whichever half of the log that lies in."""

    def build(g: Graph) -> Any:
        state, token = g.state("s", [2, 3]), g.input("ids", [1], "i32")
        last = g.add(g.mul(state, 0.5), g.cast(token, "f32"))
        g.state_update(state, last)
        return g.add(token, g.constant(1, "i32"))

    made = compiled(backend, graph_of(build))
    [name] = made.output_names
    made.run(ids=np.zeros(1, np.int32))
    loop = made.decode_loop(LoopSpec({"ids": name}, name, "past"))
    slot, expected, token = made.slot_buffer("ids"), np.zeros((2, 3), np.float32), 0
    fake: Any = backend.gpu._driver
    for count in (80, 5):
        slot.copy_in(np.array([token], np.int32))
        fake.calls.clear()
        found = loop.run({"past": 0}, count, {token + n for n in stop})
        wanted = [token + i for i in range(1, count + 1)]
        wanted = wanted[: min([n for n in stop if n <= count], default=count)]
        assert found == wanted
        for n in [token, *wanted[:-1]]:
            expected = expected * np.float32(0.5) + n
        np.testing.assert_allclose(made.read_state("s"), expected, rtol=1e-6)
        assert "cuGraphLaunch" in fake.calls
        token = wanted[-1]


def test_ops_without_kernels_are_in_the_report(backend: CudaBackend) -> None:
    def build(g: Graph) -> Any:
        return g.cholesky(g.relu(g.input("x", [3, 3])))

    template = make_template(graph_of(build), CompileOptions(), backend)
    report = template.result.dispatch_report
    assert report.outcome("cholesky") == {"host"}
    assert "no kernel" in str(report)
    assert report.outcome("relu") <= {"native"}
    launches = lower_graph(template.plan({}))
    assert [x.label for x in launches if x.on_host] == ["cholesky"]


def test_a_nan_is_found_where_it_is_made(
    backend: CudaBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLX_CHECK_NAN", "1")

    def build(g: Graph) -> Any:
        return g.softmax(g.matmul(g.log(g.input("x", [2, 2])), g.input("y", [2, 2])))

    made = compiled(backend, graph_of(build))
    x = np.array([[1, -1], [1, 1]], np.float32)
    with pytest.raises(rlx.NumericsError, match="not a number"):
        made.run(x=x, y=x)


def test_the_inspector_shows_launches_and_both_codes(backend: CudaBackend) -> None:
    template = make_template(graph_of(two_kernels), CompileOptions(), backend)
    program = backend.inspection().program(template.plan({}), CompileOptions())
    assert "gemv(5x8)" in program.table(lambda node: True)
    [_, kernel] = program.kernels(lambda node: True)
    assert "define void @kernel" in kernel.emit().text


def test_sizes_that_leave_a_state_are_refused_before_the_launch(backend: CudaBackend) -> None:
    def build(g: Graph) -> Any:
        state = g.state("s", [8, 2])
        return g.sum(g.state_update(state, g.input("x", [1, 2]), axis=0, start="past"), axis=0)

    made = compiled(backend, graph_of(build), binding={"past": rlx.UpTo(9)})
    x = np.ones((1, 2), np.float32)
    assert made.run(x=x, sizes={"past": 7})[0].tolist() == [1, 1]
    fake: Any = backend.gpu._driver
    fake.calls.clear()
    with pytest.raises(rlx.BindingError, match="past its end"):
        made.run(x=x, sizes={"past": 8})
    assert not {"cuLaunchKernelEx", "cuGraphLaunch"} & set(fake.calls)


def test_phases_run_alone(backend: CudaBackend) -> None:
    def build(g: Graph) -> Any:
        return two_kernels(g), g.relu(g.input("y", [3]))

    graph = graph_of(build)
    templates = [
        make_template(graph, CompileOptions(), b)
        for b in (backend, rlx.Device("reference").backend)
    ]
    w = np.eye(8, 3, dtype="f")
    made, oracle = (CompiledGraph(t).set_param("w", w) for t in templates)
    given = {"x": np.eye(5, 8, dtype="f"), "y": np.ones(3, "f")}
    for _ in range(2):
        assert made.run(given, until="prologue") == oracle.run(given, until="prologue")
        got, want = (f.run(given, until="epilogue") for f in (made, oracle))
        for a, b in zip(got, want, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6)


def test_cubins_are_kept_on_disk_for_each_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLX_CACHE_DIR", str(tmp_path))
    counts = []
    for version in (12080, 12080, 13000):
        with installed(FakeDriver(version=version)) as fake:
            backend = CudaBackend(Gpu())  # LLVM writes PTX, the fake makes cubins of it
            template = make_template(graph_of(two_kernels), CompileOptions(), backend)
            backend.compile(template.plan({}), CompileOptions())
            assert all(b"Generated by LLVM NVPTX" in m for m in fake.modules.values())
            counts.append(backend.compile_count)
    assert counts == [2, 0, 2]


def test_a_plan_without_scratch_memory_that_a_kernel_needs_is_refused(backend: CudaBackend) -> None:
    """A plan written by hand; the planner of the device itself gives each kernel what it wants."""
    g = Graph("t")
    q, k, v = (g.input(n, [1, 1 if n == "q" else 300, 2, 32], "f16") for n in "qkv")
    g.set_outputs(g.attention(q, k, v, num_heads=2, num_kv_heads=2, head_dim=32))
    text = rlx.print_lir(compiled(backend, g).executable.lir)
    backend.compile(rlx.parse_lir(text), CompileOptions())
    without = re.sub(r"\n *%\d+(\.\d+)? scratch [^\n]*", "", text)
    assert without != text
    with pytest.raises(rlx.VerifyError, match=r"too little scratch memory.*got 0 bytes"):
        backend.compile(rlx.parse_lir(without), CompileOptions())


def test_plans_of_artifacts_are_read_without_the_compiler() -> None:
    """Ops that only this device makes are found by their names."""
    code = "from rlx.ir.op import lookup; [lookup(n) for n in ('rounded_rms_norm', 'split_blocks')]"
    subprocess.run([sys.executable, "-c", code], check=True)
