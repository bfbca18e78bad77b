"""How models start: from disk without a compiler, with memory that is not held twice."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "cli"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "goldens"))
from cli_support import write_tiny
from encoder_files import write_model

import rlx
from rlx.llvm import jit as compiling
from rlx.llvm.jit import counters as jit
from rlx.models.batch.kv_pool import KVPool
from rlx.models.builder import SAMPLE
from rlx.models.compile import compile_model
from rlx.models.decoder_runner import DecoderRunner
from rlx.models.model_file import ModelFile
from rlx.passes.report import counters
from rlx.runtime.aot import AotCache
from rlx.runtime.params import ParamStore

PROMPT = [5, 6, 7, 8, 9]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RLX_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return write_tiny(tmp_path / "tiny.gguf")


def answer(path: Path, **options: object) -> tuple[list[int], int]:
    """Tokens of a greedy answer, and how often weights were packed for it."""
    with rlx.load(path, **options) as model:
        result = model.generate(PROMPT, temperature=0, max_tokens=6, stream=False)
        return result.tokens, model.runner.params.preparations


def test_a_second_start_runs_no_pass_and_packs_nothing(tiny: Path) -> None:
    wanted, packed = answer(tiny)
    assert packed > 0
    before = counters.passes, counters.plans, jit.compilations
    assert answer(tiny) == (wanted, 0)
    assert (counters.passes, counters.plans, jit.compilations) == before


_SECOND = """
import sys
sys.modules["llvmlite"] = None  # an import of it fails
import rlx
with rlx.load({path!r}{more}) as model:
    result = model.generate({prompt}, temperature=0, max_tokens=6, stream=False)
    biased = model.generate({prompt}, temperature=0, max_tokens=2, logit_bias={{3: 99.0}},
                            stream=False) if {bias} else result
print(*result.tokens, "|", *biased.tokens[:2])
"""


def in_a_process(path: Path, *, artifact: Path | None = None, bias: bool = False) -> list[str]:
    """What a process without llvmlite answers."""
    more = f", artifact={str(artifact)!r}" if artifact else ""
    code = _SECOND.format(path=str(path), more=more, prompt=PROMPT, bias=bias)
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True,
        env=os.environ,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    return run.stdout.split()


def test_another_process_needs_no_llvmlite(tiny: Path) -> None:
    wanted, _ = answer(tiny)
    assert in_a_process(tiny)[:6] == [str(t) for t in wanted]


@pytest.mark.parametrize("suffix", [".rlx", ".weights"])
def test_a_damaged_file_is_made_again_with_a_warning(tiny: Path, suffix: str) -> None:
    wanted, _ = answer(tiny)
    cache = AotCache.default()
    assert cache is not None
    for entry in cache.entries():
        if entry.name.endswith(suffix):
            data = bytearray(entry.path.read_bytes())
            data[-9] ^= 16
            entry.path.write_bytes(data)
    with pytest.warns(RuntimeWarning, match="is rebuilt"):
        assert answer(tiny)[0] == wanted
    assert cache.verify() == {}


def test_other_weights_are_packed_again(tiny: Path) -> None:
    answer(tiny)
    stamp = tiny.stat()
    os.utime(tiny, ns=(stamp.st_atime_ns, stamp.st_mtime_ns + 1))
    assert answer(tiny)[1] > 0


def test_the_packed_weight_cache_can_be_limited(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLX_CACHE_WEIGHTS", "0")
    wanted, _ = answer(tiny)
    cache = AotCache.default()
    assert cache is not None
    assert {e.path.suffix for e in cache.entries()} == {".rlx"}
    again, packed = answer(tiny)
    assert again == wanted and packed > 0
    monkeypatch.setenv("RLX_CACHE_WEIGHTS", "many")
    with pytest.raises(rlx.OptionError, match="RLX_CACHE_WEIGHTS"):
        answer(tiny)


def test_packed_weights_are_memory_mapped_and_the_file_is_released(tiny: Path) -> None:
    model = ModelFile.open(tiny)
    engine = DecoderRunner(model, context=32)
    engine.executables(SAMPLE)
    for array in engine.params.prepared.values():
        assert not array.flags.writeable, "packed weights lie in the file of the cache"
    resident = [line for line in mapped(tiny) if line.startswith("Rss:")]
    assert resident and all(line.split()[1] == "0" for line in resident)


_FIRST = """
import sys
from pathlib import Path
import rlx
from rlx.llvm.jit import counters

def resident():  # kB of LLVM's library
    blocks = Path("/proc/self/smaps").read_text().split("VmFlags")
    lines = [line for b in blocks if "libllvmlite" in b for line in b.splitlines()]
    return sum(int(line.split()[1]) for line in lines if line.startswith("Rss:"))

with rlx.load({path!r}) as model:
    result = model.generate({prompt}, temperature=0, max_tokens=6, stream=False)
    compiled, left = counters.compilations, resident()
    # LLVM runs on after its pages were given back
    model.generate({prompt}, max_tokens=2, logit_bias={{3: 1.0}}, stream=False)
    print(*result.tokens, compiled, counters.compilations > compiled, left)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="where the system tells of its maps")
def test_a_first_start_frees_the_compiler(tiny: Path) -> None:
    code = _FIRST.format(path=str(tiny), prompt=PROMPT)
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    *tokens, compiled, more, left = run.stdout.split()
    assert tokens == [str(t) for t in answer(tiny)[0]]
    assert int(compiled) > 0 and more == "True"
    assert int(left) < 8 << 10, "of some 65 MB; what the loader wrote to stays"


@pytest.fixture
def encoder(tmp_path: Path) -> Path:
    (tmp_path / "bert").mkdir()
    return write_model(tmp_path / "bert")


def test_weights_are_packed_while_code_is_compiled(
    encoder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed, ensure, make = threading.Event(), ParamStore.ensure, compiling.Unit.compile

    def pack(self: ParamStore, *args: object) -> None:
        ensure(self, *args)  # type: ignore[arg-type]
        packed.set()

    def compile(self: compiling.Unit) -> bytes:
        assert packed.wait(60), "packing waits for code that it has no need of"
        return make(self)

    compiling.forget()
    monkeypatch.setattr(ParamStore, "ensure", pack)
    monkeypatch.setattr(compiling.Unit, "compile", compile)
    with rlx.load(encoder) as model:
        model.embed("the cat")
        assert model.runner.params.preparations == 1
    cache = AotCache.default()
    assert cache is not None
    assert {e.path.suffix for e in cache.entries()} == {".rlx", ".weights"}


def test_notebooks_show_models(tiny: Path, encoder: Path) -> None:
    with rlx.load(tiny) as model:
        page = model._repr_html_()
    assert page.startswith("<div><b>LanguageModel llama</b><table>")
    for row in ("layers", "hidden", "vocabulary", "context"):
        assert f">{row}</td>" in page
    with rlx.load(encoder) as model:
        page = model._repr_html_()
    assert page.startswith("<div><b>EncoderModel bert</b><table>") and ">mean</td>" in page


def test_what_fails_while_packing_is_raised(encoder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise MemoryError("no room to pack")

    monkeypatch.setattr(ParamStore, "ensure", fail)
    with rlx.load(encoder) as model, pytest.raises(MemoryError, match="no room to pack"):
        model.embed("the cat")
    assert not [t for t in threading.enumerate() if t.name == "rlx-pack"]


def test_code_is_made_with_the_first_token_or_when_asked(tiny: Path, encoder: Path) -> None:
    with rlx.load(tiny) as model:
        assert not model.runner._by_entry_point
        model.warm()
        assert [*model.runner._by_entry_point] == ["sample"]
    for path in (tiny, encoder):
        with rlx.load(path, warm=True) as model:
            made, compiled = model.runner.params.preparations, jit.compilations
            graphs = len(model.runner._pipelines)
            if path is tiny:
                model.generate(PROMPT, temperature=0, max_tokens=4, stream=False)
            else:
                model.embed(["the cat", "a", "the cat " * 12])
            assert jit.compilations == compiled
            assert model.runner.params.preparations == made
            assert len(model.runner._pipelines) == graphs


_LEAN = """
import sys
import rlx
with rlx.load({path!r}) as model:
    model.embed("the cat")
print(*sorted(sys.modules))
"""


def test_an_encoder_on_disk_starts_without_what_others_need(encoder: Path) -> None:
    code = _LEAN.format(path=str(encoder))
    for _ in range(2):
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
    spare = {"asyncio", "concurrent.futures", "llvmlite", "subprocess", "tomllib", "zipfile",
             "rlx.backends.cpu.compiler", "rlx.llvm.parallel_compile", "rlx.models.decoder_builder",
             "rlx.models.language_model", "rlx.passes.pipeline"}  # fmt: skip
    assert not spare & {*run.stdout.split()}


def mapped(path: Path) -> list[str]:
    """What the system says about the maps of a file."""
    found, inside = [], False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ")[0] and not line.startswith("VmFlags"):
            inside = str(path) in line
        elif inside:
            found.append(line)
    return found


# -- bundles --------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", [False, True])
def test_an_artifact_runs_without_llvmlite(tiny: Path, tmp_path: Path, weights: bool) -> None:
    plan = compile_model(tiny, tmp_path / "tiny.rlx", context=64, weights=weights)
    assert plan.settings["context"] == 64 and plan.count == 12
    wanted, _ = answer(tiny, context=64)
    found = in_a_process(tiny, artifact=tmp_path / "tiny.rlx", bias=True)
    assert found == [*map(str, wanted), "|", "3", "3"]


def test_an_artifact_packs_nothing_where_it_has_the_weights(tiny: Path, tmp_path: Path) -> None:
    compile_model(tiny, tmp_path / "w.rlx", context=64, weights=True)
    wanted, _ = answer(tiny, context=64)
    assert answer(tiny, artifact=tmp_path / "w.rlx") == (wanted, 0)


def test_prefill_chunks_are_those_of_the_artifact(tiny: Path, tmp_path: Path) -> None:
    wanted, _ = answer(tiny, context=64)
    for chunk in (1, 2):
        compile_model(tiny, tmp_path / "c.rlx", context=64, chunk=chunk)
        with rlx.load(tiny, artifact=tmp_path / "c.rlx") as model:
            assert model.runner.chunk == chunk and model.runner.context == 64
            result = model.generate(PROMPT, temperature=0, max_tokens=6, stream=False)
            assert result.tokens == wanted


def test_a_generic_cpu_and_an_artifact_of_something_else(tiny: Path, tmp_path: Path) -> None:
    compile_model(tiny, tmp_path / "g.rlx", context=64, target="generic")
    wanted, _ = answer(tiny, context=64)
    assert answer(tiny, artifact=tmp_path / "g.rlx")[0] == wanted
    with pytest.raises(rlx.OptionError, match="made for something else"):
        rlx.load(tiny, artifact=tmp_path / "g.rlx", context=128)
    other = write_tiny(tmp_path / "other.gguf")
    rlx.load(other, artifact=tmp_path / "g.rlx").close()  # the same graph, other weights: fine
    with pytest.raises(rlx.OptionError, match="for encoders only"):
        compile_model(tiny, tmp_path / "x.rlx", steps={64: 1})
    rlx.compile_bundle(
        tmp_path / "b.rlx",
        lambda: rlx.GraphModule.define("f", lambda g: g.input("x", [2]) * 2.0),
        {"f": rlx.DimBinding()},
    )
    with pytest.raises(rlx.FormatError, match="not the executables of a model"):
        rlx.load(tiny, artifact=tmp_path / "b.rlx")


def test_encoders_have_bundles_too(tmp_path: Path) -> None:
    (tmp_path / "bert").mkdir()
    folder = write_model(tmp_path / "bert")
    with rlx.load(folder) as model:
        wanted = model.embed(["the cat", "a"])
    plan = compile_model(folder, tmp_path / "e.rlx", steps={8: 4, 16: 2})
    assert plan.settings["steps"] == [(8, 4), (16, 2)]
    before = counters.passes
    with rlx.load(folder, artifact=tmp_path / "e.rlx") as model:
        assert model.max_tokens == 16
        np.testing.assert_allclose(model.embed(["the cat", "a"]), wanted, rtol=1e-5, atol=1e-6)
    assert counters.passes == before
    language = write_tiny(tmp_path / "tiny.gguf")
    with pytest.raises(rlx.FormatError, match="another kind of model"):
        rlx.load(language, artifact=tmp_path / "e.rlx")
    with pytest.raises(rlx.OptionError, match="longer than the model"):
        compile_model(folder, tmp_path / "x.rlx", steps={100_000: 1})


# -- continuous batching --------------------------------------------------------------------------

MANY = [PROMPT, [9, 8], [7]]


def answers(path: Path, **options: object) -> tuple[list[list[int]], int]:
    """Tokens of greedy answers, one after another and then together, and how often weights were
    packed for them."""
    with rlx.Engine(path, requests=3, **options) as engine:
        found = [g.tokens for p in MANY for g in engine.generate([p], temperature=0, max_tokens=4)]
        result = engine.generate(MANY, temperature=0, max_tokens=4, presence_penalty=0.5)
        found += [g.tokens for g in result]
        return found, engine.runner.params.preparations


def test_a_second_engine_runs_no_pass_and_packs_nothing(tiny: Path) -> None:
    wanted, packed = answers(tiny, context=64)
    assert packed > 0
    before = counters.passes, counters.plans, jit.compilations
    assert answers(tiny, context=64) == (wanted, 0)
    assert (counters.passes, counters.plans, jit.compilations) == before


@pytest.mark.skipif(sys.platform != "linux", reason="where the system tells of its maps")
def test_a_closed_engine_frees_its_weights(tiny: Path) -> None:
    with rlx.Engine(tiny, requests=2, context=64) as engine:
        engine.generate([PROMPT], max_tokens=2)
        cache = AotCache.default()
        assert cache is not None
        (weights,) = (e.path for e in cache.entries() if e.path.suffix == ".weights")
        assert mapped(weights)
    gc.collect()
    assert not mapped(weights)


def test_an_engine_uses_the_weights_that_a_model_packed(tiny: Path) -> None:
    assert answer(tiny, context=64)[1] > 0
    assert answers(tiny, context=64)[1] == 0


def test_little_memory_gives_the_same_pool_at_every_start(tiny: Path) -> None:
    model = ModelFile.open(tiny)
    whole = KVPool.of(model, requests=8, context=256)
    assert whole.slots == 8 * 256
    for share in (0.5, 0.6, 0.9):  # of what all requests could fill
        memory = int(share * whole.slots * whole.token_bytes)
        assert KVPool.of(model, requests=8, context=256, memory=memory).slots == 4 * 256
    with pytest.raises(rlx.InputError, match="memory would not suffice"):
        KVPool.of(model, requests=8, context=256, cache_tokens=8 * 256, memory=memory)


_ENGINE = """
import sys
sys.modules["llvmlite"] = None
import rlx
with rlx.Engine({path!r}, artifact={artifact!r}) as engine:
    for settings in ({{}}, {{"logit_bias": {{3: 99.0}}}}):
        result = engine.generate({prompts}, temperature=0, max_tokens=4, **settings)
        print(*(g.tokens for g in result), sep="|")
with rlx.load({path!r}, artifact={artifact!r}) as model:
    result = model.generate({prompts}[0], temperature=0, max_tokens=4, stream=False, speculate=2)
    print(result.tokens)
"""


def test_an_artifact_serves_batching_and_speculation_without_llvmlite(
    tiny: Path, tmp_path: Path
) -> None:
    file = tmp_path / "many.rlx"
    plan = compile_model(tiny, file, context=64, requests=3, speculate=2, weights=True)
    assert {"requests", "row-sample", "verify-3"} <= plan.entry_points.keys()
    assert plan.settings["cache_tokens"] == 3 * 64
    with rlx.Engine(tiny, requests=3, context=64) as engine:
        wanted = [g.tokens for g in engine.generate(MANY, temperature=0, max_tokens=4)]
    code = _ENGINE.format(path=str(tiny), artifact=str(file), prompts=MANY)
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    plain, biased, drafted = run.stdout.splitlines()
    assert plain == "|".join(map(str, wanted))
    assert biased == "|".join(["[3, 3, 3, 3]"] * 3)
    assert drafted == str(wanted[0])
    with pytest.raises(rlx.OptionError, match="made for something else"):
        rlx.Engine(tiny, artifact=file, requests=4)


def test_an_artifact_for_one_request_serves_no_engine(tiny: Path, tmp_path: Path) -> None:
    compile_model(tiny, tmp_path / "one.rlx", context=64)
    with pytest.raises(rlx.OptionError, match="not made for batching"):
        rlx.Engine(tiny, artifact=tmp_path / "one.rlx")
