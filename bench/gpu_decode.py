"""The persistent decode kernel by itself: a token of a shape, and where the time of a layer goes.

Figures without a peer, to choose its settings by: `--variants "ahead=3;ahead=6,piece=64"`. Weights
are random, each layer has its own.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

from bench.common import arguments
from bench.random_model import SHAPES, random_blocks, random_floats
from rlx.formats.quant_presets import QuantPreset
from rlx.ir.quant.scheme import GGUF_SCHEMES

CONTEXT, EPS = 4096, 1e-6
_SAMPLE = 256  # rows that are made, and repeated
STAGES = (
    "q k v fetched", "x here", "q k v", "sent", "attention", "out fetched", "parts here", "out",
    "added", "gate fetched", "x here", "gate, up", "sent", "down fetched", "gates here", "down",
    "added",
)  # fmt: skip


class Memory:
    """Arrays on the GPU, and what the copy engine knows of them."""

    def __init__(self, backend: Any) -> None:
        from rlx.backends.cuda.tensor_map import MapStore

        self.allocator = backend.allocator
        self.rng = np.random.default_rng(0)
        self._maps, self._kept = MapStore(self.allocator), list[Any]()
        self._samples: dict[tuple[int, str], Any] = {}

    def put(self, array: Any) -> int:
        return self._address(self.allocator.put(array))

    def zeros(self, count: int) -> int:
        return self._address(self.allocator.alloc((count,), np.uint8))

    def _address(self, buffer: Any) -> int:
        self._kept.append(buffer)
        return int(buffer.handle) + int(buffer.offset)

    def repeated(self, rows: int, sample: Any) -> int:
        """So many rows, of a sample that is repeated on the GPU."""
        row, raw = sample[0].nbytes, sample.view(np.uint8)
        whole = self.allocator.alloc((rows * row,), np.uint8)
        count = min(rows, len(sample))
        whole.view(0, (count * row,), np.uint8).copy_in(raw[:count].reshape(-1))
        while count < rows:
            more = min(count, rows - count) * row
            self.allocator.copy(
                whole.view(count * row, (more,), np.uint8), whole.view(0, (more,), np.uint8)
            )
            count *= 2
        return self._address(whole)

    def maps(self, rows: int, part: Any) -> list[int]:
        """The tensor maps of a random matrix of so many rows."""
        from rlx.backends.cuda.kernels.qgemm.row_planes import split_blocks
        from rlx.backends.cuda.tensor_map import TILE_COLUMNS, Matrix
        from rlx.ir.dtype import bf16, f16

        key = part.whole, part.scheme
        if key not in self._samples:
            if part.scheme:
                scheme = GGUF_SCHEMES[part.scheme]
                made = random_blocks(self.rng, scheme, _SAMPLE, part.whole)
                self._samples[key] = split_blocks(part.scheme, made)
            else:
                self._samples[key] = random_floats(
                    self.rng, _SAMPLE, part.whole, ml_dtypes.bfloat16
                )
        sample = self._samples[key]
        start, columns = self.repeated(rows, sample), sample[0].nbytes // 2
        widths = [TILE_COLUMNS, *(part.side_bytes(i) // 2 for i in range(len(part.weights.sides)))]
        element = f16 if part.scheme else bf16
        return [
            self._maps.address(
                Matrix(element, rows, columns, columns, part.box_rows, w, i == 0), start
            )
            for i, w in enumerate(widths)
        ]


def picked(kind: str, name: str, layers: int) -> str:
    """The type of a matrix, by its GGUF name; empty for bf16."""
    if kind in GGUF_SCHEMES:
        return "" if kind == "BF16" else kind
    found = QuantPreset.parse(kind).pick(f"{name}.weight", (256, 256), layers=layers, tied=True)
    assert found is not None
    return found.name


def in_layers(kind: str, name: str, layers: int) -> list[str]:
    """The type of a matrix in each layer."""
    return [picked(kind, f"blk.{i}.{name}", layers) for i in range(layers)]


def shape_of(name: str, kind: str, multiprocessors: int, options: Any, **changes: Any) -> Any:
    from rlx.backends.cuda.kernels.persistent.shape import DenseShape

    hidden, layers, heads, kv, head, ffn, words, _ = SHAPES[name]
    layers, words = options.layers or layers, options.vocab or words
    ranks = 1 << (multiprocessors // kv).bit_length() - 1
    names = ("attn_q", "attn_output", "ffn_gate")
    plain = [in_layers(kind, n, layers)[0] for n in names]
    downs, v = in_layers(kind, "ffn_down", layers), in_layers(kind, "attn_v", layers)
    down = max(downs, key=downs.count)
    others = [next((s for s in v if s != plain[0]), ""), next((s for s in downs if s != down), "")]
    return DenseShape(
        layers, hidden, heads, kv, head, ffn, words, CONTEXT, min(ranks, 32), EPS, EPS,
        head**-0.5, True, schemes=(*plain, down, picked(kind, "token_embd", layers)),
        others=(others[0], others[1]), **changes,
    )  # fmt: skip


def table_of(memory: Memory, shape: Any, kind: str, position: int, clocks: int) -> int:
    """The args of a launch in device memory."""
    from rlx.backends.cuda.kernels.persistent.layer_args import OTHER_DOWN, OTHER_V

    ones = memory.put(np.ones(max(shape.hidden, shape.head_dim), np.float32))
    angles = memory.rng.random((CONTEXT, shape.head_dim // 2)).astype(np.float32)
    x = memory.put(memory.rng.standard_normal(shape.hidden).astype(np.float32))
    logits = memory.zeros(4 * shape.vocab)
    head, *beside = memory.maps(shape.vocab, shape.head)
    cos, sin = memory.put(np.cos(angles)), memory.put(np.sin(angles))
    exchange = memory.zeros(4 * shape.words)
    args = [x, logits, ones, head, cos, sin, position, exchange, clocks, 0, 0, 0, 0, *beside]
    rows = [shape.qkv_rows, shape.hidden, shape.ffn, shape.ffn, shape.hidden]
    rows += [shape.qkv_rows - shape.qk_rows] if shape.other_v else []
    rows += [shape.hidden] if shape.other_down else []
    v, down = (in_layers(kind, n, shape.layers) for n in ("attn_v", "ffn_down"))
    cache = memory.rng.standard_normal((_SAMPLE, shape.head_dim)).astype(np.float16)
    for i in range(shape.layers):
        kinds = OTHER_V * (v[i] == shape.others[0] != "") | OTHER_DOWN * (
            down[i] == shape.others[1] != ""
        )
        for count, part in zip(rows, shape.parts, strict=True):
            args += memory.maps(count, part)
        caches = [memory.repeated(shape.kv_heads * CONTEXT, cache) for _ in range(2)]
        args += [ones, ones, ones, ones, *caches, kinds]
    return memory.put(np.array(args, np.int64))


def timed(backend: Any, kernel: Any, table: int, calls: int) -> float:
    """Median seconds of a launch."""
    from rlx.backends.cuda.driver import Event, Launch, launch

    stream = backend.allocator.stream
    function = backend.kernels.functions([kernel])[kernel]
    how = Launch(kernel.shape.blocks, kernel.threads, kernel.shared)
    found = []
    for i in range(6):
        first = Event(stream).record()
        for _ in range(calls):
            launch(stream, function, how, [table])
        seconds = Event(stream).record().seconds_since(first) / calls
        found += [seconds] if i else []
    return statistics.median(found)


def weight_bytes(shape: Any, kind: str) -> float:
    """What a launch reads of weights."""

    def copied(part: Any) -> float:
        return float(shape.blocks * part.slots * part.slot_bytes / part.halves)

    heads = -(-shape.vocab // shape.head.rows) * shape.head.slots * shape.head.slot_bytes
    whole = shape.layers * sum(map(copied, shape.parts[:5])) + float(heads)
    names = ("attn_v", "ffn_down")
    for name, part, other in zip(names, (shape.qkv, shape.down), shape.others, strict=True):
        if other:
            count = in_layers(kind, name, shape.layers).count(other)
            share = 1 if name == "ffn_down" else 1 - shape.qk_rows / shape.qkv_rows
            changed = copied(shape.other_down if name == "ffn_down" else shape.other_v)
            whole += count * share * (changed - copied(part))
    return float(whole)


def stages(backend: Any, shape: Any, kind: str, position: int) -> None:
    """The mean clocks of a layer between the marks, of all blocks, and of the slowest."""
    from rlx.backends.cuda.kernels.persistent.decode_kernel import MARKS, PersistentDecode

    memory = Memory(backend)
    buffer = backend.allocator.alloc((shape.blocks, shape.layers, MARKS), np.int32)
    table = table_of(memory, shape, kind, position, int(buffer.handle) + buffer.offset)
    kernel = PersistentDecode(shape, marks=True)
    timed(backend, kernel, table, 3)
    marks = buffer.copy_out().astype(np.int64)[:, 1:, : len(STAGES) + 1]
    steps = np.diff(marks, axis=2) & 0xFFFFFFFF
    whole = np.diff(marks[:, :, 0], axis=1) & 0xFFFFFFFF
    print(f"  clocks of a layer {np.median(whole):.0f}; mean (slowest block):")
    shown = [
        f"{name} {steps[:, :, i].mean():.0f} ({steps[:, :, i].mean(1).max():.0f})"
        for i, name in enumerate(STAGES)
    ]
    for i in range(0, len(shown), 6):
        print("    " + ", ".join(shown[i : i + 6]))


def parsed(text: str) -> dict[str, Any]:
    """`ahead=3,early=1` as options."""
    pairs = [item.split("=") for item in text.split(",") if item]
    return {name: int(value) for name, value in pairs}


def measure(backend: Any, name: str, kind: str, options: Any) -> None:
    from rlx.backends.cuda.kernels.persistent.decode_kernel import PersistentDecode

    memory, known = Memory(backend), dict[Any, int]()
    for text in options.variants.split(";"):
        given = parsed(text)
        of_shape = {k: given.pop(k) for k in ("piece", "widest") if k in given}
        if "early" in given:
            given["early"] = bool(given["early"])
        shape = shape_of(name, kind, backend.gpu.multiprocessors, options, **of_shape)
        if shape.unsuited():
            print(f"{name} {kind} {text}: {shape.unsuited()}")
            continue
        geometry = tuple([(p.box_rows, p.boxes) for p in (*shape.parts, shape.head)])
        if geometry not in known:
            known[geometry] = table_of(memory, shape, kind, options.position, 0)
        kernel = PersistentDecode(shape, **given)
        seconds = timed(backend, kernel, known[geometry], 4 if options.quick else 20)
        rate = weight_bytes(shape, kind) / seconds / 1e9
        print(
            f"{name} {kind} {text or 'as it is'}: {seconds * 1e6:.1f} us, {1 / seconds:.0f} "
            f"tokens/s, {rate:.0f} GB/s, {shape.slots} slots of {shape.slot_bytes}",
            flush=True,
        )
    del memory, known
    if options.stages:
        shape = shape_of(name, kind, backend.gpu.multiprocessors, options)
        stages(backend, shape, kind, options.position)


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments("gpu_decode", str(__doc__).splitlines()[0])
    parser.add_argument("--shapes", default="0.6b", help="of 0.6b, 1.7b, 8b, by commas")
    parser.add_argument(
        "--types", default="BF16,Q8_0,Q4_K,Q4_K_M", help="types of weights or presets, by commas"
    )
    parser.add_argument("--variants", default="", help="settings, by semicolons")
    parser.add_argument("--position", type=int, default=512)
    parser.add_argument("--layers", type=int, default=None, help="fewer than the shape has")
    parser.add_argument("--vocab", type=int, default=None, help="rows of the head")
    parser.add_argument("--stages", action="store_true", help="clocks between the stages")
    options = parser.parse_args(argv)
    import rlx
    from rlx.backends.registry import Device

    if "cuda" not in rlx.available_devices():
        print("bench gpu_decode: there is no GPU here")
        return 0
    for name in options.shapes.split(","):
        for kind in options.types.split(","):
            measure(Device("cuda").backend, name, kind, options)
    return 0
