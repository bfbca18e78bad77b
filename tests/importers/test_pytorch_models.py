"""Networks of torchvision and transformers with random weights: results, and gradients of two.

    pip install -e '.[test,torch]' torchvision transformers
    pytest tests/importers/test_pytorch_models.py -m nightly

They are skipped where torchvision or transformers is not installed.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is an extra: pip install -e '.[torch]'")
pytestmark = pytest.mark.nightly

VISION = ("resnet50", "mobilenet_v3_small", "vit_b_16", "convnext_tiny", "swin_t")
TEXT = ("bert", "gpt2", "llama", "t5", "distilbert")


if torch.__version__.endswith("+cpu"):
    # a torchvision that is built for GPUs does not load its operators beside this torch, and its
    # import, which transformers does too, asks for some
    for op in ("nms", "qnms"):
        torch.library.define(
            f"torchvision::{op}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        )


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)


def vision(name: str) -> Any:
    models = pytest.importorskip("torchvision").models
    model = getattr(models, name)(weights=None)
    for parameter in model.parameters():  # some heads begin as zeros
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.02)
    return model


def text(name: str) -> Any:
    t = pytest.importorskip("transformers")
    small = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    made = {
        "bert": lambda: t.BertModel(t.BertConfig(**small, intermediate_size=128)),
        "distilbert": lambda: t.DistilBertModel(
            t.DistilBertConfig(dim=64, n_layers=2, n_heads=4, hidden_dim=128)
        ),
        "gpt2": lambda: t.GPT2Model(t.GPT2Config(n_embd=64, n_layer=2, n_head=4)),
        "llama": lambda: t.LlamaModel(
            t.LlamaConfig(**small, intermediate_size=128, num_key_value_heads=2)
        ),
        "t5": lambda: t.T5EncoderModel(t.T5Config(d_model=64, d_kv=16, d_ff=128, num_layers=2)),
    }  # fmt: skip
    model = made[name]()
    model.config.use_cache = False
    return model


def close(found: Any, expected: Any) -> None:
    largest = float(expected.abs().max())
    assert math.isfinite(largest) and largest > 0
    assert float((found - expected).abs().max()) <= 1e-4 * largest


@pytest.mark.parametrize("name", VISION)
def test_vision(name: str) -> None:
    model = vision(name).eval()
    compiled = torch.compile(model, backend="rlx")
    x = torch.randn(2, 3, 224, 224)
    with torch.no_grad():
        close(compiled(x), model(x))


@pytest.mark.parametrize("name", TEXT)
def test_text(name: str) -> None:
    model = text(name).eval()
    compiled = torch.compile(model, backend="rlx", dynamic=True)
    with torch.no_grad():
        for length in (12, 19):
            ids = torch.randint(0, 1000, (2, length))
            close(compiled(ids)[0], model(ids)[0])


@pytest.mark.parametrize("name", ["resnet50", "bert"])
def test_gradients(name: str) -> None:
    """As near to the gradients in f64 as eager PyTorch's are: where a sum is next to 0, rounding
    decides on which side of a ReLU it is, and a slope comes or goes."""
    model = (vision(name) if name in VISION else text(name)).eval()
    other = copy.deepcopy(model)
    given = torch.randn(2, 3, 96, 96) if name in VISION else torch.randint(0, 1000, (2, 12))
    pick = (lambda y: y) if name in VISION else (lambda y: y[0])
    w = torch.randn_like(pick(other(given)).detach())
    (pick(torch.compile(model, backend="rlx")(given)) * w).sum().backward()
    (pick(other(given)) * w).sum().backward()
    exact = copy.deepcopy(other).double()
    exact.zero_grad()
    wide = given.double() if given.is_floating_point() else given
    (pick(exact(wide)) * w.double()).sum().backward()
    ours, theirs, largest = (_errors(m, exact) for m in (model, other, None))
    assert ours <= 2 * theirs + 1e-5 * largest


def _errors(model: Any, exact: Any) -> float:
    """The largest error of a gradient; the largest gradient where no model is given."""
    pairs = zip((model or exact).parameters(), exact.parameters(), strict=True)
    found = [
        float((q.grad if model is None else p.grad.double() - q.grad).abs().max())
        for p, q in pairs if q.grad is not None
    ]  # fmt: skip
    return max(found)
