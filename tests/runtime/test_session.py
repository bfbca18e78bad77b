"""Sessions on the reference device: any size, dynamic dims, states, parameters, and bad input."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import rlx
from rlx import CompileOptions, DimBinding, GraphModule, ParamStore, Session

W = np.arange(12, dtype=np.float32).reshape(4, 3)


def linear() -> GraphModule:
    def build(g: GraphModule) -> object:
        return g.linear(g.input("x", ["batch", 4]), g.param("w", [4, 3]), g.param("b", [3]))

    return GraphModule.define("linear", build)


def counter() -> rlx.Graph:
    """Appends to a cache and sums what is in it."""
    g = rlx.Graph("counter")
    x = g.input("x", [1, "seq", 2])
    cache = g.state("cache", [1, 8, 2])
    updated = g.state_update(cache, x, axis=1, start="past_seq")
    g.set_outputs({"total": g.sum(g.narrow(updated, 1, 0, "past_seq + seq"), 1)})
    return g


def compiled(options: CompileOptions | None = None) -> rlx.CompiledGraph:
    f = Session("reference").compile(linear(), options)
    return f.set_params({"w": W, "b": np.ones(3, np.float32)})


@pytest.mark.parametrize("batch", [1, 3, 0, 7])
def test_any_batch_without_compiling_again(batch: int) -> None:
    f = compiled()
    x = np.random.default_rng(batch).normal(size=(batch, 4)).astype(np.float32)
    (y,) = f.run(x=x)
    np.testing.assert_allclose(y, x @ W + 1, rtol=1e-6, atol=1e-6)
    assert np.array_equal(f.run({"x": x})[0], y)


def test_results_are_the_callers_own() -> None:
    f = compiled()
    (first,) = f.run(x=np.zeros((1, 4), np.float32))
    kept = first.copy()
    f.run(x=np.ones((1, 4), np.float32))
    assert np.array_equal(first, kept)


def test_slots_are_where_the_manifest_says() -> None:
    f = compiled(CompileOptions(binding=DimBinding(batch=2)))
    entry = f.manifest.find("x")
    assert entry.arena_offset is not None
    x = np.arange(8, dtype=np.float32).reshape(2, 4)
    raw = x.tobytes()
    f.executable.arena.array[entry.arena_offset : entry.arena_offset + len(raw)] = list(raw)
    f.run_slots()
    out = f.manifest.outputs[0]
    assert out.arena_offset is not None
    got = f.executable.arena.view(out.arena_offset, (2, 3), np.float32).array
    np.testing.assert_allclose(got, x @ W + 1)
    f.slot("x")[...] = 0
    f.run_slots()
    np.testing.assert_array_equal(f.slot(out.name), np.ones((2, 3), np.float32))


def test_dynamic_dims_serve_every_length_up_to_the_bound() -> None:
    options = CompileOptions(binding=DimBinding(seq=1).set_live("past_seq", 7))
    f = Session("reference").compile(counter(), options)
    executable = f.executable
    total = np.zeros(2, np.float32)
    for past in range(8):
        x = np.full((1, 1, 2), past + 1, np.float32)
        total += past + 1
        (got,) = f.run(x=x, sizes={"past_seq": past})
        assert np.array_equal(got[0], total)
        assert f.executable is executable
    assert np.array_equal(f.read_state("cache")[0, :, 0], np.arange(1, 9))
    with pytest.raises(rlx.BindingError, match="beyond the bound of its dynamic dimension"):
        f.run(x=x, sizes={"past_seq": 8})
    with pytest.raises(rlx.BindingError, match="size of a dynamic dimension is missing"):
        f.run(x=x)


def test_states_can_be_shared_and_are_zero_at_first() -> None:
    options = CompileOptions(binding=DimBinding(seq=2).set_live("past_seq", 6))
    prefill = Session("reference").compile(counter(), options)
    decode = Session("reference").compile(
        counter(), CompileOptions(binding=DimBinding(seq=1).set_live("past_seq", 7))
    )
    assert not prefill.read_state("cache").any()
    decode.bind_state("cache", prefill.read_state("cache"))
    prefill.run(x=np.ones((1, 2, 2), np.float32), sizes={"past_seq": 0})
    (total,) = decode.run(x=np.full((1, 1, 2), 5, np.float32), sizes={"past_seq": 2})
    assert np.array_equal(total, [[7, 7]])


@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_host_memory_is_used_in_place(device: str) -> None:
    """Arrays bound as states and given as parameters are the memory that runs work on."""
    options = CompileOptions(binding=DimBinding(seq=1).set_live("past_seq", 7))
    f = Session(device).compile(counter(), options)
    cache = np.zeros((1, 8, 2), np.float32)
    assert f.bind_state("cache", cache).read_state("cache") is cache
    f.run(x=np.full((1, 1, 2), 3, np.float32), sizes={"past_seq": 4})
    assert cache[0, :, 0].tolist() == [0, 0, 0, 0, 3, 0, 0, 0]
    f.state_buffer("cache").zero()
    assert not cache.any()
    w = W.copy()
    g = Session(device).compile(linear())
    g.set_params({"w": w, "b": np.zeros(3, np.float32)}).run(x=X)
    assert g.params.buffer("w", g.allocator).array is w
    with pytest.raises(rlx.InputError, match="must be writeable"):
        cache.flags.writeable = False
        f.bind_state("cache", cache)


@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_code_is_made_when_sizes_are_known(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arenas: list[int] = []
    backend = type(rlx.Device(device).backend)
    plain = backend.compile

    def compile(self: object, lir: rlx.Lir, options: CompileOptions) -> object:
        arenas.append(lir.arena_size)
        return plain(self, lir, options)

    monkeypatch.setattr(backend, "compile", compile)
    given = {"w": W, "b": np.ones(3, np.float32)}
    f = Session(device).compile(linear()).set_params(given)
    assert not arenas  # the batch is open
    f.run(x=X)
    assert len(arenas) == 1
    Session(device).compile(linear(), CompileOptions(binding=DimBinding(batch=2)))
    assert len(arenas) == 2  # nothing is open
    g = Session(device).compile(linear(), binding={"batch": 2}).set_params(given)
    assert len(arenas) == 3
    np.testing.assert_array_equal(g.run(x=X)[0], f.run(x=X)[0])
    assert len(arenas) == 3
    g.warm(batch=5)
    g.run(x=np.zeros((5, 4), np.float32))
    assert len(arenas) == 4


def test_a_write_past_the_state_is_refused() -> None:
    f = Session("reference").compile(
        counter(), CompileOptions(binding=DimBinding(seq=4).set_live("past_seq", 100))
    )
    with pytest.raises(rlx.RlxError, match=r"past the end|reaches past"):
        f.run(x=np.ones((1, 4, 2), np.float32), sizes={"past_seq": 50})


def test_parameters_are_shared_not_copied() -> None:
    store = ParamStore()
    first = Session("reference").compile(linear(), params=store)
    second = Session("reference").compile(
        linear(), CompileOptions(binding=DimBinding(batch=1)), params=store
    )
    w = W.copy()
    first.set_params({"w": w, "b": np.zeros(3, np.float32)})
    assert store.get("w") is w
    x = np.ones((1, 4), np.float32)
    assert np.array_equal(first.run(x=x)[0], second.run(x=x)[0])
    second.set_param("w", 2 * W)
    assert np.array_equal(first.run(x=x)[0], 2 * (x @ W))


def test_dlpack_in_and_out() -> None:
    class Foreign:
        def __init__(self, array: np.ndarray) -> None:
            self.array = array

        def __dlpack__(self, **options: object) -> object:
            return self.array.__dlpack__(**options)

        def __dlpack_device__(self) -> tuple[int, int]:
            return self.array.__dlpack_device__()

    f = compiled()
    x = np.ones((2, 4), np.float32)
    (y,) = f.run(x=Foreign(x))
    assert np.array_equal(np.from_dlpack(y), x @ W + 1)


def test_threads_take_turns() -> None:
    f = compiled()
    wrong: list[int] = []

    def work(seed: int) -> None:
        x = np.random.default_rng(seed).normal(size=(seed + 1, 4)).astype(np.float32)
        for _ in range(20):
            if not np.allclose(f.run(x=x)[0], x @ W + 1, rtol=1e-5, atol=1e-5):
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


X = np.zeros((2, 4), np.float32)


@pytest.mark.parametrize(
    ("inputs", "error", "text"),
    [
        ({}, rlx.InputError, r"missing inputs.*x \[batch, 4\] f32"),
        ({"x": X, "z": X}, rlx.InputError, "unknown input.*got z.*expected x"),
        ({"x": X.astype(np.float64)}, rlx.InputError, r"wrong element type.*float64.*f32"),
        ({"x": np.zeros((2, 5), np.float32)}, rlx.RlxError, r"5.*4|4.*5"),
        ({"x": np.zeros(4, np.float32)}, rlx.RlxError, "x"),
    ],
)
def test_bad_inputs(inputs: dict[str, object], error: type[Exception], text: str) -> None:
    f = compiled()
    with pytest.raises(error, match=text):
        f.run(inputs)
    f.run(x=X)  # nothing is broken by it


def test_bad_parameters() -> None:
    f = Session("reference").compile(linear())
    with pytest.raises(rlx.InputError, match=r"parameters not given.*w, b"):
        f.run(x=X)
    with pytest.raises(rlx.InputError, match=r"unknown parameter.*expected w, b"):
        f.set_param("v", W)
    with pytest.raises(rlx.InputError, match="wrong element type"):
        f.set_param("w", W.astype(np.int32))
    with pytest.raises(rlx.RlxError, match="w"):
        f.set_param("w", W.T)
    with pytest.raises(rlx.InputError, match="unknown state"):
        f.read_state("cache")


def test_bad_options() -> None:
    with pytest.raises(rlx.OptionError, match="did you mean reference"):
        Session("refrence")
    with pytest.raises(rlx.OptionError, match="unknown option"):
        Session("reference").compile(linear(), {"speed": 11})
    with pytest.raises(rlx.OptionError, match="not a graph"):
        Session("reference").compile("linear")  # type: ignore[arg-type]
    options = CompileOptions(profile=rlx.CompileProfile(passes=("simplfy",)))
    with pytest.raises(rlx.OptionError, match="did you mean simplify"):
        Session("reference").compile(linear(), options)


def test_two_inputs_must_agree_on_a_symbol() -> None:
    g = rlx.Graph("t")
    g.set_outputs(g.input("a", ["n"]) + g.input("b", ["n"]))
    f = Session("reference").compile(g)
    with pytest.raises(rlx.BindingError, match="two sizes"):
        f.run(a=np.zeros(2, np.float32), b=np.zeros(3, np.float32))


def test_profiles_and_dispatch_are_applied() -> None:
    bf16 = CompileOptions(profile=rlx.CompileProfile(precision="bf16"))
    f = Session("reference").compile(linear(), bf16)
    f.set_params({"w": W + np.float32(1 / 512), "b": np.zeros(3, np.float32)})
    x = np.eye(4, dtype=np.float32)
    coarse = (W + np.float32(1 / 512)).astype(rlx.bf16.numpy).astype(np.float32)
    assert np.array_equal(f.run(x=x)[0], coarse)
    common = CompileOptions(
        dispatch=rlx.KernelDispatchConfig(force_common_kinds=frozenset({"softmax"}))
    )
    g = rlx.Graph("t")
    g.set_outputs(g.softmax(g.input("x", ["n", 4])))
    op_names = {n.kind for n in Session("reference").compile(g, common).template.result.graph.nodes}
    assert "softmax" not in op_names
    forced = CompileOptions(
        dispatch=rlx.KernelDispatchConfig(force_common_kinds=frozenset({"input", "exp"}))
    )
    h = rlx.Graph("t")
    h.set_outputs(h.exp(h.input("x", [4])))
    with pytest.raises(rlx.UnsupportedError) as caught:
        Session("reference").compile(h, forced)
    assert "exp" in str(caught.value)


@pytest.mark.parametrize("device", ["reference", "cpu"])
def test_a_profile_accounts_for_every_launch(device: str) -> None:
    g = rlx.Graph("t")
    g.set_outputs(g.matmul(g.input("x", ["n", 64]), g.param("w", [64, 32])))
    f = Session(device).compile(g).set_param("w", np.ones((64, 32), np.float32))
    profile = f.profile(x=np.ones((100, 64), np.float32), repeat=3)
    assert sum(r.flops for r in profile.rows) == 2 * 100 * 64 * 32
    assert all(r.seconds > 0 for r in profile.rows)
    assert "GFLOP/s" in str(profile)
    assert any("matmul" in r.node for r in profile.rows)


@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_parameters_may_be_strided(device: str) -> None:
    """Given to a store of one's own, as loaders do, or to the graph: never read as if in order."""
    joined = np.arange(24, dtype=np.float32).reshape(4, 6)
    store = ParamStore()
    store.set("w", joined[:, ::2])
    g = rlx.Graph("strided")
    g.set_outputs(g.matmul(g.input("x", ["n", 4]), g.param("w", [4, 3])))
    f = Session(device).compile(g, params=store)
    np.testing.assert_array_equal(f.run(x=np.eye(4, dtype=np.float32))[0], joined[:, ::2])


@pytest.mark.parametrize("device", ["reference", "cpu"])
def test_a_scalar_of_parameters_alone_is_prepared(device: str) -> None:
    """Zero axes stay zero axes: NumPy's `ascontiguousarray` would make one of them."""
    module = rlx.GraphModule.define(
        "scaled", lambda g: g.input("x", ["n"]) * g.param("w", [3]).sum()
    )
    f = Session(device).compile(module).set_param("w", np.float32([1, 2, 3]))
    np.testing.assert_array_equal(f(np.float32([1, 2])), [6, 12])
