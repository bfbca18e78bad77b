"""A device with memory of its own gives what the reference gives, and is never reached into."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import opaque_device
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "goldens"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "models"))
from test_generate import Letters
from tiny import PROMPT, write_folder

import rlx
from rlx import CompileOptions, DimBinding, GraphModule, ParamStore, Session, UpTo
from rlx.backends.buffer import HOST, DeviceBuffer
from rlx.backends.decode_loop import LoopSpec
from rlx.models.model_file import ModelFile
from rlx.runtime.params import Deferred

SHAPES = {"w1": (64, 256), "b1": (256,), "w2": (256, 10)}
RNG = np.random.default_rng(4)
PARAMS = {name: RNG.normal(size=dims).astype(np.float32) for name, dims in SHAPES.items()}


@pytest.fixture
def memory() -> opaque_device.OpaqueMemory:
    backend = rlx.Device("opaque").backend
    assert isinstance(backend, opaque_device.OpaqueBackend)
    return backend.memory


@pytest.fixture(autouse=True)
def letters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelFile, "tokenizer", lambda self: Letters())


def mlp() -> GraphModule:
    def build(g: GraphModule) -> object:
        x = g.input("x", ["batch", 64])
        h = g.linear(x, g.param("w1", [64, 256]), g.param("b1", [256]), activation="gelu")
        return g.linear(h, g.param("w2", [256, 10]))

    return GraphModule.define("mlp", build)


def counter() -> rlx.Graph:
    """Appends to a cache and sums what is in it."""
    g = rlx.Graph("counter")
    x = g.input("x", [1, "seq", 2])
    cache = g.state("cache", [1, 8, 2])
    updated = g.state_update(cache, x, axis=1, start="past_seq")
    g.set_outputs({"total": g.sum(g.narrow(updated, 1, 0, "past_seq + seq"), 1)})
    return g


def counting(seq: int, bound: int) -> rlx.CompiledGraph:
    binding = DimBinding(seq=seq).set_live("past_seq", bound)
    return Session("opaque").compile(counter(), CompileOptions(binding=binding))


# -- memory ---------------------------------------------------------------------------------------


def test_copies_views_and_zeros(memory: opaque_device.OpaqueMemory) -> None:
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    buffer = memory.put(array)
    array[0] = 99  # a copy was taken
    row = buffer.view(16, (4,), np.float32)
    assert row.copy_out().tolist() == [4, 5, 6, 7]
    other = memory.alloc((4,), np.float32)
    assert other.copy_out().tolist() == [0] * 4
    memory.copy(other, row)
    row.zero()
    assert buffer.copy_out().tolist() == [[0, 1, 2, 3], [0, 0, 0, 0], [8, 9, 10, 11]]
    back = HOST.alloc((4,), np.float32)
    HOST.copy(back, other)
    assert back.array.tolist() == [4, 5, 6, 7]
    memory.copy(row, back)
    assert row.copy_out().tolist() == [4, 5, 6, 7]


def test_the_host_cannot_reach_it(memory: opaque_device.OpaqueMemory) -> None:
    buffer = memory.put(np.ones(4, np.float32))
    for reach in (lambda: buffer.array, lambda: np.asarray(buffer), lambda: np.from_dlpack(buffer)):
        with pytest.raises(rlx.UnsupportedError, match=r"\[opaque\] the host cannot access"):
            reach()
    with pytest.raises(rlx.InputError, match="past the end of a buffer"):
        buffer.view(4, (4,), np.float32)
    with pytest.raises(rlx.InputError, match="does not fit"):
        buffer.copy_in(np.ones(3, np.float32))
    with pytest.raises(rlx.InputError, match="of another device"):
        memory.zero(HOST.alloc((4,), np.float32))


def test_memory_that_is_not_there(memory: opaque_device.OpaqueMemory) -> None:
    with pytest.raises(rlx.OutOfMemoryError, match=r"\[opaque\] out of memory.*8,000,000,000 byt"):
        memory.alloc((2_000_000_000,), np.float32)
    with pytest.raises(MemoryError):
        memory.alloc((2_000_000_000,), np.float32)


def test_memory_is_freed_with_its_last_view(memory: opaque_device.OpaqueMemory) -> None:
    gc.collect()
    memory.synchronize()
    before = memory.used
    view = memory.alloc((1000,), np.uint8).view(8, (2,), np.int32)
    assert memory.used == before + 1000
    del view
    memory.synchronize()
    assert memory.used == before


# -- graphs ---------------------------------------------------------------------------------------


def test_a_network_for_two_batches(memory: opaque_device.OpaqueMemory) -> None:
    f = Session("opaque").compile(mlp()).set_params(PARAMS)
    oracle = Session("reference").compile(mlp()).set_params(PARAMS)
    for batch in (3, 5, 3):
        x = RNG.normal(size=(batch, 64)).astype(np.float32)
        np.testing.assert_array_equal(f.run(x=x)[0], oracle.run(x=x)[0])
    assert isinstance(f.executable.arena, DeviceBuffer)
    before = memory.copied_in
    f.run(x=x)
    assert memory.copied_in - before == x.nbytes  # parameters are there already
    assert "matmul" in str(f.profile(x=x))


def test_parameters_are_copied_once_for_all_variants(memory: opaque_device.OpaqueMemory) -> None:
    store = ParamStore(PARAMS)
    graphs = [Session("opaque").compile(mlp(), params=store) for _ in range(2)]
    x = np.ones((2, 64), np.float32)
    graphs[0].run(x=x)
    before = memory.copied_in
    graphs[1].run(x=x)
    graphs[1].run(x=x[:1])
    assert memory.copied_in - before == 3 * x.nbytes // 2
    assert store.get("w1") is PARAMS["w1"]  # the host's array stays as it was given


def test_parameters_set_again(memory: opaque_device.OpaqueMemory) -> None:
    f = Session("opaque").compile(mlp()).set_params(PARAMS)
    oracle = Session("cpu").compile(mlp()).set_params(PARAMS)
    x = RNG.normal(size=(2, 64)).astype(np.float32)
    for scale in (1, 2, 3):
        given = {name: scale * array for name, array in PARAMS.items()}
        got, wanted = (g.set_params(given).run(x=x)[0] for g in (f, oracle))
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-4)


def test_parameters_may_be_buffers_of_the_device(memory: opaque_device.OpaqueMemory) -> None:
    buffers = {name: memory.put(array) for name, array in PARAMS.items()}
    f = Session("opaque").compile(mlp()).set_params(buffers)
    oracle = Session("reference").compile(mlp()).set_params(PARAMS)
    x = RNG.normal(size=(2, 64)).astype(np.float32)
    np.testing.assert_array_equal(f.run(x=x)[0], oracle.run(x=x)[0])
    np.testing.assert_array_equal(f.params.get("w1"), PARAMS["w1"])


def test_a_deferred_parameter_does_not_stay_in_host_memory() -> None:
    computed: list[str] = []

    def make(name: str) -> np.ndarray:
        computed.append(name)
        return PARAMS[name]

    late = {n: Deferred(SHAPES[n], rlx.f32, lambda n=n: make(n)) for n in SHAPES}
    f = Session("opaque").compile(mlp()).set_params(late)
    oracle = Session("reference").compile(mlp()).set_params(PARAMS)
    x = RNG.normal(size=(2, 64)).astype(np.float32)
    for rows in (1, 2):
        np.testing.assert_array_equal(f.run(x=x[:rows])[0], oracle.run(x=x[:rows])[0])
    assert sorted(computed) == sorted(SHAPES)
    assert all(isinstance(f.params._arrays[name], Deferred) for name in SHAPES)


def test_one_store_for_two_devices() -> None:
    store = ParamStore(PARAMS)
    x = RNG.normal(size=(2, 64)).astype(np.float32)
    got = [Session(d).compile(mlp(), params=store).run(x=x)[0] for d in ("opaque", "reference")]
    np.testing.assert_array_equal(*got)


def test_inputs_may_be_buffers_of_the_device(memory: opaque_device.OpaqueMemory) -> None:
    f = Session("opaque").compile(mlp()).set_params(PARAMS)
    x = RNG.normal(size=(2, 64)).astype(np.float32)
    (wanted,) = f.run(x=x)
    buffer = memory.put(x)
    before = memory.copied_in
    np.testing.assert_array_equal(f.run(x=buffer)[0], wanted)
    np.testing.assert_array_equal(f.run(x=opaque_device.OpaqueTensor(buffer))[0], wanted)
    assert memory.copied_in == before
    with pytest.raises(rlx.InputError, match="wrong element type"):
        f.run(x=memory.put(x.astype(np.float64)))
    with pytest.raises(rlx.InputError, match="of another device"):
        Session("reference").compile(mlp()).set_params(PARAMS).run(x=buffer)
    np.testing.assert_array_equal(f.run(x=HOST.put(x))[0], wanted)


def test_runs_are_queued_until_the_host_waits(memory: opaque_device.OpaqueMemory) -> None:
    binding = CompileOptions(binding=DimBinding(batch=1))
    f = Session("opaque").compile(mlp(), binding).set_params(PARAMS)
    x = np.ones((1, 64), np.float32)
    (wanted,) = f.run(x=x)
    f.slot_buffer("x").zero()
    f.run_slots()
    f.synchronize()
    gate = threading.Event()
    memory.stream.submit(lambda: gate.wait(60) and None)
    f.run_slots(x)  # returns although the device stands still
    gate.set()
    f.synchronize()
    np.testing.assert_array_equal(f.slot_buffer(f.output_names[0]).copy_out(), wanted)
    with pytest.raises(rlx.UnsupportedError):
        f.slot("x")


def test_an_error_on_the_device_is_raised_where_the_host_waits() -> None:
    g = rlx.Graph("lookup")
    g.set_outputs(g.gather(g.param("table", [4]), g.input("ids", ["n"], "i32"), axis=0))
    f = Session("opaque").compile(g).set_param("table", np.arange(4, dtype=np.float32))
    with pytest.raises(rlx.InputError, match="out of range"):
        f.run(ids=np.array([9], np.int32))
    assert f.run(ids=np.array([3], np.int32))[0].tolist() == [3]


def test_phases_run_alone() -> None:
    f, oracle = (Session(d).compile(mlp()).set_params(PARAMS) for d in ("opaque", "reference"))
    x = RNG.normal(size=(2, 64)).astype(np.float32)
    assert f.run(x=x, until="prologue") == (None,)
    np.testing.assert_array_equal(f.run(x=x, until="epilogue")[0], oracle.run(x=x)[0])


def test_code_is_made_for_a_binding_at_once() -> None:
    f = Session("opaque").compile(mlp(), binding={"batch": 2}).set_params(PARAMS)
    warm = f.executable
    assert f.manifest.find("x").num_bytes == 2 * 64 * 4
    assert f.run(x=np.ones((2, 64), np.float32))[0].shape == (2, 10)
    assert f.executable is warm
    assert f.run(x=np.ones((3, 64), np.float32))[0].shape == (3, 10)  # others as before
    bounded = Session("opaque").compile(counter(), binding={"seq": 1, "past_seq": UpTo(7)})
    assert bounded.template.dynamic_dims == {"past_seq": 7}
    for wrong in ({}, {"batch": 2, "seq": 3}):
        with pytest.raises(rlx.BindingError, match="open symbols"):
            Session("opaque").compile(mlp(), binding=wrong)


# -- states ---------------------------------------------------------------------------------------


def test_states_are_bound_shared_and_read_back() -> None:
    prefill, decode = counting(2, 6), counting(1, 7)
    assert not prefill.read_state("cache").any()
    decode.bind_state("cache", prefill.state_buffer("cache"))
    prefill.run(x=np.ones((1, 2, 2), np.float32), sizes={"past_seq": 0})
    (total,) = decode.run(x=np.full((1, 1, 2), 5, np.float32), sizes={"past_seq": 2})
    assert total.tolist() == [[7, 7]]
    copy = prefill.read_state("cache")
    assert copy[0, :, 0].tolist() == [1, 1, 5, 0, 0, 0, 0, 0]
    copy.fill(3)  # a copy: the state stays
    assert decode.read_state("cache")[0, 0, 0] == 1
    prefill.bind_state("cache", copy)  # begins from a copy, and shares no longer
    (total,) = prefill.run(x=np.ones((1, 2, 2), np.float32), sizes={"past_seq": 1})
    assert total.tolist() == [[5, 5]]
    decode.state_buffer("cache").zero()
    assert not decode.read_state("cache").any()
    with pytest.raises(rlx.InputError, match="a buffer of the device or"):
        decode.bind_state("cache", HOST.alloc((1, 8, 2), np.float32))
    with pytest.raises(rlx.RlxError):
        decode.bind_state("cache", decode.allocator.alloc((1, 9, 2), np.float32))


def test_a_decode_loop_gives_what_single_runs_give() -> None:
    table = np.random.default_rng(3).permutation(11).astype(np.int32)
    g = rlx.Graph("walk")
    ids = g.input("ids", [1], "i32")
    token = g.gather(g.param("table", [11], "i32"), ids, axis=0)
    seen = g.state_update(g.state("seen", [16], "i32"), token, axis=0, start="past_seq")
    total = g.sum(g.narrow(seen, 0, 0, "past_seq + 1"), 0, keepdims=True)
    g.set_outputs({"token": token, "total": total})
    options = CompileOptions(binding=DimBinding().set_live("past_seq", 15))
    f = Session("opaque").compile(g, options).set_param("table", table)
    wanted, at = [], 4
    for _ in range(9):
        at = int(table[at])
        wanted.append(at)
    loop = f.decode_loop(LoopSpec({"ids": "token"}, "token", "past_seq"))
    f.slot_buffer("ids").copy_in(np.array([4], np.int32))
    assert f.run_loop(loop, {"past_seq": 0}, 5, ()) == wanted[:5]
    assert f.run_loop(loop, {"past_seq": 5}, 9, {wanted[7]}) == wanted[5:8]
    assert f.read_state("seen")[:8].tolist() == wanted[:8]
    assert f.slot_buffer("total").copy_out().tolist() == [sum(wanted[:8])]


# -- language models ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    write_folder("llama", path)
    return path


@pytest.fixture
def models(folder: Path) -> Iterator[list[Any]]:
    models = [rlx.load(folder, device=d, context=40, kv="f32") for d in ("opaque", "reference")]
    yield models
    for model in models:
        model.close()


def test_a_language_model_reuses_its_kv_cache(models: list[Any]) -> None:
    def ask(prompt: list[int], **settings: Any) -> rlx.Generation:
        got, wanted = (m.generate(prompt, stream=False, **settings) for m in models)
        assert got.tokens == wanted.tokens
        assert got.reused_tokens == wanted.reused_tokens
        return got

    first = ask(PROMPT, temperature=0.0, max_tokens=6)
    second = ask([*PROMPT, *first.tokens[:-1], 7, 8], temperature=0.0, max_tokens=5)
    assert second.reused_tokens == len(PROMPT) + 5  # a prefix is not run again
    ask(PROMPT, temperature=1.5, seed=7, max_tokens=8)
    ask(PROMPT, temperature=1.5, seed=7, max_tokens=8, repetition_penalty=1.3)
    states = models[0].runner._states.values()
    assert states and all(isinstance(state, DeviceBuffer) for state in states)


def test_recurrent_states_begin_with_zeros(tmp_path: Path) -> None:
    write_folder("mamba2", tmp_path)
    for _ in range(2):
        found = []
        for device in ("opaque", "reference"):
            with rlx.load(tmp_path, device=device, context=40, kv="f32") as model:
                ask = {"stream": False, "temperature": 0.0, "max_tokens": 4}
                found.append([model.generate(p, **ask).tokens for p in (PROMPT, [3, 1], PROMPT)])
        assert found[0] == found[1]
        assert found[0][0] == found[0][2]


def test_many_requests_share_pages(folder: Path) -> None:
    prompts = [[*PROMPT, *range(i + 1)] for i in range(3)]
    found = []
    for device in ("opaque", "reference"):
        with rlx.Engine(folder, requests=2, kv="f32", cache_tokens=256, device=device) as engine:
            replies = [engine.submit(p, temperature=0.0, max_tokens=4) for p in prompts]
            found.append([reply.wait().tokens for reply in replies])
    assert found[0] == found[1]


def test_runs_are_queued_before_tokens_are_known(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests that stop at a token, have penalties, come later or end at different lengths give
    the tokens of each alone; a run too many leaves nothing behind in pages that others share."""
    prompts = [[*PROMPT, *range(i + 1)] for i in range(4)]
    asked: list[dict[str, Any]] = [
        {"temperature": 0.0, "max_tokens": 9},
        {"temperature": 0.9, "seed": 3, "max_tokens": 14},
        {"temperature": 0.7, "seed": 5, "max_tokens": 3},
        {"temperature": 0.0, "repetition_penalty": 1.3, "max_tokens": 4},
    ]
    with rlx.load(folder, device="reference", kv="f32") as model:
        free = model.generate(prompts[1], stream=False, **asked[1]).tokens
        asked[1]["stop_tokens"] = frozenset([free[5]])
        wanted = [
            model.generate(p, stream=False, **how).tokens
            for p, how in zip(prompts, asked, strict=True)
        ]
    assert len(wanted[1]) < len(free)
    order: list[str] = []
    with rlx.Engine(folder, requests=3, kv="f32", cache_tokens=512, device="opaque") as engine:
        runner, take_in = engine.runner, engine._take_in
        queue_next = runner.queue_next

        def noted_next(run: Any) -> Any:
            order.append("queue")
            return queue_next(run)

        def noted_take_in(*given: Any) -> None:
            order.append("read")
            take_in(*given)

        monkeypatch.setattr(runner, "queue_next", noted_next)
        monkeypatch.setattr(engine, "_take_in", noted_take_in)
        for chosen in ([1], [0, 1, 2], [0, 1, 2, 3], [1, 1, 0]):
            replies = [engine.submit(prompts[i], **asked[i]) for i in chosen]
            assert [r.wait().tokens for r in replies] == [wanted[i] for i in chosen]
        assert "".join(o[0] for o in order).count("qrqr") > 2, order
        reply = engine.submit(prompts[0], temperature=0.0, max_tokens=200)
        assert next(iter(reply)) and not reply.ended
        reply.close()
        assert engine.drain(5) and not engine.stats().running
