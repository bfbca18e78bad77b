"""PyTorch modules through `torch.compile(backend="rlx")` and `rlx.from_torch`.

These need torch, which no other part does: they run with

    pip install -e '.[test,torch]' && pytest tests/importers/test_pytorch.py

and are skipped where it is not installed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is an extra: pip install -e '.[torch]'")

import rlx  # noqa: E402
from rlx.pytorch.dynamo_backend import backend  # noqa: E402

nn, F = torch.nn, torch.nn.functional
TOLERANCE = 1e-4  # of the largest result: sums in another order, through some layers


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)


def close(found: Any, expected: Any, within: float = TOLERANCE) -> None:
    a, b = (x.detach().to(torch.float64) for x in (found, expected))
    assert a.shape == b.shape and found.dtype == expected.dtype
    largest = float(b.abs().max()) if b.numel() else 1.0
    assert float((a - b).abs().max() if b.numel() else 0.0) <= within * max(largest, 1e-3)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(16, 64), nn.Linear(64, 16), nn.LayerNorm(16)

    def forward(self, x: Any) -> Any:
        return self.norm(x + self.down(F.gelu(self.up(x))))


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(3, 2, 1),
            nn.Conv2d(16, 16, 3, padding=1, groups=16), nn.Hardswish(), nn.AdaptiveAvgPool2d(1),
            nn.Flatten(), nn.Linear(16, 5),
        )  # fmt: skip

    def forward(self, x: Any) -> Any:
        return self.layers(x)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: Any) -> Any:
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, 4, 8).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, 32))


class Cached(nn.Module):
    """Attention of one token over a KV cache that the module holds."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))
        self.register_buffer("keys", torch.zeros(1, 12, 8))
        self.register_buffer("values", torch.zeros(1, 12, 8))

    def forward(self, x: Any, position: Any) -> Any:
        self.keys.index_copy_(1, position, self.k(x))
        self.values.index_copy_(1, position, self.v(x))
        seen = torch.arange(12) <= position[:, None]
        return F.scaled_dot_product_attention(self.q(x), self.keys, self.values, attn_mask=seen)


NETWORKS: dict[str, tuple[Callable[[], Any], Callable[[int], Any]]] = {
    "mlp": (Mlp, lambda n: torch.randn(n, 7, 16)),
    "conv": (ConvNet, lambda n: torch.randn(n, 3, 33, 33)),
    "attention": (Attention, lambda n: torch.randn(2, n + 3, 32)),
    "lstm": (lambda: First(nn.LSTM(8, 12, batch_first=True)), lambda n: torch.randn(n, 5, 8)),
    "encoder": (
        lambda: nn.TransformerEncoderLayer(16, 2, 32, batch_first=True),
        lambda n: torch.randn(n, 6, 16),
    ),
}


class First(nn.Module):
    """The first result of a module."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Any) -> Any:
        return self.inner(x)[0]


# -- torch.compile --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NETWORKS)
def test_results_are_those_of_eager(name: str) -> None:
    make, draw = NETWORKS[name]
    module = make().eval()
    compiled = torch.compile(module, backend="rlx", dynamic=True)
    with torch.no_grad():
        for n in (2, 3, 5):
            x = draw(n)
            close(compiled(x), module(x))


@pytest.mark.parametrize("name", ["mlp", "conv", "attention"])
def test_gradients_are_those_of_eager(name: str) -> None:
    make, draw = NETWORKS[name]
    module = make().train()
    if name == "conv":  # statistics of a batch are updated: both start from the same
        module.eval()
    other = copy.deepcopy(module)
    compiled = torch.compile(module, backend="rlx")
    x = draw(4)
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    w = torch.randn_like(other(b).detach())  # squares of what is normalised have no slope
    (compiled(a) * w).sum().backward()
    (other(b) * w).sum().backward()
    close(a.grad, b.grad)
    for p, q in zip(module.parameters(), other.parameters(), strict=True):
        close(p.grad, q.grad, 5e-4)


def test_training_goes_down_as_in_eager() -> None:
    """Ten steps of Adam from the same weights: parameters are written between calls."""
    module = Mlp()
    other = copy.deepcopy(module)
    compiled = torch.compile(module, backend="rlx")
    x, y = torch.randn(32, 16), torch.randn(32, 16)
    losses = []
    for net, run in ((module, compiled), (other, other)):
        optimizer = torch.optim.Adam(net.parameters(), 1e-2)
        kept = []
        for _ in range(10):
            optimizer.zero_grad()
            loss = F.mse_loss(run(x), y)
            loss.backward()
            optimizer.step()
            kept.append(float(loss.detach()))
        losses.append(kept)
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-4)
    assert losses[0][-1] < losses[0][0]


FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "eye": lambda x: x[0, :5, :5] + torch.eye(5),
    "tril": lambda x: torch.tril(x, 1) + torch.triu(x, -2),
    "causal": lambda x: F.scaled_dot_product_attention(
        x[None, :, 2:], x[None], x[None], is_causal=True
    ),
    "unfold": lambda x: x.unfold(-1, 3, 2),
    "diagonal": lambda x: torch.diagonal(x, 1, -2, -1),
    "cumsum": lambda x: x.cumsum(1).flip(2).roll(2, 1),
    "topk": lambda x: x.topk(3, 1).values + x.sort(1, descending=True).values[:, :3],
    "argmax": lambda x: x.argmax(-1) + x.argmin(1, keepdim=True)[:, 0, :1],
    "gather": lambda x: x.gather(2, x.argsort(2)) + x[:, torch.tensor([1, 0, 2, 3, 4, 5])],
    "scatter": lambda x: torch.zeros_like(x).scatter_add(1, x.argsort(1), x),
    "reduce": lambda x: torch.zeros_like(x).scatter_reduce(1, x.argsort(1), x, "amax"),
    "put": lambda x: x.index_put((torch.tensor([0, 1]), torch.tensor([2, 3])), x[:2, 0]),
    "masked": lambda x: x.masked_fill(x > 0.5, -1.0).clamp(-1, 1).where(x < 0, x * 2),
    "norms": lambda x: F.layer_norm(x, (7,)) + F.normalize(x, dim=-1) + x.norm(dim=1, keepdim=True),
    "moments": lambda x: x.var(1, keepdim=True) + x.std(2, keepdim=True) + torch.logsumexp(x, 0),
    "softmax": lambda x: x.softmax(1) * x.log_softmax(2),
    "activations": lambda x: (
        F.silu(x)
        + F.gelu(x, approximate="tanh")
        + F.hardtanh(x)
        + F.elu(x)
        + F.softplus(x)
        + F.leaky_relu(x)
        + F.mish(x)
        + F.hardsigmoid(x)
        + F.relu6(x)
    ),
    "integers": lambda x: ((x * 9).int() // 4) % 3 + (x * 9).int().bitwise_and(5),
    "rounding": lambda x: x.floor() + x.ceil() + (x * 3).round() + x.trunc() + x.sign() + x.frac(),
    "trigonometry": lambda x: x.sin() * x.cos() + x.tanh() + x.atan2(x + 1) + x.sigmoid().asin(),
    "pad": lambda x: F.pad(x, (1, 2, 0, 1)) + F.pad(x, (1, 2, 1, 0), mode="replicate"),
    "interpolate": lambda x: F.interpolate(x[None], scale_factor=2.0, mode="bilinear"),
    "nearest": lambda x: F.interpolate(x[None], size=(11, 13), mode="nearest"),
    "pools": lambda x: F.max_pool2d(x[None], 3, 2, 1) + F.avg_pool2d(x[None], 3, 2, 1),
    "ceil": lambda x: F.max_pool2d(x[None], 2, 2, ceil_mode=True),
    "adaptive": lambda x: F.adaptive_avg_pool2d(x[None], (3, 7)),
    "einsum": lambda x: torch.einsum("bij,bkj->bik", x, x) + torch.bmm(x, x.transpose(1, 2)),
    "stack": lambda x: torch.stack([x, x * 2], 1).flatten(1, 2).chunk(2, 1)[1],
    "repeat": lambda x: x.repeat(1, 2, 1) + x.repeat_interleave(2, 1),
    "embedding": lambda x: F.embedding(torch.tensor([[0, 2], [5, 1]]), x[0]),
    "cross entropy": lambda x: F.cross_entropy(x[0], torch.tensor([0, 1, 2, 3, 4, 0])),
    "where": lambda x: torch.where(x.isnan() | (x > 0), x, torch.full_like(x, 0.25)),
    "linspace": lambda x: x + torch.linspace(0, 1, 7) + torch.arange(0, 14, 2),
    "strided": lambda x: x.transpose(1, 2)[:, ::2].contiguous().view(-1, 6)[1:],
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_ops(name: str) -> None:
    function, x = FUNCTIONS[name], torch.randn(3, 6, 7)
    close(torch.compile(function, backend="rlx")(x), function(x))


def test_a_weight_that_is_written_is_packed_anew() -> None:
    module = nn.Linear(8, 4).eval()
    compiled = torch.compile(module, backend="rlx")
    x = torch.randn(3, 8)
    with torch.no_grad():
        close(compiled(x), module(x))
        module.weight.mul_(2.0)
        close(compiled(x), module(x))


def test_graph_breaks_are_tolerated() -> None:
    def function(x: Any) -> Any:
        y = torch.sin(x) * 2
        if float(y.sum()) > 0:  # a number of Python's: Dynamo makes two graphs
            return torch.cos(y)
        return torch.exp(y)

    compiled = torch.compile(function, backend="rlx")
    for x in (torch.ones(5), -torch.ones(5)):
        close(compiled(x), function(x))


def test_ops_that_are_missing_stay_in_pytorch() -> None:
    def function(x: Any) -> Any:
        values = torch.linalg.lu_factor(x + 3 * torch.eye(4)).LU
        return torch.tanh(values * 0.1) + 1

    compiled = torch.compile(function, backend="rlx")
    x = torch.randn(4, 4)
    close(compiled(x), function(x))


def test_the_entry_point() -> None:
    assert "rlx" in torch._dynamo.list_backends(exclude_tags=())
    compiled = torch.compile(lambda x: x * 2 + 1, backend=backend)
    assert torch.equal(compiled(torch.ones(3)), torch.full((3,), 3.0))


def test_element_types() -> None:
    for dtype in (torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64):
        x = torch.arange(6).reshape(2, 3).to(dtype)
        compiled = torch.compile(lambda x: (x + 2).sum(0) * x, backend="rlx")
        close(compiled(x), (x + 2).sum(0) * x, 1e-2 if dtype.itemsize == 2 else 0.0)
        torch._dynamo.reset()


def test_a_batch_norm_in_training_updates_its_statistics() -> None:
    module = nn.BatchNorm1d(6).train()
    other = copy.deepcopy(module)
    compiled = torch.compile(module, backend="rlx")
    x = torch.randn(10, 6) * 2 + 1
    close(compiled(x), other(x))
    close(module.running_mean, other.running_mean)
    close(module.running_var, other.running_var)


# -- rlx.from_torch -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NETWORKS)
def test_exported_modules(name: str) -> None:
    make, draw = NETWORKS[name]
    module = make().eval()
    model = rlx.from_torch(module, draw(4))
    with torch.no_grad():
        for n in (2, 4, 7):
            x = draw(n)
            close(model(x), module(x))


def test_weights_are_not_copied() -> None:
    module = nn.Linear(64, 64).eval()
    model = rlx.from_torch(module, torch.randn(2, 64))
    address = model.params.get("weight").__array_interface__["data"][0]
    assert address == module.weight.data_ptr()


def test_a_cache_is_a_state() -> None:
    module = Cached().eval()
    model = rlx.from_torch(copy.deepcopy(module), torch.randn(1, 1, 8), torch.tensor([0]))
    assert set(model.compiled.template.signature.states) == {"keys", "values"}
    with torch.no_grad():
        for i in range(5):
            x = torch.randn(1, 1, 8)
            close(model(x, torch.tensor([i])), module(x, torch.tensor([i])))
    close(model.state("keys"), module.keys)


def test_a_size_that_the_exporter_leaves_open_and_that_is_a_number() -> None:
    """Rows put into a cache are as long as its own, which PyTorch's exporter does not say."""

    class Put(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("keys", torch.zeros(1, 8, 4))

        def forward(self, x: Any, position: Any) -> Any:
            self.keys[:, position] = x
            return self.keys.sum(1)

    model, total = rlx.from_torch(Put(), torch.ones(1, 1, 4), torch.tensor([0])), 0.0
    for i in range(3):
        x = torch.randn(1, 1, 4)
        total = total + x[0]
        close(model(x, torch.tensor([i])), total)
    assert "[1, 1, 4] f32" in model.inspect()
    with pytest.raises(rlx.RlxError):
        model(torch.ones(1, 1, 5), torch.tensor([0]))


def test_trees_of_arguments_and_results() -> None:
    class Tree(nn.Module):
        def forward(self, batch: dict[str, Any], *, scale: Any) -> dict[str, Any]:
            return {"sum": batch["a"] + batch["b"] * scale, "same": batch["a"]}

    batch = {"a": torch.randn(3, 4), "b": torch.randn(3, 4)}
    model = rlx.from_torch(Tree(), batch, named={"scale": torch.tensor(2.0)}, dynamic=False)
    found = model(batch, scale=torch.tensor(3.0))
    close(found["sum"], batch["a"] + batch["b"] * 3)
    assert torch.equal(found["same"], batch["a"])


def test_arrays_are_taken_too() -> None:
    module = Mlp().eval()
    x = torch.randn(2, 3, 16)
    model = rlx.from_torch(module, x)
    close(model(x.numpy()), module(x))
    assert "gelu" in model.inspect() and model.profile(x).elapsed > 0


def test_what_goes_wrong() -> None:
    with pytest.raises(rlx.InputError, match="not a module"):
        rlx.from_torch(lambda x: x, torch.ones(2))

    class Data(nn.Module):
        def forward(self, x: Any) -> Any:
            return x if x.sum() > 0 else -x

    with pytest.raises(rlx.UnsupportedError, match=r"torch\.export does not take this module"):
        rlx.from_torch(Data(), torch.ones(2))
    model = rlx.from_torch(nn.Linear(4, 2), torch.randn(3, 4))
    with pytest.raises(rlx.InputError, match="wrong element type"):
        model(torch.randn(3, 4, dtype=torch.float64))
    with pytest.raises(rlx.InputError, match="not the arguments"):
        model(torch.randn(3, 4), torch.randn(3, 4))
