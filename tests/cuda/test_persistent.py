"""The persistent decode kernel, simulated: all blocks together, and one at a time in any order."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
from fake_driver import FakeDriver, installed, make_stand_in
from simulator import run_in_turns, run_kernel

import rlx
from bench.gpu import Letters, prompt
from bench.random_model import SHAPES as SHAPES_OF_MODELS
from bench.random_model import write_random_model
from rlx.backends import registry
from rlx.backends.cuda import lower_program
from rlx.backends.cuda.backend import CudaBackend
from rlx.backends.cuda.builder import target_for
from rlx.backends.cuda.kernels.persistent.decode_kernel import PersistentDecode
from rlx.backends.cuda.kernels.persistent.plan import persist
from rlx.backends.cuda.kernels.persistent.shape import DenseShape
from rlx.backends.cuda.lowering import lower_graph
from rlx.backends.cuda.ptx import GpuModule
from rlx.ir.graph import Graph
from rlx.llvm.jit import Unit
from rlx.models.model_file import ModelFile
from rlx.runtime.template import make_template
from rlx.specialize.options import CompileOptions

# held in registers while values are awaited; slot by slot; without norms of heads
SMALL = DenseShape(3, 512, 4, 2, 128, 512, 160, 192, 8, 1e-6, 1e-5, 0.09, True)
LARGE = DenseShape(2, 1024, 4, 1, 128, 1024, 64, 512, 4, 1e-6, 1e-5, 0.09, False)
WIDE = DenseShape(1, 512, 2, 1, 128, 1536, 64, 128, 8, 1e-6, 1e-5, 0.09, True, "bf16")


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


class Model:
    """A random model, its args and what its layers should give."""

    def __init__(self, shape: DenseShape, seed: int = 0) -> None:
        self.shape, self.memory = shape, Memory()
        self.rng = np.random.default_rng(seed)
        s, kv = shape, ml_dtypes.bfloat16 if shape.kv_name == "bf16" else np.float16
        angles = self.rng.random((s.context, s.head_dim // 2)).astype(np.float32)
        self.cos, self.sin = np.cos(angles), np.sin(angles)
        self.layers = [self._layer(kv) for _ in range(s.layers)]
        self.gain, self.head = self._gain(s.hidden), self._matrix(s.vocab, s.hidden)
        self.x = self.rng.normal(size=s.hidden).astype(np.float32)
        place = self.memory.put
        first = [place(self.x), place(np.zeros(s.vocab, np.float32)), place(self.gain)]
        first += [self._map(self.head, s.head.box_rows), place(self.cos), place(self.sin)]
        boxes = [p.box_rows for p in (s.qkv, s.out, s.gate_up, s.gate_up, s.down)]
        rest = [
            self._map(a, boxes[i]) if i < len(boxes) else place(a)
            for layer in self.layers
            for i, a in enumerate(layer)
        ]
        self.logits, self._x = self.memory.arrays[1], self.memory.arrays[0]
        exchange = place(np.zeros(s.words, np.int32))
        self.exchange = self.memory.arrays[-1]
        self.args = np.array([*first, 0, exchange, *[0] * 5, *rest], np.int64)
        self.table = place(self.args)
        self.table_array = self.memory.arrays[-1]
        self.caches = [(self._of(layer, 9), self._of(layer, 10)) for layer in range(s.layers)]

    def _of(self, layer: int, i: int) -> Any:
        return next(
            a for a in self.memory.arrays if a.ctypes.data == self.args[13 + 11 * layer + i]
        )

    def _map(self, matrix: Any, box: int) -> int:
        """A tensor map as the fake driver writes it."""
        rows, columns = matrix.shape
        numbers = [self.memory.put(matrix), rows, columns, 2 * columns, box]
        return self.memory.put(np.array(numbers + [0] * 11, np.int64))

    def _gain(self, n: int) -> Any:
        return (1 + 0.1 * self.rng.normal(size=n)).astype(np.float32)

    def _matrix(self, n: int, k: int) -> Any:
        return (self.rng.normal(size=(n, k)) / np.sqrt(k)).astype(ml_dtypes.bfloat16)

    def _layer(self, kv: Any) -> list[Any]:
        s = self.shape
        cache = [
            self.rng.normal(size=(s.kv_heads, s.context, s.head_dim)).astype(kv) for _ in range(2)
        ]
        heads = s.heads * s.head_dim
        return [
            self._matrix(s.qkv_rows, s.hidden), self._matrix(s.hidden, heads),
            self._matrix(s.ffn, s.hidden), self._matrix(s.ffn, s.hidden),
            self._matrix(s.hidden, s.ffn), self._gain(s.hidden), self._gain(s.hidden),
            self._gain(s.head_dim), self._gain(s.head_dim), *cache,
        ]  # fmt: skip

    def expected(self, position: int) -> Any:
        """Logits, in f64, from the caches as they are; these get the new keys and values."""
        s = self.shape
        x = self._x.astype(np.float64)
        for number, layer in enumerate(self.layers):
            qkv, out, gate, up, down, gain, second, q_gain, k_gain, _, _ = (
                np.asarray(a, np.float64) for a in layer
            )
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
        return np.asarray(self.head, np.float64) @ (_norm(x, s.eps) * self.gain)

    def _rotated(self, heads: Any, position: int) -> Any:
        low, high = np.split(heads, 2, axis=1)
        c, s = self.cos[position].astype(np.float64), self.sin[position].astype(np.float64)
        return np.concatenate([low * c - high * s, high * c + low * s], axis=1)

    def run(self, position: int, seed: int | None = None, early: bool = False) -> Any:
        self.table_array[6] = position
        self.logits[...] = np.nan
        kernel, blocks = PersistentDecode(self.shape, early=early), self.shape.blocks
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


SHAPES = {
    "small": (SMALL, (0, 31, 65)),
    "large": (LARGE, (64, 511)),
    "wide": (WIDE, (1, 127)),
    "pieces of 64": (replace(WIDE, piece=64), (0, 63, 64, 127)),
    "divided": (DIVIDED, (5, 6)),
}


@pytest.mark.parametrize(("shape", "positions"), SHAPES.values(), ids=SHAPES)
def test_a_token_is_that_of_the_reference(shape: DenseShape, positions: tuple[int, ...]) -> None:
    """Positions in the first piece, at its edges, and in later ones; one launch after the other."""
    assert shape.unsuited() == ""
    model = Model(shape)
    for position in positions:
        want = model.expected(position)
        _require_close(model.run(position), want)


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


@pytest.mark.skipif(shutil.which("ptxas") is None, reason="ptxas is not installed")
def test_the_kernel_is_small_and_does_not_spill() -> None:
    """Of the shape of Qwen3-0.6B; its loop over layers should stay in the instruction cache."""
    shape = DenseShape(28, 1024, 16, 8, 128, 3072, 151936, 4096, 16, 1e-6, 1e-6, 128**-0.5, True)
    module = GpuModule(target_for((9, 0)))
    PersistentDecode(shape, embeds=True).emit(module)
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
        ({"hidden": 4096, "heads": 32, "ffn": 12288}, "fit into shared memory"),
    ],
)
def test_shapes_that_do_not_suit_are_refused(change: dict[str, int], reason: str) -> None:
    shape = DenseShape(28, 1024, 16, 8, 128, 3072, 151936, 4096, 16, 1e-6, 1e-6, 0.09, True)
    assert shape.unsuited() == ""
    assert reason in replace(shape, **change).unsuited()


@pytest.mark.slow
def test_a_model_gives_the_same_tokens(
    backend: CudaBackend, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Through `generate`, with sampling: the graph of launches and the persistent kernel."""
    monkeypatch.setitem(registry._backends, "cuda", backend)
    monkeypatch.setattr(ModelFile, "tokenizer", lambda self: Letters())
    monkeypatch.setenv("RLX_CACHE", "0")  # programs of an earlier run would not be made
    monkeypatch.setitem(SHAPES_OF_MODELS, "tiny", (512, 1, 4, 2, 128, 1024, 1024, True))
    path = tmp_path / "model.gguf"
    write_random_model(path, "tiny", "BF16")
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
