"""QDQ form to operators on integers: `DequantizeLinear` → `Conv` → `QuantizeLinear` becomes one
`QLinearConv`, `MatMul` likewise. What only moves elements, or takes the largest, is done before
they are dequantised. An addition of the result of a convolution, and its activation, become a part
of that convolution.

Quantisation tools write networks in this form: float operators between dequantised operands and a
quantised result. Scales and zero points must be constants of the file, one for a tensor or one for
each filter. A node whose result something else reads, too, stays as it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from rlx.formats.onnx import Initializer, OnnxNode, bodies_of
from rlx.onnx.ops.integer_products import OWN
from rlx.onnx.values import Data

_BYTES = ("uint8", "int8")
_MOVING = frozenset(("Flatten", "MaxPool", "Reshape", "Squeeze", "Transpose", "Unsqueeze"))
_REPLACED = frozenset(("Add", "Clip", "Conv", "DequantizeLinear", "MatMul", "QLinearConv", "Relu"))
_SCALES = 2.0**-30, 2.0**30  # products with bytes are neither denormal nor infinite
_SMALL = 1 << 16  # channels, at most, that scales are read for


class Linear(NamedTuple):
    """A tensor of integers with its scale and zero point, all by name."""

    values: str
    scale: str
    zero: str
    axis: int

    @property
    def names(self) -> tuple[str, str, str]:
        return self.values, self.scale, self.zero


def fuse_quantized(
    nodes: Sequence[OnnxNode], outputs: Sequence[str], constants: Mapping[str, Initializer]
) -> tuple[OnnxNode, ...]:
    """The nodes with those of the QDQ form replaced, and without the ones that nothing reads."""
    if not any(n.op_type == "DequantizeLinear" for n in nodes):
        return tuple(nodes)
    moved = _moved(nodes, outputs, constants)
    fusion = _Fusion(moved, outputs, constants)
    made = _read([fusion.fused(node) for node in moved], outputs)
    sums = _Fusion(made, outputs, constants)
    return _read([sums.added(node) for node in made], outputs)


def _moved(
    nodes: Sequence[OnnxNode], outputs: Sequence[str], constants: Mapping[str, Initializer]
) -> list[OnnxNode]:
    """Nodes that move elements take bytes, which are dequantised behind them."""
    found: list[OnnxNode] = []
    same: dict[str, str] = {}  # what is quantised as it was, by the bytes that it is
    known = _Fusion(nodes, outputs, constants)
    for node in nodes:
        now = _with_inputs(node, tuple(same.get(name, name) for name in node.inputs))
        x = known.linear(now.inputs[0]) if now.inputs else None
        if x is not None and known.is_one(x) and now.op_type in _MOVING and not now.domain:
            if len(now.outputs) == 1:
                codes = f"{now.outputs[0]}/codes"
                found.append(
                    OnnxNode(
                        now.name, "", now.op_type, "", (x.values, *now.inputs[1:]), (codes,),
                        now.attributes,
                    )
                )  # fmt: skip
                now = OnnxNode(
                    "", "", "DequantizeLinear", "", (codes, x.scale, x.zero), now.outputs, {}
                )
                known.maker[now.outputs[0]] = now
        elif (
            x is not None
            and now.op_type == "QuantizeLinear"
            and now.outputs[0] not in outputs
            and known.quantises_again(now, x)
        ):
            same[now.outputs[0]] = x.values
            continue
        found.append(now)
    return found


def _with_inputs(node: OnnxNode, inputs: tuple[str, ...]) -> OnnxNode:
    if inputs == node.inputs:
        return node
    return OnnxNode(
        node.name, node.domain, node.op_type, node.overload, inputs, node.outputs, node.attributes
    )


class _Fusion:
    def __init__(
        self,
        nodes: Sequence[OnnxNode],
        outputs: Sequence[str],
        constants: Mapping[str, Initializer],
    ) -> None:
        self.constants = constants
        self.maker = {name: node for node in nodes for name in node.outputs if name}
        self.uses = Counter(name for node in nodes for name in _reads(node))
        self.uses.update(outputs)

    def fused(self, node: OnnxNode) -> OnnxNode:
        """What computes the results of a node: one operator for several, or the node."""
        if node.op_type != "QuantizeLinear" or len(node.inputs) != 3 or node.domain:
            return node
        result = Linear(node.inputs[0], node.inputs[1], node.inputs[2], 1)
        if not self.is_one(result):
            return node
        made, activation = self._before(result)
        if made is None or made.domain or len(made.inputs) < 2:
            return node
        build = {"Conv": self._conv, "MatMul": self._matmul}.get(made.op_type)
        found = None if build is None else build(made, result, activation)
        if found is None:
            return node
        op_type, inputs, attributes = found
        return OnnxNode(made.name, "", op_type, "", inputs, node.outputs, attributes)

    def added(self, node: OnnxNode) -> OnnxNode:
        """A convolution of bytes that another tensor of bytes is added to, or the node."""
        if node.op_type != "QuantizeLinear" or len(node.inputs) != 3 or node.domain:
            return node
        result = Linear(node.inputs[0], node.inputs[1], node.inputs[2], 1)
        made, activation = self._before(result)
        if made is None or made.op_type != "Add" or made.domain or len(made.inputs) != 2:
            return node
        if not self._is_ordinary(result):
            return node
        for own, other in (made.inputs, made.inputs[::-1]):
            conv = self._summand(own)
            residual = self.linear(other)
            if conv is None or residual is None or not self._is_ordinary(residual):
                continue
            nine = (*conv.inputs, "")[:9]
            return OnnxNode(
                made.name, OWN, "QLinearConvAdd", "",
                (*nine, *residual.names, result.scale, result.zero), node.outputs,
                {**conv.attributes, "activation": activation},
            )  # fmt: skip
        return node

    def _summand(self, name: str) -> OnnxNode | None:
        """The convolution whose bytes are dequantised for one node, as it quantised them."""
        x = self.linear(name)
        if x is None or self.uses[name] != 1 or not self._is_ordinary(x):
            return None
        conv = self._only(x.values)
        if conv is None or conv.op_type != "QLinearConv" or conv.domain:
            return None
        if len(conv.inputs) not in (8, 9):
            return None
        plain = conv.attributes.get("activation", "none") == "none"
        if not plain or conv.attributes.get("group", 1) != 1:
            return None
        as_quantised = Linear(x.values, conv.inputs[6], conv.inputs[7], 1)
        return conv if self._agree(x, as_quantised) else None

    def _is_ordinary(self, x: Linear) -> bool:
        scale = self._number(x.scale)
        return self.is_one(x) and scale is not None and _SCALES[0] <= scale <= _SCALES[1]

    def _before(self, result: Linear) -> tuple[OnnxNode | None, str]:
        """The operator whose result is quantised, and the activation between."""
        node = self._only(result.values)
        if node is None or node.op_type not in ("Relu", "Clip") or node.domain or not node.inputs:
            return node, "none"
        if node.op_type == "Clip" and not self._keeps_range(node, result):
            return None, "none"
        return self._only(node.inputs[0]), "relu" if node.op_type == "Relu" else "none"

    def _only(self, name: str) -> OnnxNode | None:
        """What makes a value that one node reads."""
        return self.maker.get(name) if self.uses[name] == 1 else None

    def _keeps_range(self, clip: OnnxNode, result: Linear) -> bool:
        """Whether nothing that the result can be is outside the bounds."""
        bounds = [self._number(name) for name in (*clip.inputs[1:], "", "")[:2]]
        scale, zero = self._number(result.scale), self._data(result.zero)
        if len(clip.inputs) < 2 or scale is None or zero is None:
            return False
        limits = np.iinfo(zero.dtype)
        low, high = ((x - float(zero.reshape(()))) * scale for x in (limits.min, limits.max))
        return (bounds[0] is None or bounds[0] <= low) and (bounds[1] is None or bounds[1] >= high)

    # -- constants ----------------------------------------------------------------------------

    def _data(self, name: str) -> Data | None:
        found = self.constants.get(name)
        if found is None or found.size > _SMALL or found.dtype.kind not in "fiu":
            return None
        return found.array()

    def _number(self, name: str) -> float | None:
        found = self._data(name)
        return float(found.reshape(())) if found is not None and found.size == 1 else None

    def linear(self, name: str) -> Linear | None:
        """The operands of the `DequantizeLinear` that makes a value."""
        node = self.maker.get(name)
        if node is None or node.op_type != "DequantizeLinear" or node.domain:
            return None
        if len(node.inputs) != 3 or node.attributes.get("block_size", 0):
            return None
        axis = node.attributes.get("axis", 1)
        return Linear(*node.inputs, axis) if isinstance(axis, int) else None

    def is_one(self, x: Linear) -> bool:
        """Whether a tensor of bytes has one scale and one zero point."""
        scale, zero = self._data(x.scale), self._data(x.zero)
        if scale is None or zero is None or zero.dtype.name not in _BYTES:
            return False
        return bool(scale.size == zero.size == 1 and scale.dtype == np.float32 and scale.min() > 0)

    def quantises_again(self, node: OnnxNode, x: Linear) -> bool:
        """Whether a node quantises what was dequantised with its scale and zero point."""
        if node.domain or len(node.inputs) != 3 or not self.is_one(x):
            return False
        return self._agree(Linear(node.inputs[0], node.inputs[1], node.inputs[2], 1), x)

    def _agree(self, x: Linear, y: Linear) -> bool:
        """Whether scales and zero points are the same."""
        same = [
            (self._data(a), self._data(b)) for a, b in zip(x.names[1:], y.names[1:], strict=True)
        ]
        return all(
            a is not None and b is not None and a.dtype == b.dtype and np.array_equal(a, b)
            for a, b in same
        )

    def _is_by(self, w: Linear, axes: tuple[int, ...]) -> bool:
        """Whether constant bytes have one scale, or one for each entry of an axis."""
        scale, zero = self._data(w.scale), self._data(w.zero)
        if w.values not in self.constants or scale is None or zero is None:
            return False
        if zero.dtype.name not in _BYTES or scale.dtype != np.float32 or scale.size != zero.size:
            return False
        return bool(scale.size == 1 or (scale.ndim == 1 and w.axis in axes))

    # -- operators ----------------------------------------------------------------------------

    def _conv(self, node: OnnxNode, result: Linear, activation: str) -> Any:
        x, w = self.linear(node.inputs[0]), self.linear(node.inputs[1])
        if x is None or w is None or not self.is_one(x) or not self._is_by(w, (0,)):
            return None
        inputs: tuple[str, ...] = (*x.names, *w.names, result.scale, result.zero)
        if len(node.inputs) > 2 and node.inputs[2]:
            bias = self.linear(node.inputs[2])
            if bias is None or not self._is_bias(bias, x, w):
                return None
            inputs = (*inputs, bias.values)
        return "QLinearConv", inputs, {**node.attributes, "activation": activation}

    def _matmul(self, node: OnnxNode, result: Linear, activation: str) -> Any:
        a, b = self.linear(node.inputs[0]), self.linear(node.inputs[1])
        if a is None or b is None or activation != "none":
            return None
        if not self.is_one(a) or not (self.is_one(b) or self._is_by(b, (1, -1))):
            return None
        return "QLinearMatMul", (*a.names, *b.names, result.scale, result.zero), {}

    def _is_bias(self, bias: Linear, x: Linear, w: Linear) -> bool:
        """Whether a bias counts units of x times w."""
        data, zero = self._data(bias.values), self._data(bias.zero)
        scales = [self._data(t.scale) for t in (bias, x, w)]
        if data is None or zero is None or data.dtype != np.int32 or zero.any():
            return False
        if any(s is None for s in scales):
            return False
        own, of_x, of_w = (np.asarray(s, np.float64).reshape(-1) for s in scales)
        expected = of_x * of_w
        return own.size in (1, expected.size) and bool(np.allclose(own, expected, 1e-5, 0))


def _reads(node: OnnxNode) -> list[str]:
    return [*node.inputs, *(name for body in bodies_of(node) for name in body.outer)]


def _read(nodes: Sequence[OnnxNode], outputs: Sequence[str]) -> tuple[OnnxNode, ...]:
    """The nodes but for those that were replaced: nothing reads them any more."""
    wanted, kept = set(outputs), list[OnnxNode]()
    for node in reversed(nodes):
        if node.op_type not in _REPLACED or node.domain or wanted & set(node.outputs):
            wanted.update(_reads(node))
            kept.append(node)
    return tuple(reversed(kept))
