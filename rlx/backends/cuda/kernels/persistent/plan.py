"""Which programs are one persistent kernel: dense models, one row at a time.

`persist` gives the launch of the layers that `recognise` finds in the graph of a decode step, or
says why there is none. All launches between the embedding and the logits become that one.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlx.backends.cuda.kernels.persistent.decode_kernel import PersistentDecode
from rlx.backends.cuda.kernels.persistent.recognise import Model, Unsuited, Weight, recognise
from rlx.backends.cuda.kernels.persistent.shape import DenseShape, Part
from rlx.backends.cuda.launches import KernelArg, KernelLaunch, Lasting
from rlx.backends.cuda.tensor_map import TILE_COLUMNS, Matrix, TensorMap
from rlx.backends.kernel_args import NodeNumber, Pointer, Status
from rlx.errors import OptionError
from rlx.ir.dtype import f16
from rlx.ir.lir import Lir
from rlx.ir.node import Value

TARGET = "sm_90a"
_LEAST_SHARE = 0.75  # of the multiprocessors that must have a block
_BYTE = 1 / 4.1e12  # seconds to read a byte of weights on an H200
# Seconds of a layer, and the times that its weights take more than that: fitted to the shapes of
# Qwen3-0.6B, 1.7B and 8B in bf16 there.
_PERSISTENT, _GRAPH = (5.0e-6, 1.0), (12.5e-6, 1.02)


def persist(
    launches: Sequence[KernelLaunch], lir: Lir, cpu: str, multiprocessors: int, wish: str
) -> tuple[list[KernelLaunch], str]:
    """The launches with those of the layers as one, or as they are and the reason. `wish` is 0
    (never), auto (where it is faster) or 1 (wherever it can be)."""
    if wish not in ("0", "auto", "1"):
        raise OptionError(
            "not a way to decode", where="RLX_PERSISTENT", got=repr(wish), expected="0, auto or 1"
        )
    try:
        if wish == "0":
            raise Unsuited("RLX_PERSISTENT is 0")
        if cpu != TARGET:
            raise Unsuited(f"{cpu} has no copy engine that the kernel knows")
        model = recognise(lir.graph, lir)
        shape = _shape(model, multiprocessors)
        if wish != "1" and _seconds(shape, _GRAPH) < _seconds(shape, _PERSISTENT):
            raise Unsuited("a graph of launches is faster by the cost model")
        return _replaced(launches, model, shape), ""
    except Unsuited as reason:
        return list(launches), str(reason)


def _bytes(shape: DenseShape) -> float:
    """The weights of a layer."""
    return shape.blocks * sum(
        part.rows * part.columns // part.halves * 128 / part.weights.per_box for part in shape.parts
    )


def _seconds(shape: DenseShape, model: tuple[float, float]) -> float:
    return shape.layers * (model[0] + model[1] * _bytes(shape) * _BYTE)


# -- the launch -----------------------------------------------------------------------------------


def _replaced(
    launches: Sequence[KernelLaunch], model: Model, shape: DenseShape
) -> list[KernelLaunch]:
    ours = [i for i, x in enumerate(launches) if x.node in model.nodes]
    if not ours or ours != list(range(ours[0], ours[-1] + 1)):
        raise Unsuited("other launches stand between those of the layers")
    made = KernelLaunch(
        PersistentDecode(shape, embeds=model.lookup is not None),
        _args(model, shape),
        blocks=shape.blocks,
        node=model.logits.node,
    )
    return [*launches[: ours[0]], made, *launches[ours[-1] + 1 :]]


def _args(model: Model, shape: DenseShape) -> list[KernelArg]:
    def gain(value: Value | None) -> KernelArg:
        return 0 if value is None else Pointer(value)

    start: KernelArg = Pointer(model.x)
    embedding: list[KernelArg] = [0, 0, 0, 0]
    if model.lookup is not None:
        table, ids = model.lookup.inputs
        start, rows = Pointer(ids), table.shape.dims[0]
        embedding = [Pointer(table), Status(), NodeNumber(model.lookup), rows]
    head, *beside = _maps(model.head, shape.head)
    args: list[KernelArg] = [
        start, Pointer(model.logits), Pointer(model.gain), head, Pointer(model.cos),
        Pointer(model.sin), model.position, Lasting(4 * shape.words, shape.blocks), 0, *embedding,
        *beside,
    ]  # fmt: skip
    for layer in model.layers:
        matrices = layer.qkv, layer.out, layer.gate, layer.up, layer.down
        for matrix, part in zip(matrices, shape.parts, strict=True):
            args += _maps(matrix, part)
        args += [
            Pointer(layer.gain), Pointer(layer.second_gain), gain(layer.query_gain),
            gain(layer.key_gain), Pointer(layer.keys), Pointer(layer.values),
        ]  # fmt: skip
    return args


def _maps(weight: Weight, part: Part) -> list[TensorMap]:
    """A matrix as tiles of its quants, and of what lies beside them. Rows of packed weights are
    taken for rows of 16-bit numbers."""
    value = weight.value
    rows, columns = value.shape.static_dims
    widths = [TILE_COLUMNS]
    element = value.dtype
    if part.scheme:
        element, columns = f16, columns // 2
        widths += [part.side_bytes(i) // 2 for i in range(len(part.weights.sides))]
    start = Pointer(value, weight.first * columns * element.bytes // value.dtype.bytes)
    rows = rows if weight.rows is None else weight.rows
    return [
        TensorMap(start, Matrix(element, rows, columns, columns, part.box_rows, width))
        for width in widths
    ]


def _shape(model: Model, multiprocessors: int) -> DenseShape:
    first = model.layers[0]
    _, kv_heads, context, head_dim = first.keys.shape.static_dims
    hidden, heads = first.out.outputs, first.out.inputs
    ranks = 1 << (max(multiprocessors // kv_heads, 1)).bit_length() - 1
    shape = DenseShape(
        len(model.layers), hidden, heads // head_dim, kv_heads, head_dim,
        first.gate.outputs, model.head.outputs, context,
        min(ranks, 32), model.eps, model.head_eps, model.scale, first.query_gain is not None,
        first.keys.dtype.name,
        schemes=tuple(
            w.scheme for w in (first.qkv, first.out, first.gate, first.down, model.head)
        ),
    )  # fmt: skip
    if shape.blocks < _LEAST_SHARE * multiprocessors:
        raise Unsuited(f"only {shape.blocks} of {multiprocessors} multiprocessors would work")
    reason = shape.unsuited()
    if reason:
        raise Unsuited(reason)
    return shape
