"""Which programs are one persistent kernel: dense models, one row at a time.

`persist` gives the launch of the layers that `recognise` finds in the graph of a decode step, or
says why there is none. All launches between the embedding and the logits become that one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlx.backends.cuda.kernels.persistent.decode_kernel import PersistentDecode
from rlx.backends.cuda.kernels.persistent.layer_args import OTHER_DOWN, OTHER_V
from rlx.backends.cuda.kernels.persistent.recognise import (
    LOOKUP,
    Layer,
    Model,
    Unsuited,
    Weight,
    recognise,
)
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
    lookup: Any = None if model.lookup is None else model.lookup.op
    table = lookup.scheme.name if lookup is not None and lookup.name == LOOKUP else ""
    made = KernelLaunch(
        PersistentDecode(shape, embeds=model.lookup is not None, table=table),
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
        matrices, kinds = _matrices(layer, shape)
        for matrix, part in zip(matrices, shape.parts, strict=True):
            args += _maps(matrix, part)
        args += [
            Pointer(layer.gain), Pointer(layer.second_gain), gain(layer.query_gain),
            gain(layer.key_gain), Pointer(layer.keys), Pointer(layer.values), kinds,
        ]  # fmt: skip
    return args


def _matrices(layer: Layer, shape: DenseShape) -> tuple[list[Weight], int]:
    """The matrices of the shape's parts, and which of them are of other types. Where a layer has
    none of a type, another matrix stands in its place."""
    kinds, others = 0, list[Weight]()
    if shape.other_v is not None:
        kinds |= OTHER_V if layer.other_v is not None else 0
        others.append(layer.other_v or layer.qkv)
    if shape.other_down is not None:
        kinds |= OTHER_DOWN if layer.down.scheme == shape.others[1] else 0
        others.append(layer.down)
    return [layer.qkv, layer.out, layer.gate, layer.up, layer.down, *others], kinds


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
    if weight.scheme != part.scheme:  # nothing is copied of it
        widths = [TILE_COLUMNS] * len(widths)
    return [
        TensorMap(start, Matrix(element, rows, columns, columns, part.box_rows, width, i == 0))
        for i, width in enumerate(widths)
    ]


def _one(schemes: Sequence[str]) -> str:
    """The type of all these matrices, if there are any."""
    if len(set(schemes)) > 1:
        raise Unsuited(f"a matrix has the types {', '.join(sorted(set(schemes)))} beside another")
    return schemes[0] if schemes else ""


def _shape(model: Model, multiprocessors: int) -> DenseShape:
    first = model.layers[0]
    _, kv_heads, context, head_dim = first.keys.shape.static_dims
    hidden, heads = first.out.outputs, first.out.inputs
    ranks = 1 << (max(multiprocessors // kv_heads, 1)).bit_length() - 1
    values = [x.other_v.scheme for x in model.layers if x.other_v is not None]
    if "" in values:
        raise Unsuited("q, k and v are not one product")
    downs = [x.down.scheme for x in model.layers]
    down = max(downs, key=downs.count)  # the type that most layers have
    others = [scheme for scheme in downs if scheme != down]
    shape = DenseShape(
        len(model.layers), hidden, heads // head_dim, kv_heads, head_dim,
        first.gate.outputs, model.head.outputs, context,
        min(ranks, 32), model.eps, model.head_eps, model.scale, first.query_gain is not None,
        first.keys.dtype.name,
        schemes=(
            first.qkv.scheme, first.out.scheme, first.gate.scheme, down, model.head.scheme,
        ),
        others=(_one(values), _one(others)),
    )  # fmt: skip
    if shape.blocks < _LEAST_SHARE * multiprocessors:
        raise Unsuited(f"only {shape.blocks} of {multiprocessors} multiprocessors would work")
    reason = shape.unsuited()
    if reason:
        raise Unsuited(reason)
    return shape
