"""One layout for a whole network: convolutions, and what lies between them, with channels last.

The pass walks the graph once. A convolution whose filters are params becomes one with channels last
and a transpose back; every op that it knows takes the operand before that transpose and is
transposed back itself, so that transposes remain only where values enter or leave. On the way
what follows a convolution is fused with it: scale and shift by channel (batch norm, in inference)
go into the filters, which `prepare` packs once; then a residual, then an activation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rlx.backends.cpu.kernels.conv.channels_last_gemm import panel_width
from rlx.backends.cpu.kernels.conv.choose_int8 import INT8_OPS, build
from rlx.backends.cpu.layouts.channels_last import ConvChannelsLast
from rlx.ir.dim import same
from rlx.ir.dtype import f32, i8, u8
from rlx.ir.graph import Graph
from rlx.ir.node import Node, Value
from rlx.ir.op import lookup
from rlx.ir.ops.activation import activation_ops, is_default
from rlx.ir.ops.conv import Conv, ConvTranspose
from rlx.ir.shape import normalize_axis
from rlx.llvm.nest.elements import can_activate
from rlx.llvm.target import Target
from rlx.passes.rewrite import GONE, Editor
from rlx.passes.simplify import dce
from rlx.support.records import dataclass

_WINOGRAD_CHANNELS, _WINOGRAD_SIZE = 24, 7
_FEW_CHANNELS = 4  # such images are padded first: a row of taps is then contiguous


def choose_layout(graph: Graph, target: Target) -> Graph:
    """The graph with channels last where that pays, else as it is."""
    editor = Editor(graph, "layout")
    layout = _Layout(editor, target)
    if not layout.pays():
        return graph
    for node in list(graph.nodes):
        if node.id != GONE and not editor.is_param_only(node.output):
            layout.visit(node)
    return dce(editor.finish())


@dataclass(frozen=True)
class _Made:
    """What a convolution with channels last was made of; filters as the graph has them."""

    x: Value
    w: Value
    bias: Value | None
    residual: Value | None
    record: Any  # Conv, or ConvTranspose whose kernels do not overlap
    activation: str = "none"

    @property
    def is_transposed(self) -> bool:
        return isinstance(self.record, ConvTranspose)

    @property
    def channel_axis(self) -> int:
        """The axis of the filters that is the result's channels."""
        return 1 if self.is_transposed else 0


def last_axes(rank: int) -> tuple[int, ...]:
    """The transpose to channels last."""
    return (0, *range(2, rank), 1)


def first_axes(rank: int) -> tuple[int, ...]:
    """The transpose back."""
    return (0, rank - 1, *range(1, rank - 1))


def moved_axis(axis: int, rank: int) -> int:
    """Where an axis is with channels last."""
    return last_axes(rank).index(normalize_axis(axis, rank))


class _Layout:
    def __init__(self, editor: Editor, target: Target) -> None:
        self.editor, self.graph, self.target = editor, editor.graph, target
        self.made: dict[Value, _Made] = {}  # by the result, with channels last
        self.moved: dict[Value, Value] = {}  # values that had to be transposed

    # -- which graphs -----------------------------------------------------------------------------

    def pays(self) -> bool:
        """A lone convolution of floats is not worth two transposes, unless it cuts patches."""
        names = {n.op.name for n in self.graph.nodes}
        found = [n for n in self.graph.nodes if n.op.name == "conv" and self.suits(n)]
        return bool(names & INT8_OPS) or len(found) > 1 or any(_cuts_patches(n) for n in found)

    def suits(self, node: Node) -> bool:
        x, w, *bias = node.inputs
        if any(v.shape.dtype is not f32 for v in node.inputs) or not w.shape.is_static:
            return False
        constant = all(self.editor.is_param_only(v) for v in (w, *bias))
        return constant and not self.editor.is_param_only(x) and self.target.lanes(32) > 1

    # -- values -----------------------------------------------------------------------------------

    def twin(self, value: Value) -> Value | None:
        """The value that `value` is the transpose of, with channels last."""
        node, rank = value.node, value.shape.rank
        is_back = node.op.name == "transpose" and rank in (3, 4)
        if is_back and node.op.axes == first_axes(rank):  # type: ignore[attr-defined]
            return node.inputs[0]
        return None

    def to_last(self, value: Value, rank: int) -> Value:
        """A value with channels last, broadcast to `rank` axes if it has fewer."""
        g, found = self.graph, self.twin(value)
        if found is not None and value.shape.rank == rank:
            return found
        dims = value.shape.dims
        if all(isinstance(d, int) and d == 1 for d in dims):
            return value if value.shape.rank <= 1 else g.reshape(value, shape=(1,) * rank)
        key = value
        if key in self.moved and self.moved[key].shape.rank == rank:
            return self.moved[key]
        if value.shape.rank < rank:
            value = g.reshape(value, shape=(*(1,) * (rank - value.shape.rank), *dims))
        made: Value = g.transpose(value, axes=last_axes(rank))
        self.moved[key] = made
        return made

    def finish(self, node: Node, build: Callable[[], Value | None], rank: int = 0) -> Value | None:
        """Replace a node by the transpose of what `build` makes with channels last."""
        self.moved = {k: v for k, v in self.moved.items() if v.node.id != GONE}
        with self.editor.building(node) as new:
            result = build()
            back = None
            if result is not None:
                axes = first_axes(result.shape.rank)
                back = self.graph.transpose(result, axes=axes)
        if back is None:
            self.editor.drop(new)
            return None
        self.editor.replace(node.output, back)
        return result

    # -- nodes ------------------------------------------------------------------------------------

    def visit(self, node: Node) -> None:
        name = node.op.name
        if name == "conv":
            if self.suits(node):
                self._conv(node)
            return
        if name in INT8_OPS:
            rank = node.output.shape.rank
            self.finish(
                node,
                lambda: build(self.graph, self.target, node, lambda v: self.to_last(v, rank)),
            )
            return
        if not any(self.twin(v) is not None for v in node.inputs):
            return
        if node.op.is_elementwise:
            if not self._absorb(node):
                self._elementwise(node)
        elif name in _VISITORS:
            _VISITORS[name](self, node)

    def _conv(self, node: Node) -> None:
        x, w, *bias = node.inputs
        record: Any = node.op
        rank = x.shape.rank

        def build() -> Value:
            image, plain = self.to_last(x, rank), record
            window = record.window(w.shape.dims)
            few = w.shape.static_dims[1] <= _FEW_CHANNELS and record.groups == 1
            if few and any((*window.low, *window.high)):
                low, high = (0, *window.low, 0), (0, *window.high, 0)
                image = self.graph.pad(image, low=low, high=high)
                plain = record.replace(padding=(0,))
            return self._build(_Made(image, w, bias[0] if bias else None, None, plain))

        self.finish(node, build)

    def _build(self, made: _Made) -> Value:
        g, record = self.graph, made.record
        if made.is_transposed:
            return self._transposed(made)
        w, lanes = made.w, self.target.lanes(32)
        out, per_group = w.shape.static_dims[:2]
        filters = out // record.groups
        form = "depthwise" if per_group == 1 and filters == 1 and record.groups > 1 else "gemm"
        if form == "gemm" and _suits_winograd(made):
            form = "winograd"
        packing = {
            "groups": record.groups, "form": form,
            "width": panel_width(self.target, filters) * lanes, "lanes": lanes,
        }  # fmt: skip
        packed = g.append(lookup("pack_channels_last")(**packing), (w,))
        op = ConvChannelsLast(
            stride=record.stride, padding=record.padding, dilation=record.dilation, **packing,
            w=w.shape, activation=made.activation, has_bias=made.bias is not None,
            has_residual=made.residual is not None,
        )  # fmt: skip
        extras = [v for v in (made.bias, made.residual) if v is not None]
        result: Value = g.append(op, (made.x, packed, *extras))
        self.made[result] = made
        return result

    # -- what a convolution takes in ---------------------------------------------------------------

    def _absorb(self, node: Node) -> bool:
        """Fuse an elementwise op with the convolution before it."""
        for i, value in enumerate(node.inputs):
            twin = self.twin(value)
            made = self.made.get(twin) if twin is not None else None
            if made is None or twin is None or made.activation != "none":
                continue
            if self.editor.uses(value) != 1 or self.editor.uses(twin) != 1:
                continue  # what else reads it, with channels last perhaps, would compute it again
            if not node.output.shape.same_dims(value.shape) or node.output.shape.dtype is not f32:
                continue
            if self._fused(node, made, i, twin):
                return True
        return False

    def _fused(self, node: Node, made: _Made, i: int, twin: Value | None) -> bool:
        name, rank = node.op.name, node.output.shape.rank
        if len(node.inputs) == 1:
            if name not in activation_ops() or not is_default(node.op) or not can_activate(name):
                return False
            return self._rebuilt(node, lambda: _with(made, activation=name))
        if len(node.inputs) != 2 or name not in ("add", "sub", "mul", "div"):
            return False
        other = node.inputs[1 - i]
        if made.residual is None and self._by_channel(other, rank) and (i == 0 or name in _EITHER):
            return self._rebuilt(node, lambda: self._scaled(made, name, other))
        if made.is_transposed:
            return False
        if made.residual is None and name == "add" and other.shape.same_dims(node.output.shape):
            if other is node.inputs[i] or other.shape.dtype is not f32:
                return False
            return self._rebuilt(node, lambda: _with(made, residual=self.to_last(other, rank)))
        return False

    def _rebuilt(self, node: Node, change: Callable[[], _Made]) -> bool:
        self.finish(node, lambda: self._build(change()))
        return True

    def _by_channel(self, value: Value, rank: int) -> bool:
        """Whether a param has one element for each channel, or one at all."""
        dims = (*(1,) * (rank - value.shape.rank), *value.shape.dims)
        others = all(same(d, 1) for i, d in enumerate(dims) if i != 1)
        return others and value.shape.dtype is f32 and self.editor.is_param_only(value)

    def _scaled(self, made: _Made, name: str, by: Value) -> _Made:
        """The convolution with a scale or a shift of its channels in filters and bias."""
        g, axis = self.graph, made.channel_axis
        out = made.w.shape.dims[axis]
        vector = g.reshape(by, shape=(by.shape.num_elements,))
        if name in ("mul", "div"):
            apply: Any = getattr(g, name)
            rest = (1,) * (made.w.shape.rank - 1 - axis)
            column = g.reshape(by, shape=(*(1,) * axis, by.shape.num_elements, *rest))
            bias = None if made.bias is None else apply(made.bias, vector)
            return _with(made, w=apply(made.w, column), bias=bias)
        if name == "sub":
            vector = g.neg(vector)
        bias = g.expand(vector, shape=(out,)) if made.bias is None else g.add(made.bias, vector)
        return _with(made, bias=bias)

    # -- other ops ---------------------------------------------------------------------------------

    def _elementwise(self, node: Node) -> None:
        rank = node.output.shape.rank
        if rank not in (3, 4) or all(self.twin(v) is None for v in node.inputs):
            return
        if any(v.shape.rank == rank and self.twin(v) is not None for v in node.inputs):
            self._same(node, node.op)

    def _same(self, node: Node, op: Any) -> None:
        """The same op, on operands with channels last."""
        rank = node.output.shape.rank

        def build() -> Value:
            made: Value = self.graph.append(op, [self.to_last(v, rank) for v in node.inputs])
            return made

        self.finish(node, build)

    def _along(self, node: Node) -> None:
        op: Any = node.op
        self._same(node, op.replace(axis=moved_axis(op.axis, node.output.shape.rank)))

    def _pad(self, node: Node) -> None:
        op: Any = node.op
        order = last_axes(node.output.shape.rank)
        low, high = (tuple(ends[a] for a in order) for ends in (op.low, op.high))
        self._same(node, op.replace(low=low, high=high))

    def _pool(self, node: Node) -> None:
        op: Any = node.op
        largest = op.name == "max_pool"
        out = node.output.shape
        if out.dtype not in ((f32, u8, i8) if largest else (f32,)):
            return
        if not isinstance(out.dims[1], int):
            return
        made = lookup("pool_channels_last")(
            largest=largest, kernel=op.kernel, stride=op.stride, padding=op.padding,
            count_include_pad=getattr(op, "count_include_pad", True),
        )  # fmt: skip
        self._same(node, made)

    def _reduce(self, node: Node) -> None:
        """Over spatial axes: with channels last the rest is in order, one image axis or none."""
        op: Any = node.op
        x = node.inputs[0]
        rank = x.shape.rank
        axes = range(rank) if op.axis is None else [normalize_axis(a, rank) for a in op.axis]
        if set(axes) != set(range(2, rank)):
            return
        twin = self.twin(x)
        assert twin is not None
        made = op.replace(axis=tuple(range(1, rank - 1)))
        if op.keepdims:
            self.finish(node, lambda: self.graph.append(made, [twin]))
            return
        with self.editor.building(node):
            result = self.graph.append(made, [twin])
        self.editor.replace(node.output, result)

    def _reshape(self, node: Node) -> None:
        """Spatial axes that are joined, or of size one and gone, leave the pixels in order."""
        g, x, out = self.graph, node.inputs[0], node.output.shape
        twin = self.twin(x)
        batch, channels, *spatial = x.shape.dims
        assert twin is not None
        if all(same(d, 1) for d in spatial):
            with self.editor.building(node):
                plain = g.reshape(twin, shape=out.dims)
            self.editor.replace(node.output, plain)
            return
        if (
            out.rank not in (3, 4)
            or not same(out.dims[0], batch)
            or not same(out.dims[1], channels)
        ):
            return
        dims = (out.dims[0], *out.dims[2:], out.dims[1])
        self.finish(node, lambda: g.reshape(twin, shape=dims))

    def _transpose(self, node: Node) -> None:
        op: Any = node.op
        x = node.inputs[0]
        twin, back = self.twin(x), first_axes(x.shape.rank)
        assert twin is not None
        axes = tuple(back[a] for a in op.axes)
        if axes == back:
            return
        if axes == tuple(range(len(axes))):
            self.editor.replace(node.output, twin)
            return
        with self.editor.building(node):
            made = self.graph.transpose(twin, axes=axes)
        self.editor.replace(node.output, made)

    def _resize(self, node: Node) -> None:
        """Nearest pixels by a whole factor are repeated; others are gathered, axis by axis."""
        op: Any = node.op
        twin = self.twin(node.inputs[0])
        assert twin is not None
        self.finish(node, lambda: op.decompose_at(self.graph, twin, 1))

    def _conv_transpose(self, node: Node) -> None:
        """Kernels that do not overlap: a 1×1 convolution, its channels pixels of the result."""
        op = node.op
        x, w, *bias = node.inputs
        record: Any = op
        if not self.suits(node) or x.shape.rank != 4 or not _tiles_output(record, w):
            return
        made = _Made(self.to_last(x, 4), w, bias[0] if bias else None, None, record)
        self.finish(node, lambda: self._build(made))

    def _transposed(self, made: _Made) -> Value:
        g, w = self.graph, made.w
        c, out, down, right = w.shape.static_dims
        batch, height, width, _ = made.x.shape.dims
        count = down * right * out
        filters = g.reshape(g.transpose(w, axes=(2, 3, 1, 0)), shape=(count, c, 1, 1))
        bias = made.bias
        if bias is not None:
            bias = g.reshape(g.expand(bias, shape=(down * right, out)), shape=(count,))
        plain = _with(made, w=filters, bias=bias, record=Conv(stride=(1, 1)))
        y = self._build(plain)
        del self.made[y]  # its pixels are in another order
        y = g.reshape(y, shape=(batch, height, width, down, right, out))
        y = g.transpose(y, axes=(0, 1, 3, 2, 4, 5))
        result: Value = g.reshape(y, shape=(batch, height * down, width * right, out))
        self.made[result] = made
        return result


_EITHER = ("add", "mul")


def _suits_winograd(made: _Made) -> bool:
    """3×3 with enough channels on both sides and an image of several tiles. The sizes of an image
    decide, never how many there are: a result does not depend on the batch."""
    record, dims = made.record, made.w.shape.static_dims
    plain = set(record.stride) | set(record.dilation) | {record.groups} == {1}
    if dims[2:] != (3, 3) or not plain or min(dims[:2]) < _WINOGRAD_CHANNELS:
        return False
    sizes = made.x.shape.dims[1:3]
    return bool(all(not isinstance(n, int) or n >= _WINOGRAD_SIZE for n in sizes))


def _with(made: _Made, **changes: Any) -> _Made:
    fields = {name: getattr(made, name) for name in ("x", "w", "bias", "residual", "record")}
    return _Made(**{**fields, "activation": made.activation, **changes})


def _cuts_patches(node: Node) -> bool:
    record: Any = node.op
    window = record.window(node.inputs[1].shape.dims)
    whole = window.kernel == window.stride and max(window.kernel) > 1
    return bool(whole and record.groups == 1)


def _tiles_output(record: Any, w: Value) -> bool:
    window = record.window(w.shape.dims)
    plain = record.groups == 1 and not any((*window.low, *window.high, *record.output_padding))
    return plain and window.kernel == window.stride and set(window.dilation) == {1}


_VISITORS: dict[str, Callable[[_Layout, Node], None]] = {
    "concat": _Layout._along,
    "narrow": _Layout._along,
    "pad": _Layout._pad,
    "max_pool": _Layout._pool,
    "avg_pool": _Layout._pool,
    **dict.fromkeys(("mean", "sum", "max", "min"), _Layout._reduce),
    "reshape": _Layout._reshape,
    "transpose": _Layout._transpose,
    "resize": _Layout._resize,
    "conv_transpose": _Layout._conv_transpose,
}

__all__: Sequence[str] = ("choose_layout",)
