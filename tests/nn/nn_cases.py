"""Functions and layers that are compared with PyTorch's.

An expression means the same in both libraries: `F` and `nn` are PyTorch's modules where goldens are
made, and RLX's in the tests. Where they spell it differently, `torch` is PyTorch's way.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = Any


@dataclass(frozen=True)
class Case:
    name: str
    expression: str  # of the inputs a, b, …
    inputs: Mapping[str, Any]  # a shape, or values
    torch: str = ""

    def arrays(self) -> dict[str, Array]:
        rng = np.random.default_rng(zlib.crc32(self.name.encode()))
        made = {}
        for name, given in self.inputs.items():
            if isinstance(given, tuple):
                made[name] = rng.standard_normal(given).astype(np.float32)
            else:
                made[name] = np.asarray(given)
        return made


def _case(name: str, expression: str, torch: str = "", **inputs: Any) -> Case:
    return Case(name, expression, inputs, torch)


_X = (3, 4, 5)
_MASK = np.tril(np.ones((5, 7), bool), k=1)
_IDS = np.array([[1, 0, 3], [2, 2, 4]])
_TARGETS = np.array([0, 4, -100, 2, 2, 1])
_CHANCES = np.array([[0.1, 0.9, 0.3], [0.5, 0.0, 1.0]], np.float32)

ACTIVATIONS = [
    _case(name, f"F.{name}(a{options})", a=_X)
    for name, options in {
        "relu": "", "relu6": "", "sigmoid": "", "tanh": "", "silu": "", "gelu": "", "elu": ", 0.7",
        "leaky_relu": ", 0.2", "selu": "", "celu": ", 1.3", "softplus": ", 2.0, 1.5", "mish": "",
        "hardtanh": ", -0.5, 0.8", "hardsigmoid": "", "hardswish": "", "logsigmoid": "",
        "softsign": "", "tanhshrink": "", "softshrink": ", 0.4", "hardshrink": ", 0.4",
        "threshold": ", 0.1, -3.0", "glu": "[..., :4], -1", "softmax": ", 1",
        "log_softmax": ", 1", "softmin": ", 1",
    }.items()
]  # fmt: skip
FUNCTIONS = [
    *ACTIVATIONS,
    _case("gelu tanh", "F.gelu(a, approximate='tanh')", a=_X),
    _case("prelu", "F.prelu(a, b)", a=_X, b=(4,)),
    _case("logsumexp", "F.logsumexp(a, 1)", "torch.logsumexp(a, 1)", a=_X),
    _case("linear", "F.linear(a, b, c)", a=_X, b=(6, 5), c=(6,)),
    _case("bilinear", "F.bilinear(a, b, c, d)", a=(2, 3, 4), b=(2, 3, 5), c=(6, 4, 5), d=(6,)),
    _case("embedding", "F.embedding(a, b)", a=_IDS, b=(6, 4)),
    _case("one hot", "F.one_hot(a, 6)", a=_IDS),
    _case("layer norm", "F.layer_norm(a, b, c)", "F.layer_norm(a, (4, 5), b, c)",
          a=_X, b=(4, 5), c=(4, 5)),
    _case("plain layer norm", "F.layer_norm(a)", "F.layer_norm(a, (5,))", a=_X),
    _case("rms norm", "F.rms_norm(a, b, eps=1e-5)", "F.rms_norm(a, (5,), b, 1e-5)", a=_X, b=(5,)),
    _case("group norm", "F.group_norm(a, 2, b, c)", a=_X, b=(4,), c=(4,)),
    _case("instance norm", "F.instance_norm(a)", a=(2, 3, 4, 5)),
    _case("batch norm", "F.batch_norm(a, b, c * c, d, e)", a=(2, 3, 4, 5), b=(3,), c=(3,), d=(3,),
          e=(3,)),
    _case("normalize", "F.normalize(a, 2.0, 1)", a=_X),
    _case("normalize 1", "F.normalize(a, 1.0, 1)", a=_X),
    _case("normalize 3", "F.normalize(a, 3.0, 1)", a=_X),
    _case("local response", "F.local_response_norm(a, 3, 0.1)", a=(2, 5, 3, 3)),
    _case("cosine", "F.cosine_similarity(a, b, 1)", a=_X, b=_X),
    # images
    _case("conv1d", "F.conv1d(a, b, c, stride=2, padding=1)", a=(2, 4, 9), b=(6, 4, 3), c=(6,)),
    _case("conv2d", "F.conv2d(a, b, c, padding='same', dilation=2)", a=(2, 4, 9, 8), b=(6, 4, 3, 3),
          c=(6,)),
    _case("grouped conv2d", "F.conv2d(a, b, groups=2, stride=(2, 1))", a=(1, 4, 7, 6),
          b=(6, 2, 3, 2)),
    _case("depthwise conv2d", "F.conv2d(a, b, c, padding=1, groups=4)", a=(2, 4, 5, 6),
          b=(4, 1, 3, 3), c=(4,)),
    _case("conv3d", "F.conv3d(a, b, c, stride=(2, 1, 1), padding=(1, 0, 1), dilation=(1, 2, 1))",
          a=(2, 2, 5, 6, 4), b=(3, 2, 3, 2, 3), c=(3,)),
    _case("grouped conv3d", "F.conv3d(a, b, groups=2)", a=(1, 4, 4, 4, 4), b=(6, 2, 2, 2, 2)),
    _case("conv_transpose1d", "F.conv_transpose1d(a, b, c, stride=2, padding=1, output_padding=1)",
          a=(2, 4, 5), b=(4, 3, 3), c=(3,)),
    _case("conv_transpose2d", "F.conv_transpose2d(a, b, c, stride=2, groups=2)", a=(2, 4, 4, 3),
          b=(4, 3, 3, 2), c=(6,)),
    _case("conv_transpose3d",
          "F.conv_transpose3d(a, b, c, stride=(2, 1, 2), padding=(1, 0, 1), "
          "output_padding=(1, 0, 0))",
          a=(2, 3, 3, 4, 3), b=(3, 2, 3, 2, 3), c=(2,)),
    _case("max_pool1d", "F.max_pool1d(a, 3, 2, 1)", a=(2, 3, 9)),
    _case("max_pool2d", "F.max_pool2d(a, (3, 2))", a=(2, 3, 9, 8)),
    _case("max_pool3d", "F.max_pool3d(a, 2, (1, 2, 2), (1, 0, 0))", a=(1, 2, 4, 6, 5)),
    _case("avg_pool1d", "F.avg_pool1d(a, 3, 2, 1)", a=(2, 3, 9)),
    _case("avg_pool2d", "F.avg_pool2d(a, 3, 2, 1, count_include_pad=False)", a=(2, 3, 9, 8)),
    _case("avg_pool3d", "F.avg_pool3d(a, 2, 2, 1, count_include_pad=False)", a=(1, 2, 4, 6, 5)),
    _case("adaptive_avg_pool1d", "F.adaptive_avg_pool1d(a, 4)", a=(2, 3, 10)),
    _case("adaptive_avg_pool2d", "F.adaptive_avg_pool2d(a, (3, 4))", a=(2, 3, 7, 9)),
    _case("adaptive_avg_pool3d", "F.adaptive_avg_pool3d(a, (2, 3, None))", a=(1, 2, 5, 4, 3)),
    _case("adaptive_max_pool1d", "F.adaptive_max_pool1d(a, 4)", a=(2, 3, 10)),
    _case("adaptive_max_pool2d", "F.adaptive_max_pool2d(a, 3)", a=(2, 3, 7, 9)),
    _case("nearest", "F.interpolate(a, (7, 4))", a=(2, 3, 5, 6)),
    _case("bilinear resize", "F.interpolate(a, scale_factor=2, mode='bilinear')", a=(2, 3, 5, 6)),
    _case("aligned resize", "F.interpolate(a, 9, mode='linear', align_corners=True)", a=(2, 3, 5)),
    _case("pad", "F.pad(a, (1, 2, 0, 3), value=1.5)", a=_X),
    _case("reflect", "F.pad(a, (2, 1), 'reflect')", a=_X),
    _case("replicate", "F.pad(a, (2, 1), 'replicate')", a=_X),
    _case("pixel_shuffle", "F.pixel_shuffle(a, 2)", a=(2, 8, 3, 4)),
    _case("pixel_unshuffle", "F.pixel_unshuffle(a, 2)", a=(2, 2, 6, 4)),
    # attention
    _case("attention", "F.scaled_dot_product_attention(a, b, c)", a=(2, 4, 5, 8), b=(2, 4, 7, 8),
          c=(2, 4, 7, 8)),
    _case("causal", "F.scaled_dot_product_attention(a, b, c, is_causal=True)", a=(2, 4, 6, 8),
          b=(2, 4, 6, 8), c=(2, 4, 6, 8)),
    _case("grouped heads", "F.scaled_dot_product_attention(a, b, c, scale=0.3)",
          "F.scaled_dot_product_attention(a, b, c, scale=0.3, enable_gqa=True)",
          a=(2, 6, 5, 8), b=(2, 2, 7, 8), c=(2, 2, 7, 8)),
    _case("masked", "F.scaled_dot_product_attention(a, b, c, d)", a=(2, 4, 5, 8), b=(2, 4, 7, 8),
          c=(2, 4, 7, 8), d=_MASK),
    _case("biased", "F.scaled_dot_product_attention(a, b, c, d)", a=(2, 4, 5, 8), b=(2, 4, 7, 8),
          c=(2, 4, 7, 8), d=(2, 1, 5, 7)),
    _case("more axes", "F.scaled_dot_product_attention(a, b, c, is_causal=True)", a=(2, 3, 2, 5, 4),
          b=(2, 3, 2, 5, 4), c=(2, 3, 2, 5, 4)),
    _case("no batch", "F.scaled_dot_product_attention(a, b, c)", a=(2, 5, 4), b=(2, 5, 4),
          c=(2, 5, 4)),
    # losses
    *[_case(f"{name} {r}", f"F.{name}(a, b, reduction='{r}')", a=_X, b=_X)
      for name in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")
      for r in ("mean", "sum", "none")],
    _case("huber 2", "F.huber_loss(a, b, delta=0.3)", a=_X, b=_X),
    _case("smooth l1 2", "F.smooth_l1_loss(a, b, beta=0.3)", a=_X, b=_X),
    _case("cross entropy", "F.cross_entropy(a, b)", a=(6, 5), b=_TARGETS),
    _case("smoothed", "F.cross_entropy(a, b, weight=c * c, label_smoothing=0.2)", a=(6, 5),
          b=_TARGETS, c=(5,)),
    _case("weighted none", "F.cross_entropy(a, b, weight=c * c, reduction='none')", a=(6, 5),
          b=_TARGETS, c=(5,)),
    _case("other ignored", "F.cross_entropy(a, b, ignore_index=2, reduction='sum')", a=(6, 5),
          b=np.abs(_TARGETS) % 5),
    _case("by pixel", "F.cross_entropy(a, b, axis=1)", "F.cross_entropy(a, b)", a=(2, 5, 3, 2),
          b=np.arange(12).reshape(2, 3, 2) % 5),
    _case("soft targets", "F.cross_entropy(a, F.softmax(b, -1), label_smoothing=0.1)", a=(6, 5),
          b=(6, 5)),
    _case("nll", "F.nll_loss(F.log_softmax(a, -1), b)", a=(6, 5), b=_TARGETS),
    _case("bce", "F.binary_cross_entropy(F.sigmoid(a), b)", a=(2, 3), b=_CHANCES),
    _case("bce logits", "F.binary_cross_entropy_with_logits(a, b, c, pos_weight=d)", a=(2, 3),
          b=_CHANCES, c=(2, 3), d=(3,)),
    _case("kl", "F.kl_div(a, b, reduction='batchmean')", a=(2, 3), b=_CHANCES),
    _case("kl log", "F.kl_div(a, b, log_target=True)", a=(2, 3), b=(2, 3)),
    _case("hinge", "F.hinge_embedding_loss(a, b)", a=(2, 3),
          b=np.array([[1, -1, 1], [-1, -1, 1]], np.float32)),
    _case("triplet", "F.triplet_margin_loss(a, b, c)", a=(4, 6), b=(4, 6), c=(4, 6)),
    _case("gaussian", "F.gaussian_nll_loss(a, b, c * c)", a=(4, 6), b=(4, 6), c=(4, 6)),
]  # fmt: skip

LAYERS = [
    _case("Linear", "nn.Linear(5, 7)", a=_X),
    _case("Linear no bias", "nn.Linear(5, 7, bias=False)", a=_X),
    _case("Bilinear", "nn.Bilinear(4, 5, 6)", a=(3, 4), b=(3, 5)),
    _case("Embedding", "nn.Embedding(6, 4, padding_idx=2)", a=_IDS),
    _case("Conv1d", "nn.Conv1d(4, 6, 3, stride=2, padding=1)", a=(2, 4, 9)),
    _case("Conv2d", "nn.Conv2d(4, 6, (3, 2), dilation=2, groups=2)", a=(2, 4, 9, 8)),
    _case("Conv3d", "nn.Conv3d(2, 3, 2, padding=1, bias=False)", a=(1, 2, 4, 5, 3)),
    _case("ConvTranspose1d", "nn.ConvTranspose1d(4, 6, 3, stride=2, output_padding=1)",
          a=(2, 4, 9)),
    _case("ConvTranspose2d", "nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, groups=2)",
          a=(2, 4, 5, 6)),
    _case("ConvTranspose3d", "nn.ConvTranspose3d(2, 3, 2, stride=2)", a=(1, 2, 3, 2, 3)),
    _case("pools", "nn.Sequential(nn.MaxPool2d(2), nn.AvgPool2d(2, 1), nn.AdaptiveAvgPool2d(2))",
          a=(2, 3, 9, 8)),
    _case("BatchNorm1d", "nn.BatchNorm1d(4)", a=_X),
    _case("BatchNorm2d", "nn.BatchNorm2d(3, momentum=0.3)", a=(2, 3, 4, 5)),
    _case("BatchNorm3d", "nn.BatchNorm3d(3, momentum=None, affine=False)", a=(2, 3, 4, 2, 3)),
    _case("untracked", "nn.BatchNorm1d(4, track_running_stats=False)", a=_X),
    _case("LayerNorm", "nn.LayerNorm((4, 5))", a=_X),
    _case("RMSNorm", "nn.RMSNorm(5, eps=1e-5)", a=_X),
    _case("GroupNorm", "nn.GroupNorm(2, 4)", a=_X),
    _case("InstanceNorm2d", "nn.InstanceNorm2d(3, affine=True)", a=(2, 3, 4, 5)),
    _case("RNN", "nn.RNN(5, 6, 2, nonlinearity='relu')", a=(7, 3, 5)),
    _case("RNN both ways", "nn.RNN(5, 6, bidirectional=True, batch_first=True)", a=(3, 7, 5)),
    _case("LSTM", "nn.LSTM(5, 6, 2, batch_first=True)", a=(3, 7, 5)),
    _case("LSTM both ways", "nn.LSTM(5, 6, 2, bidirectional=True)", a=(7, 3, 5)),
    _case("LSTM no bias", "nn.LSTM(5, 6, bias=False)", a=(7, 3, 5)),
    _case("GRU", "nn.GRU(5, 6, 2, bidirectional=True, batch_first=True)", a=(3, 7, 5)),
    _case("attention", "nn.MultiHeadAttention(8, 2)",
          "Attention(nn.MultiheadAttention(8, 2, batch_first=True))", a=(3, 5, 8)),
    _case("encoder", "nn.TransformerEncoderLayer(8, 2, 16)",
          "nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)", a=(3, 5, 8)),
    _case("encoder, norm first",
          "nn.TransformerEncoderLayer(8, 2, 16, activation='gelu', norm_first=True)",
          "nn.TransformerEncoderLayer(8, 2, 16, activation='gelu', norm_first=True, "
          "batch_first=True)",
          a=(3, 5, 8)),
    _case("decoder", "nn.TransformerDecoderLayer(8, 2, 16)",
          "Decoder(nn.TransformerDecoderLayer(8, 2, 16, batch_first=True))", a=(3, 5, 8),
          b=(3, 7, 8)),
    _case("perceptron", "nn.Sequential(nn.Flatten(), nn.Linear(20, 8), nn.GELU(), nn.Linear(8, 3), "
          "nn.PReLU())", a=_X),
    _case("convolutional", "nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), "
          "nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64, 3), nn.LogSoftmax(-1))",
          a=(2, 1, 8, 8)),
    _case("lists", "nn.ModuleList([nn.Linear(5, 5), nn.Linear(5, 2)])[1]", a=_X),
]  # fmt: skip
