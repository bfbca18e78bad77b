"""The persistent decode kernel, simulated: all blocks together, and one at a time in any order."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
from fake_driver import FakeDriver, installed, make_stand_in
from simulator import run_in_turns, run_kernel

import rlx
from bench.gpu import Letters, prompt
from bench.random_model import SHAPES as SHAPES_OF_MODELS
from bench.random_model import random_blocks, write_random_model
from rlx.backends import registry
from rlx.backends.cuda import lower_program
from rlx.backends.cuda.backend import CudaBackend
from rlx.backends.cuda.builder import target_for
from rlx.backends.cuda.kernels.persistent.decode_kernel import PersistentDecode
from rlx.backends.cuda.kernels.persistent.layer_args import KEYS, OTHER_DOWN, OTHER_V, VALUES
from rlx.backends.cuda.kernels.persistent.plan import persist
from rlx.backends.cuda.kernels.persistent.shape import DenseShape, Part
from rlx.backends.cuda.kernels.qgemm.row_planes import decoded, split_blocks
from rlx.backends.cuda.lowering import lower_graph
from rlx.backends.cuda.ptx import GpuModule
from rlx.ir.graph import Graph
from rlx.ir.quant.scheme import GGUF_SCHEMES
from rlx.llvm.jit import Unit
from rlx.models.model_file import ModelFile
from rlx.runtime.template import make_template
from rlx.specialize.options import CompileOptions

# held in registers while values are awaited; slot by slot; without norms of heads
SMALL = DenseShape(3, 512, 4, 2, 128, 512, 160, 192, 8, 1e-6, 1e-5, 0.09, True)
LARGE = DenseShape(2, 1024, 4, 1, 128, 1024, 64, 512, 4, 1e-6, 1e-5, 0.09, False)
WIDE = DenseShape(1, 512, 2, 1, 128, 1536, 64, 128, 8, 1e-6, 1e-5, 0.09, True, "bf16")


def packed(shape: DenseShape, scheme: str) -> DenseShape:
    return replace(shape, schemes=(scheme,) * 5)


def mixed(shape: DenseShape, scheme: str, v: str, down: str) -> DenseShape:
    """With v and down of other types in some layers, and the head of that of down."""
    return replace(packed(shape, scheme), schemes=(*(scheme,) * 4, down), others=(v, down))


class Divided(DenseShape):
    """Two blocks share the columns of a row of the FFN's last product, as in large grids: a block
    then waits for half of the others only."""

    splits = 2  # type: ignore[assignment]


DIVIDED = Divided(2, 512, 2, 1, 128, 1024, 64, 128, 8, 1e-6, 1e-5, 0.09, True)


class Memory:
    """Arrays that a kernel may use."""

    def __init__(self) -> None:
        self.arrays: list[Any] = []

    def put(self, array: Any) -> int:
        raw = np.zeros(array.nbytes + 64, np.uint8)
        start = -raw.ctypes.data % 64
        view = raw[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
        view[...] = array
        self.arrays.append(view)
        return int(view.ctypes.data)

    def inside(self, addresses: Any, size: int) -> None:
        starts = np.array([a.ctypes.data for a in self.arrays])
        order = np.argsort(starts)
        ends = np.array([a.ctypes.data + a.nbytes for a in self.arrays])[order]
        number = np.searchsorted(starts[order], addresses, side="right") - 1
        assert (number >= 0).all() and (addresses + size <= ends[number]).all(), "outside"


class Layer(NamedTuple):
    matrices: list[Any]  # q k v (or q k), out, gate, up, down
    v: Any  # of a type of its own
    rest: list[Any]  # gains and the KV cache
    kinds: int


class Model:
    """A random model, its args and what its layers should give."""

    def __init__(self, shape: DenseShape, seed: int = 0) -> None:
        self.shape, self.memory = shape, Memory()
        self.rng = np.random.default_rng(seed)
        s, kv = shape, ml_dtypes.bfloat16 if shape.kv_name == "bf16" else np.float16
        angles = self.rng.random((s.context, s.head_dim // 2)).astype(np.float32)
        self.cos, self.sin = np.cos(angles), np.sin(angles)
        self.layers = [self._layer(kv, i) for i in range(s.layers)]
        self.gain, self.head = self._gain(s.hidden), self._matrix(s.vocab, s.hidden, s.schemes[4])
        self.x = self.rng.normal(size=s.hidden).astype(np.float32)
        place = self.memory.put
        first = [place(self.x), place(np.zeros(s.vocab, np.float32)), place(self.gain)]
        head, *beside = self._maps(self.head, s.head)
        first += [head, place(self.cos), place(self.sin)]
        rest: list[int] = []
        for layer in self.layers:
            for a, part in zip(self._matrices(layer), s.parts, strict=True):
                rest += self._maps(a, part)
            rest += [*[place(a) for a in layer.rest], layer.kinds]
        self.logits, self._x = self.memory.arrays[1], self.memory.arrays[0]
        exchange = place(np.zeros(s.words, np.int32))
        self.exchange = self.memory.arrays[-1]
        self.args = np.array([*first, 0, exchange, *[0] * 5, *beside, *rest], np.int64)
        self.table = place(self.args)
        self.table_array = self.memory.arrays[-1]
        self.caches = [(self._of(i, KEYS), self._of(i, VALUES)) for i in range(s.layers)]

    def _of(self, layer: int, i: int) -> Any:
        s = self.shape
        at = s.fixed_args + s.layer_args * layer + s.maps + i
        return next(a for a in self.memory.arrays if a.ctypes.data == self.args[at])

    def _matrices(self, layer: Layer) -> list[Any]:
        """Those of the shape's parts; where there is none of a type, another in its place."""
        qkv, *_, down = layer.matrices
        others = [qkv if layer.v is None else layer.v] if self.shape.others[0] else []
        return [*layer.matrices, *others, *([down] if self.shape.others[1] else [])]

    def _maps(self, matrix: Any, part: Part) -> list[int]:
        """Tensor maps as the fake driver writes them."""
        rows, columns = matrix.shape
        if part.scheme:
            columns //= 2
        start = self.memory.put(matrix)
        widths = [64, *(part.side_bytes(i) // 2 for i in range(len(part.weights.sides)))]
        maps = [
            [start, rows, columns, 2 * columns, part.box_rows, width, i == 0]
            for i, width in enumerate(widths)
        ]
        return [self.memory.put(np.array(numbers + [0] * 9, np.int64)) for numbers in maps]

    def _vary_scales(self, blocks: Any, scheme: str) -> None:
        """Blocks get scales of their own, from a half to the whole."""
        size = GGUF_SCHEMES[scheme].bytes_per_block
        flat = blocks.reshape(-1, size)
        factors = self.rng.uniform(0.5, 1.0, len(flat))
        for at in {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}.get(scheme, (0,)):
            scales = flat[:, at : at + 2].copy().view(np.float16)
            scales[:, 0] = scales[:, 0] * factors
            flat[:, at : at + 2] = scales.view(np.uint8)

    def _gain(self, n: int) -> Any:
        return (1 + 0.1 * self.rng.normal(size=n)).astype(np.float32)

    def _matrix(self, n: int, k: int, scheme: str) -> Any:
        if scheme:
            blocks = random_blocks(self.rng, GGUF_SCHEMES[scheme], n, k)
            self._vary_scales(blocks, scheme)
            return split_blocks(scheme, blocks)
        return (self.rng.normal(size=(n, k)) / np.sqrt(k)).astype(ml_dtypes.bfloat16)

    def _layer(self, kv: Any, number: int) -> Layer:
        """The first, third … layer has what others have of another type."""
        s = self.shape
        v, down = s.others if number % 2 == 0 else ("", "")
        cache = [
            self.rng.normal(size=(s.kv_heads, s.context, s.head_dim)).astype(kv) for _ in range(2)
        ]
        heads = s.heads * s.head_dim
        matrices = [
            self._matrix(s.qk_rows if v else s.qkv_rows, s.hidden, s.schemes[0]),
            self._matrix(s.hidden, heads, s.schemes[1]),
            self._matrix(s.ffn, s.hidden, s.schemes[2]),
            self._matrix(s.ffn, s.hidden, s.schemes[2]),
            self._matrix(s.hidden, s.ffn, down or s.schemes[3]),
        ]
        other = self._matrix(s.qkv_rows - s.qk_rows, s.hidden, v) if v else None
        gains = [self._gain(n) for n in (s.hidden, s.hidden, s.head_dim, s.head_dim)]
        kinds = OTHER_V * bool(v) | OTHER_DOWN * bool(down)
        return Layer(matrices, other, [*gains, *cache], kinds)

    def expected(self, position: int) -> Any:
        """Logits, in f64, from the caches as they are; these get the new keys and values."""
        s = self.shape
        x = self._x.astype(np.float64)
        for number, layer in enumerate(self.layers):
            parts = list(s.parts[:5])
            if layer.kinds & OTHER_DOWN:
                parts[4] = s.parts[-1]
            pairs = zip(layer.matrices, parts, strict=True)
            qkv, out, gate, up, down = (self._floats(a, part) for a, part in pairs)
            if layer.v is not None:
                qkv = np.concatenate([qkv, self._floats(layer.v, s.parts[5])])
            gain, second, q_gain, k_gain, _, _ = (np.asarray(a, np.float64) for a in layer.rest)
            rows = qkv @ (_norm(x, s.eps) * gain)
            q, k, v = np.split(rows.reshape(-1, s.head_dim), [s.heads, s.heads + s.kv_heads])
            if s.has_head_norms:
                q, k = _norm(q, s.head_eps) * q_gain, _norm(k, s.head_eps) * k_gain
            q, k = self._rotated(q, position), self._rotated(k, position)
            keys, values = (np.array(c) for c in self.caches[number])
            keys[:, position], values[:, position] = k.astype(keys.dtype), v.astype(keys.dtype)
            self.new = keys[:, position], values[:, position]
            keys, values = (np.asarray(c, np.float64)[:, : position + 1] for c in (keys, values))
            keys, values = (np.repeat(c, s.group, 0) for c in (keys, values))
            scores = np.einsum("hd,hpd->hp", q, keys) * s.scale
            weights = np.exp(scores - scores.max(1, keepdims=True))
            weights /= weights.sum(1, keepdims=True)
            x = x + out @ np.einsum("hp,hpd->hd", weights, values).reshape(-1)
            normed = _norm(x, s.eps) * second
            g = gate @ normed
            x = x + down @ (g / (1 + np.exp(-g)) * (up @ normed))
        return self._floats(self.head, s.head) @ (_norm(x, s.eps) * self.gain)

    def _floats(self, matrix: Any, part: Part) -> Any:
        if part.scheme:
            matrix = decoded(part.scheme, matrix, part.whole)
        return np.asarray(matrix, np.float64)

    def _rotated(self, heads: Any, position: int) -> Any:
        low, high = np.split(heads, 2, axis=1)
        c, s = self.cos[position].astype(np.float64), self.sin[position].astype(np.float64)
        return np.concatenate([low * c - high * s, high * c + low * s], axis=1)

    def embed(self, table: Any, token: Any, status: Any) -> None:
        """Take rows of a table for x: 5 is the number of an error."""
        memory = self.memory
        memory.arrays += [token, status]
        self.table_array[0] = token.ctypes.data
        self.table_array[9:13] = memory.put(table), status.ctypes.data, 5, len(table)

    def run(
        self, position: int, seed: int | None = None, early: bool = False, table: str | None = None
    ) -> Any:
        """With a type of an embedding, x is a row of that."""
        self.table_array[6] = position
        self.logits[...] = np.nan
        embeds = table is not None
        kernel = PersistentDecode(self.shape, early=early, embeds=embeds, table=table or "")
        blocks = self.shape.blocks
        if seed is None:
            run_kernel(kernel, blocks, self.table, self.memory.inside)
        else:
            run_in_turns(kernel, blocks, self.table, self.memory.inside, seed)
        return self.logits.copy()


def _norm(x: Any, eps: float) -> Any:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)


def _require_close(got: Any, want: Any) -> None:
    """Tags take the two lowest bits of what is handed over, an error of 2⁻²²; keys and values may
    round to a neighbour in f16 (2⁻¹¹) where they lie between two."""
    assert np.linalg.norm(got - want) < 2e-4 * np.linalg.norm(want)


# eight columns of x for each thread: some of them are laid aside while it attends
LONG = DenseShape(1, 4096, 4, 1, 128, 512, 32, 128, 8, 1e-6, 1e-5, 0.09, True)

# 48 rows of q k v in each of 16 blocks: the last third of the eleventh is v
UNEVEN = DenseShape(2, 1024, 4, 1, 128, 512, 32, 128, 16, 1e-6, 1e-5, 0.09, True)

SHAPES = {
    "small": (SMALL, (0, 31, 65)),
    "large": (LARGE, (64, 511)),
    "wide": (WIDE, (1, 127)),
    "pieces of 64": (replace(WIDE, piece=64), (0, 63, 64, 127)),
    "divided": (DIVIDED, (5, 6)),
    "long": (LONG, (5,)),
    "Q4_K, long": (packed(LONG, "Q4_K"), (5,)),
    "Q8_0": (packed(SMALL, "Q8_0"), (0, 65)),
    "Q4_K": (packed(SMALL, "Q4_K"), (0, 65)),
    "Q6_K": (packed(SMALL, "Q6_K"), (65,)),
    "Q5_K": (packed(SMALL, "Q5_K"), (65,)),
    "Q4_0": (packed(SMALL, "Q4_0"), (65,)),
    "Q6_K, slot by slot": (packed(LARGE, "Q6_K"), (64,)),
    "Q5_K, slot by slot": (packed(LARGE, "Q5_K"), (64,)),
    "Q4_0, slot by slot": (packed(LARGE, "Q4_0"), (64,)),
    "several types": (
        replace(SMALL, schemes=("Q4_K", "Q5_K", "Q4_0", "Q6_K", "Q6_K")),
        (65,),
    ),
    "Q6_K in some layers": (mixed(SMALL, "Q4_K", "Q6_K", "Q6_K"), (65,)),
    "Q6_K in some, slot by slot": (mixed(LARGE, "Q4_K", "Q6_K", "Q5_K"), (64,)),
    "a block with q, k and v": (mixed(UNEVEN, "Q4_K", "Q6_K", "Q6_K"), (5,)),
    "scales of 128 bytes": (mixed(replace(UNEVEN, hidden=4096), "Q4_K", "Q6_K", "Q6_K"), (5,)),
    "Q8_0, slot by slot": (packed(LARGE, "Q8_0"), (64,)),
    "Q4_K, slot by slot": (packed(LARGE, "Q4_K"), (64,)),
}


@pytest.mark.parametrize(("shape", "positions"), SHAPES.values(), ids=SHAPES)
def test_a_token_is_that_of_the_reference(shape: DenseShape, positions: tuple[int, ...]) -> None:
    """Positions in the first piece, at its edges, and in later ones; one launch after the other."""
    assert shape.unsuited() == ""
    model = Model(shape)
    for position in positions:
        want = model.expected(position)
        _require_close(model.run(position), want)


@pytest.mark.parametrize("scheme", ["", "Q8_0", "Q4_0", "Q4_K", "Q5_K", "Q6_K"])
@pytest.mark.parametrize("hidden", [512, 2048])  # kept in registers, or read again
def test_a_token_begins_with_its_row_of_the_embedding(scheme: str, hidden: int) -> None:
    """And one outside of the embedding is reported."""
    model = Model(replace(packed(SMALL, "Q8_0") if scheme else SMALL, layers=1, hidden=hidden))
    table = model._matrix(40, hidden, scheme)
    floats = decoded(scheme, table, hidden) if scheme else np.asarray(table, np.float32)
    token, status = (np.array([n], np.int64) for n in (33, 0))
    model.embed(table, token, status)
    for i in (33, 0):
        token[:], model._x[:] = i, floats[i]
        want = model.expected(7)
        _require_close(model.run(7, table=scheme), want)
    assert status[0] == 0
    token[:] = 40
    model.run(7, table=scheme)
    assert status[0] == 5


@pytest.mark.parametrize(
    ("shape", "early"),
    [(replace(SMALL, layers=2), False), (DIVIDED, True)],
    ids=["small", "divided"],
)
def test_blocks_in_any_order_give_the_same(shape: DenseShape, early: bool) -> None:
    """Blocks run one at a time, and what they hand over becomes visible in any order: the results
    of two launches are the bits of all blocks together."""
    together, apart = Model(shape), Model(shape)
    for position, seed in ((65, 0), (66, 1)):
        want = together.run(position)
        np.testing.assert_array_equal(apart.run(position, seed=seed, early=early), want)
    for a, b in zip(together.caches, apart.caches, strict=True):
        np.testing.assert_array_equal(np.array(a).view(np.int16), np.array(b).view(np.int16))


def test_a_value_that_is_no_number_stays_one() -> None:
    """Sums in fixed point have no NaN of their own."""
    model = Model(SMALL)
    model._x[3] = np.nan
    assert np.isnan(model.run(5)).all()
    model._x[3] = 1.0
    _require_close(model.run(5), model.expected(5))


SMALLEST = DenseShape(28, 1024, 16, 8, 128, 3072, 151936, 4096, 16, 1e-6, 1e-6, 128**-0.5, True)
LARGEST = replace(SMALLEST, layers=36, hidden=4096, heads=32, ffn=12288)


@pytest.mark.skipif(shutil.which("ptxas") is None, reason="ptxas is not installed")
@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(SMALLEST, id="0.6B"),
        pytest.param(packed(SMALLEST, "Q8_0"), id="0.6B Q8_0"),
        pytest.param(packed(SMALLEST, "Q4_K"), id="0.6B Q4_K"),
        pytest.param(LARGEST, id="8B"),
        pytest.param(packed(LARGEST, "Q4_K"), id="8B Q4_K"),
        pytest.param(mixed(SMALLEST, "Q4_K", "Q6_K", "Q6_K"), id="0.6B Q4_K_M"),
        pytest.param(mixed(LARGEST, "Q4_K", "Q6_K", "Q6_K"), id="8B Q4_K_M"),
        pytest.param(mixed(SMALLEST, "Q5_K", "Q6_K", "Q6_K"), id="0.6B Q5_K_M"),
        pytest.param(mixed(LARGEST, "Q5_K", "Q6_K", "Q6_K"), id="8B Q5_K_M"),
        pytest.param(packed(LARGEST, "Q6_K"), id="8B Q6_K"),
    ],
)
def test_the_kernel_does_not_spill(shape: DenseShape) -> None:
    """Of the shapes of Qwen3-0.6B and 8B."""
    module = GpuModule(target_for((9, 0)))
    PersistentDecode(shape, embeds=True, table=shape.schemes[4]).emit(module)
    ptx = Unit(module.text(), module.target).assembly()
    done = subprocess.run(
        ["ptxas", "-arch=sm_90a", "-v", "-o", "/dev/null", "-"],
        input=ptx, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "0 bytes stack frame, 0 bytes spill stores" in done.stderr


@pytest.fixture
def backend() -> Iterator[CudaBackend]:
    with installed(FakeDriver()):
        yield make_stand_in()


def test_the_reason_is_said_where_there_is_no_kernel(backend: CudaBackend) -> None:
    g = Graph("check")
    g.set_outputs(g.relu(g.input("x", [4])))
    template = make_template(g, CompileOptions(), backend)
    plan = template.plan({})
    launches = lower_graph(plan)
    for cpu, wish, reason in (
        ("sm_90a", "0", "RLX_PERSISTENT is 0"),
        ("sm_80", "1", "sm_80 has no copy engine that the kernel knows"),
        ("sm_90a", "1", "there is no attention"),
    ):
        assert persist(launches, plan, cpu, 132, wish) == (launches, reason)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"hidden": 1280}, "hidden size"),
        ({"head_dim": 64, "heads": 32}, "64 numbers"),
        ({"context": 100}, "a context of 100"),
        ({"ranks": 12}, "no power of two"),
        ({"ffn": 9728, "hidden": 2560}, "152 rows of 2560 of gate_up"),
        ({"layers": 2000}, "fit into shared memory"),
        ({"schemes": ("Q8_0", "Q8_0", "", "Q8_0", "Q8_0")}, "some weights are packed"),
    ],
)
def test_shapes_that_do_not_suit_are_refused(change: dict[str, int], reason: str) -> None:
    shape = DenseShape(28, 1024, 16, 8, 128, 3072, 151936, 4096, 16, 1e-6, 1e-6, 0.09, True)
    assert shape.unsuited() == ""
    assert reason in replace(shape, **change).unsuited()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["BF16", "Q4_K", "Q4_K_M"])
def test_a_model_gives_the_same_tokens(
    kind: str, backend: CudaBackend, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Through `generate`, with sampling: the graph of launches and the persistent kernel."""
    monkeypatch.setitem(registry._backends, "cuda", backend)
    monkeypatch.setattr(ModelFile, "tokenizer", lambda self: Letters())
    monkeypatch.setenv("RLX_CACHE", "0")  # programs of an earlier run would not be made
    monkeypatch.setitem(SHAPES_OF_MODELS, "tiny", (512, 1, 4, 2, 128, 1024, 1024, True))
    path = tmp_path / "model.gguf"
    write_random_model(path, "tiny", kind)
    found, reasons = [], []

    def recorded(*given: Any) -> Any:
        made, reason = persist(*given)
        reasons.append(reason)
        return made, reason

    monkeypatch.setattr(lower_program, "persist", recorded)
    for wish in ("0", "1"):
        monkeypatch.setenv("RLX_PERSISTENT", wish)
        model = rlx.load(path, device="cuda", context=512)
        made = model.generate(prompt(5, 0), stream=False, max_tokens=4, seed=0)
        found.append(list(made.tokens))
        assert ("" in reasons) == (wish == "1"), reasons
        model.close()
    assert found[0] == found[1]
