"""Layers of `rlx.nn`: PyTorch's numbers from PyTorch's weights, the tree, states, training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nn_cases import LAYERS, Case

import rlx
import rlx.numpy as rnp
from rlx import nn, random
from rlx.formats.safetensors import SafetensorsFile
from rlx.nn import functional as F
from rlx.numpy.tree import flatten, unflatten

GOLDENS = np.load(Path(__file__).parent.parent / "goldens" / "nn.npz")
KEY = random.key(3)
Array = Any

# f32 sums of up to 100 products in another order; recurrent layers and transformers repeat them
# some ten times, which adds up to some hundred roundings of 6e-8
TOLERANCE = {"rtol": 2e-5, "atol": 5e-6}


def _flat(result: Any) -> list[Array]:
    if isinstance(result, (tuple, list)):
        return [x for part in result for x in _flat(part)]
    return [np.asarray(result)]


def _golden(case: Case, part: str) -> dict[str, Array]:
    prefix = f"layer {case.name}/{part}"
    return {n.removeprefix(prefix): GOLDENS[n] for n in GOLDENS.files if n.startswith(prefix)}


def _layer(case: Case) -> Any:
    """The layer with PyTorch's weights, by PyTorch's names."""
    return eval(case.expression, {"nn": nn}).load_state_dict(_golden(case, "state/"))


@pytest.mark.parametrize("case", LAYERS, ids=lambda c: c.name)
def test_layers_give_the_numbers_of_pytorch(case: Case) -> None:
    layer, inputs = _layer(case).eval(), case.arrays().values()
    expected = list(_golden(case, "y").values())
    called = rlx.jit(lambda layer, *args: layer(*args))
    for results in (_flat(layer(*inputs)), _flat(called(layer, *inputs))):
        assert len(results) == len(expected)
        for found, wanted in zip(results, expected, strict=True):
            np.testing.assert_allclose(found, wanted, **TOLERANCE)


@pytest.mark.parametrize(
    "case", [c for c in LAYERS if "BatchNorm" in c.expression], ids=lambda c: c.name
)
def test_batch_norm_trains_as_pytorch_does(case: Case) -> None:
    (x,) = case.arrays().values()
    (expected,), after = _golden(case, "trained").values(), _golden(case, "after/")

    @rlx.jit
    def step(layer: Any, x: Array) -> Any:
        return layer(x), layer

    eager, before = _layer(case).train(), _layer(case).train()
    traced, new = step(before, x)
    np.testing.assert_allclose(np.asarray(eager(x)), expected, **TOLERANCE)
    np.testing.assert_allclose(np.asarray(traced), expected, **TOLERANCE)
    for layer in (eager, new):
        state = layer.state_dict()
        assert list(state) == list(after)
        for name, wanted in after.items():
            np.testing.assert_allclose(np.asarray(state[name]), wanted, **TOLERANCE)
    for name, array in before.state_dict().items():  # the argument stays as it was
        assert np.array_equal(np.asarray(array), _golden(case, "state/")[name])


def test_a_captured_module_that_trains_is_refused() -> None:
    layer = nn.BatchNorm1d(3)
    with pytest.raises(rlx.InputError, match=r"captured by rlx\.jit"):
        rlx.jit(lambda x: layer(x))(np.ones((2, 3), np.float32))
    assert isinstance(np.asarray(layer.running_mean), np.ndarray)


# -- the tree ---------------------------------------------------------------------------------


class Mlp(nn.Module):
    def __init__(self, width: int, *, key: Array) -> None:
        a, b = random.split(key)
        self.layers = [nn.Linear(width, 2 * width, key=a), nn.Linear(2 * width, width, key=b)]
        self.scale = rnp.ones((width,))
        self.by_name = {"norm": nn.LayerNorm(width)}
        self.activation = "gelu"
        self.register_buffer("steps", np.zeros((), np.int32))

    def __call__(self, x: Array) -> Array:
        hidden = getattr(F, self.activation)(self.layers[0](x))
        return self.by_name["norm"](self.layers[1](hidden)) * self.scale


def test_arrays_are_the_tree_and_the_rest_is_static() -> None:
    model = Mlp(4, key=KEY)
    names = [
        "layers.0.weight", "layers.0.bias", "layers.1.weight", "layers.1.bias", "scale",
        "by_name.norm.weight", "by_name.norm.bias",
    ]  # fmt: skip
    assert sorted(model.named_parameters()) == sorted(names)
    assert list(model.named_buffers()) == ["steps"]
    assert sorted(model.state_dict()) == sorted([*names, "steps"])
    assert model.num_parameters() == 32 + 8 + 32 + 4 + 4 + 8
    leaves, structure = flatten(model)
    assert len(leaves) == 8
    copy = unflatten(structure, leaves)
    assert copy.activation == "gelu" and copy.state_dict().keys() == model.state_dict().keys()
    assert flatten(copy)[1] == structure
    copy.activation = "relu"
    assert flatten(copy)[1] != structure and model.activation == "gelu"


def test_static_attributes_have_traces_of_their_own() -> None:
    model, x = Mlp(4, key=KEY), np.ones((2, 4), np.float32)
    call = rlx.jit(lambda model, x: model(x))
    first = np.asarray(call(model, x))
    np.testing.assert_allclose(first, np.asarray(model(x)), rtol=1e-5, atol=1e-6)
    model.layers[0].weight = model.layers[0].weight * 2  # arrays may change
    second = np.asarray(call(model, x))
    np.testing.assert_allclose(second, np.asarray(model(x)), rtol=1e-5, atol=1e-6)
    assert len(call.variants()) == 1 and not np.allclose(first, second)
    model.activation = "relu"
    np.testing.assert_allclose(
        np.asarray(call(model, x)), np.asarray(model(x)), rtol=1e-5, atol=1e-6
    )
    assert len(call.variants()) == 2
    for rows in (3, 7, 100):
        call(model, np.ones((rows, 4), np.float32))
    assert len(call.variants()) == 2


def test_functional_call_is_pure() -> None:
    model, x = Mlp(4, key=KEY), np.ones((2, 4), np.float32)
    before = np.asarray(model(x))
    params = {n: p * 0.5 for n, p in model.named_parameters().items()}
    call = rlx.jit(lambda params, x: nn.functional_call(model, params, x))
    found = np.asarray(call(params, x))
    assert np.array_equal(np.asarray(model(x)), before)
    model.load_state_dict(params, strict=False)
    np.testing.assert_allclose(found, np.asarray(model(x)), rtol=1e-5, atol=1e-6)
    with pytest.raises(rlx.InputError, match="no such array"):
        nn.functional_call(model, {"other": x}, x)


# -- states -----------------------------------------------------------------------------------


def test_save_and_load(tmp_path: Path) -> None:
    model, path = Mlp(4, key=KEY), tmp_path / "mlp.safetensors"
    model.save(path)
    with SafetensorsFile(path) as file:
        assert set(file.tensors) == set(model.state_dict())
    other = Mlp(4, key=random.key(99)).load(path)
    for name, array in model.state_dict().items():
        assert np.array_equal(np.asarray(array), np.asarray(other.state_dict()[name]))
    assert [p.name for p in tmp_path.iterdir()] == ["mlp.safetensors"]


def test_saved_files_are_read_by_the_library_of_the_format(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.numpy")
    model = nn.Sequential(nn.Linear(3, 4, key=KEY), nn.BatchNorm1d(4))
    model.save(tmp_path / "m.safetensors")
    found = safetensors.load_file(tmp_path / "m.safetensors")
    assert {n: a.shape for n, a in found.items()} == {
        n: tuple(a.shape) for n, a in model.state_dict().items()
    }
    assert np.array_equal(found["0.weight"], np.asarray(model[0].weight))


def test_states_that_do_not_fit() -> None:
    layer = nn.Linear(3, 4, key=KEY)
    state = layer.state_dict()
    with pytest.raises(rlx.InputError, match="missing: bias; unexpected: extra"):
        layer.load_state_dict({"weight": state["weight"], "extra": state["bias"]})
    with pytest.raises(rlx.ShapeError, match="another shape"):
        layer.load_state_dict({**state, "weight": np.ones((3, 4), np.float32)})
    half = nn.Linear(3, 4).to("f16").load_state_dict(state)
    assert str(half.weight.dtype) == "f16"
    assert half.to("f32").weight.dtype is rnp.float32


def test_a_layer_without_a_key_waits_for_weights() -> None:
    layer = nn.Linear(3, 4)
    assert repr(layer.weight) == "Unset([4, 3], f32)"
    with pytest.raises(rlx.InputError, match="a parameter without numbers"):
        layer(np.ones((2, 3), np.float32))
    with pytest.raises(rlx.InputError):
        rlx.jit(lambda layer, x: layer(x))(layer, np.ones((2, 3), np.float32))
    layer.load_state_dict(nn.Linear(3, 4, key=KEY).state_dict())
    assert layer(np.ones((2, 3), np.float32)).shape == (2, 4)


# -- layers by themselves ---------------------------------------------------------------------


def test_modules_print_like_pytorchs() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.ReLU(), nn.ModuleList([nn.Linear(2, 3)])
    )
    assert repr(model) == (
        "Sequential(\n"
        "  (0): Conv2d(3, 8, kernel_size=(3, 3), stride=(1, 1), padding=(1, 1), bias=False)\n"
        "  (1): ReLU()\n"
        "  (2): ModuleList(\n"
        "    (0): Linear(in_features=2, out_features=3, bias=True)\n"
        "  )\n"
        ")"
    )


def test_training_reaches_all_modules() -> None:
    model = nn.Sequential(nn.Dropout(0.5), nn.ModuleDict({"a": nn.Dropout(0.5)})["a"])
    x = np.ones((100, 10), np.float32)
    assert not np.array_equal(np.asarray(model(x, key=KEY)), x)
    with pytest.raises(rlx.InputError, match="draws random numbers"):
        model(x)
    assert np.array_equal(np.asarray(model.eval()(x)), x)
    assert all(not m.training for m in model.modules())
    first = np.asarray(model.train()[0](x, key=KEY))
    both = np.asarray(nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5))(x, key=KEY))
    assert (both == 4).mean() == pytest.approx(0.25, abs=5 * 0.43 / np.sqrt(x.size))
    assert (first == 2).mean() == pytest.approx(0.5, abs=5 * 0.5 / np.sqrt(x.size))


def test_keys_go_to_layers_that_draw() -> None:
    attention = nn.MultiHeadAttention(8, 2, key=KEY)
    x = np.random.default_rng(5).normal(size=(2, 3, 8)).astype(np.float32)
    y = nn.Sequential(attention, nn.Dropout(0.0))(x, key=KEY)  # its `key` is not a random one
    np.testing.assert_allclose(np.asarray(y), np.asarray(attention(x)), rtol=1e-6)


def test_functions_are_layers_of_a_sequence() -> None:
    model = nn.Sequential(nn.Linear(3, 4, key=KEY), F.relu, lambda x: x * 2)
    x = np.ones((2, 3), np.float32)
    expected = np.maximum(np.asarray(model[0](x)), 0) * 2
    np.testing.assert_allclose(
        np.asarray(rlx.jit(lambda m, x: m(x))(model, x)), expected, rtol=1e-6
    )
    with pytest.raises(rlx.InputError, match="not a layer"):
        nn.Sequential(3)  # type: ignore[arg-type]


def test_attention_with_a_cache_sees_what_attention_at_once_sees() -> None:
    layer = nn.MultiHeadAttention(16, 4, num_kv_heads=2, causal=True, rope_base=100.0, key=KEY)
    x = np.random.default_rng(0).normal(size=(3, 7, 16)).astype(np.float32)
    step = rlx.jit(lambda layer, x, cache: layer.step(x, cache))
    cache, parts = layer.make_cache(3, 9), []
    for part in np.split(x, (4, 5, 6), axis=1):
        y, cache = step(layer, part, cache)
        parts.append(np.asarray(y))
    np.testing.assert_allclose(np.concatenate(parts, 1), np.asarray(layer(x)), rtol=1e-5, atol=2e-6)
    assert int(cache.length) == 7
    with pytest.raises(rlx.OptionError, match="causal"):
        nn.MultiHeadAttention(16, 4, key=KEY).step(x, cache)


def test_recurrent_states_go_on() -> None:
    x = np.random.default_rng(1).normal(size=(9, 2, 3)).astype(np.float32)
    for layer in (nn.LSTM(3, 5, 2, key=KEY), nn.GRU(3, 5, 2, key=KEY), nn.RNN(3, 5, key=KEY)):
        whole, last = layer(x)
        first, state = layer(x[:4])
        second, after = layer(x[4:], state)
        both = np.concatenate([np.asarray(first), np.asarray(second)])
        np.testing.assert_allclose(both, np.asarray(whole), rtol=1e-5, atol=1e-6)
        for a, b in zip(_flat(after), _flat(last), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_dropout_between_recurrent_layers_takes_a_key() -> None:
    layer = nn.LSTM(3, 5, 2, dropout=0.5, key=KEY)
    x = np.ones((4, 2, 3), np.float32)
    with pytest.raises(rlx.InputError, match="draws random numbers"):
        layer(x)
    trained, _ = layer(x, key=KEY)
    still, _ = layer.eval()(x)
    assert not np.allclose(np.asarray(trained), np.asarray(still))


def test_quantised_linear_layers() -> None:
    model = nn.Sequential(nn.Linear(64, 32, key=KEY), nn.ReLU(), nn.Linear(32, 4, key=KEY))
    x = np.random.default_rng(2).normal(size=(5, 64)).astype(np.float32)
    exact = np.asarray(model(x))
    nn.quantize_linear_layers(model, "q8_0")
    for y in (model(x), rlx.jit(lambda m, x: m(x))(model, x)):
        # weights and activations have 8 bits: 1/254 of the largest of a block, over two layers
        np.testing.assert_allclose(np.asarray(y), exact, atol=0.02)
    assert len(model.parameters()) == 2  # biases; packed weights are no parameters


def test_wrong_layers_are_typed_errors() -> None:
    for wrong in (
        lambda: nn.Conv2d(3, 4, 3, groups=2),
        lambda: nn.Conv2d(3, 4, (3, 3, 3)),
        lambda: nn.GroupNorm(3, 4),
        lambda: nn.MultiHeadAttention(10, 4),
        lambda: nn.TransformerEncoderLayer(8, 2, activation="cube"),
        lambda: nn.BatchNorm2d(3)(np.ones((2, 3), np.float32)),
        lambda: nn.LSTM(3, 4, key=KEY)(np.ones((2, 3), np.float32)),
        lambda: nn.ModuleDict({})["a"],
        lambda: nn.Linear(3, 4, key=KEY)(np.ones((2, 5), np.float32)),
    ):
        with pytest.raises(rlx.RlxError):
            wrong()


# -- initialisers -----------------------------------------------------------------------------


def test_initialisers_have_the_variances_that_they_promise() -> None:
    shape = (200, 100, 3)  # fan_in 300, fan_out 600
    n = 60_000
    promised = {
        "xavier_uniform": 2 / 900, "xavier_normal": 2 / 900, "kaiming_uniform": 2 / 300,
        "kaiming_normal": 2 / 300, "normal": 1.0, "uniform": 1 / 12,
        "truncated_normal": 0.7737413,  # of the normal distribution within ±2
    }  # fmt: skip
    for name, variance in promised.items():
        x = np.asarray(getattr(nn.init, name)(KEY, shape)).astype(np.float64)
        assert x.shape == shape
        # five standard deviations of the variance of a normal sample, whose tails are the widest
        assert abs(x.var() / variance - 1) < 5 * np.sqrt(2 / n), name
    out = np.asarray(nn.init.kaiming_normal(KEY, shape, mode="fan_out"))
    assert abs(out.var() / (2 / 600) - 1) < 5 * np.sqrt(2 / n)
    assert nn.init.gain("relu") ** 2 == pytest.approx(2)
    assert not np.asarray(nn.init.zeros((2, 3))).any() and np.asarray(nn.init.ones((2,))).all()
    with pytest.raises(rlx.ShapeError):
        nn.init.xavier_normal(KEY, (3,))
    with pytest.raises(rlx.OptionError):
        nn.init.gain("cube")


@pytest.mark.parametrize("shape", [(6, 4), (4, 6), (4, 2, 3)])
def test_orthogonal_matrices(shape: tuple[int, ...]) -> None:
    q = np.asarray(nn.init.orthogonal(KEY, shape, 2.0, "f64")).reshape(shape[0], -1)
    gram = q @ q.T if q.shape[0] <= q.shape[1] else q.T @ q
    np.testing.assert_allclose(gram, 4 * np.eye(len(gram)), atol=1e-14)


def test_layers_start_as_pytorchs_do() -> None:
    linear = nn.Linear(400, 300, key=KEY)
    w = np.asarray(linear.weight)
    assert np.abs(w).max() <= 1 / 20 and np.abs(np.asarray(linear.bias)).max() <= 1 / 20
    assert abs(w.var() * 1200 - 1) < 0.02  # uniform in ±1/20: variance 1/1200; of 120,000
    assert not np.array_equal(w[0, :300], np.asarray(linear.bias))
    conv = np.asarray(nn.Conv2d(16, 8, 5, groups=2, key=KEY).weight)
    assert np.abs(conv).max() <= 1 / np.sqrt(200) and np.abs(conv).max() > 0.95 / np.sqrt(200)
    table = np.asarray(nn.Embedding(1000, 50, padding_idx=3, key=KEY).weight)
    assert abs(table.std() - 1) < 0.02 and not table[3].any()
    again = np.asarray(nn.Linear(400, 300, key=KEY).weight)
    assert np.array_equal(w, again)
