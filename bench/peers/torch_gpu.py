"""torch on the same GPU: products, attention, and a Qwen3 of the same shape, compiled by it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from bench.random_model import SHAPES

_REPEAT = 10


def load() -> Any:
    """The module, or None where it is not installed or sees no GPU."""
    try:
        import torch
    except ImportError:
        return None
    return torch if torch.cuda.is_available() else None


def graph_of(torch: Any, run: Callable[[], Any], calls: int) -> Callable[[], float]:
    """A function that replays a CUDA graph of `calls` calls and gives the seconds of one."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            run()

    def timed() -> float:
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        for _ in range(_REPEAT):
            graph.replay()
        last.record()
        last.synchronize()
        return float(first.elapsed_time(last)) / 1e3 / calls / _REPEAT

    return timed


def bandwidth(torch: Any) -> float:
    """The most bytes a second, in GB, that torch moves: by a copy, read and written, or a sum."""
    a = torch.randn(1 << 30, device="cuda")
    b = torch.empty_like(a)
    rates = []
    for name, run, count in (
        ("copy", lambda: b.copy_(a), 2),
        ("sum", lambda: torch.sum(a), 1),
        ("maximum", lambda: torch.amax(a), 1),
    ):
        timed = graph_of(torch, run, 1)
        rates.append(count * 4.0 * a.numel() / min(timed() for _ in range(3)) / 1e9)
        print(f"bandwidth by torch's {name}: {rates[-1]:.0f} GB/s")
    return max(rates)


def attention_kinds(
    torch: Any, q: Any, k: Any, v: Any, calls: int
) -> Iterator[tuple[str, Callable[[], float]]]:
    """Causal attention by each library that torch can take for it."""
    from torch.nn.attention import SDPBackend, sdpa_kernel  # type: ignore[import-not-found]

    attend = torch.nn.functional.scaled_dot_product_attention
    kinds = {"flash": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}
    for name, kind in kinds.items():

        def run(kind: Any = kind) -> Any:
            with sdpa_kernel([kind]):
                return attend(q, k, v, is_causal=True, enable_gqa=True)

        try:
            yield name, graph_of(torch, run, calls)
        except RuntimeError as error:
            print(f"no attention by {name} here: {error}")


class Qwen3:
    """Random weights in bf16, a static KV cache, and what `torch.compile` makes of it."""

    def __init__(self, torch: Any, shape: str, context: int, device: str = "cuda") -> None:
        self.torch, self.device = torch, device
        self.hidden, self.layers, self.heads, self.kv, self.dim, ffn, vocab, tied = SHAPES[shape]

        def make(n: int, k: int) -> Any:
            return torch.randn(n, k, device=device, dtype=torch.bfloat16) * 0.02

        joined = (self.heads + 2 * self.kv) * self.dim
        self.weights = [
            (
                make(joined, self.hidden),
                make(self.hidden, self.heads * self.dim),
                make(2 * ffn, self.hidden),
                make(self.hidden, ffn),
            )
            for _ in range(self.layers)
        ]
        self.table = make(vocab, self.hidden)
        self.head = self.table if tied else make(vocab, self.hidden)
        # a tensor for each layer: an update of a part of one for all would copy the whole
        dims = (self.kv, context, self.dim)
        self.keys, self.values = (
            [torch.zeros(dims, device=device, dtype=torch.bfloat16) for _ in self.weights]
            for _ in range(2)
        )
        angle = torch.arange(context, device=device)[:, None] * 1e6 ** (
            -torch.arange(self.dim // 2, device=device) / (self.dim / 2)
        )
        self.cos, self.sin = angle.cos().bfloat16(), angle.sin().bfloat16()
        self.places = torch.arange(context, device=device)

    def _norm(self, x: Any) -> Any:
        scaled = x.float() * self.torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
        return scaled.to(x.dtype)

    def _rotated(self, x: Any, position: Any) -> Any:
        a, b = self._norm(x).chunk(2, -1)
        cos, sin = self.cos[position][:, None], self.sin[position][:, None]
        return self.torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def step(self, ids: Any, position: Any, attend: Callable[..., Any]) -> Any:
        """The likeliest next token after `ids` [n] at positions [n]."""
        functional = self.torch.nn.functional
        x, n = self.table[ids], ids.shape[0]
        seen = self.places[None, :] <= position[:, None]
        for i, (qkv, out, gate_up, down) in enumerate(self.weights):
            joined = functional.linear(self._norm(x), qkv).view(n, -1, self.dim)
            q, k, v = joined.split([self.heads, self.kv, self.kv], 1)
            q, k = self._rotated(q, position), self._rotated(k, position)
            self.keys[i].index_copy_(1, position, k.transpose(0, 1))
            self.values[i].index_copy_(1, position, v.transpose(0, 1))
            x = x + functional.linear(attend(q, i, seen), out)
            gate, up = functional.linear(self._norm(x), gate_up).chunk(2, -1)
            x = x + functional.linear(functional.silu(gate) * up, down)
        return functional.linear(self._norm(x[-1:]), self.head).argmax(-1)

    def _by_products(self, q: Any, layer: int, seen: Any) -> Any:
        """q [n, heads, dim] against the cache, the heads of a key head together."""
        n, group = q.shape[0], self.heads // self.kv
        rows = q.view(n, self.kv, group, self.dim).permute(1, 2, 0, 3)  # [kv, group, n, dim]
        rows = rows.reshape(self.kv, group * n, self.dim)
        scores = (rows @ self.keys[layer].transpose(1, 2)).float()
        scores = scores.view(self.kv, group, n, -1) * self.dim**-0.5
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1).to(q.dtype)
        h = weights.view(self.kv, group * n, -1) @ self.values[layer]
        return h.view(self.kv, group, n, self.dim).permute(2, 0, 1, 3).reshape(n, -1)

    def _by_sdpa(self, q: Any, layer: int, seen: Any) -> Any:
        """The same by torch's own attention."""
        attention = self.torch.nn.functional.scaled_dot_product_attention
        keys, values = self.keys[layer][None], self.values[layer][None]
        h = attention(q.transpose(0, 1)[None], keys, values, attn_mask=seen, enable_gqa=True)
        return h[0].transpose(0, 1).reshape(q.shape[0], -1)

    # -- a batch of sequences, a token of each -----------------------------------------------------

    def batch_step(self, ids: Any, position: Any) -> Any:
        """The likeliest next token of each of `ids` [n], all at one position [1]."""
        functional = self.torch.nn.functional
        x, n = self.table[ids], ids.shape[0]
        seen = (self.places <= position)[None, None, None, :]
        for i, (qkv, out, gate_up, down) in enumerate(self.weights):
            joined = functional.linear(self._norm(x), qkv).view(n, -1, self.dim)
            q, k, v = joined.split([self.heads, self.kv, self.kv], 1)
            q, k = self._rotated(q, position), self._rotated(k, position)
            keys, values = self.caches[i]
            keys.index_copy_(2, position, k[:, :, None])
            values.index_copy_(2, position, v[:, :, None])
            h = functional.scaled_dot_product_attention(
                q[:, :, None], keys, values, attn_mask=seen, enable_gqa=True
            )
            x = x + functional.linear(h.reshape(n, -1), out)
            gate, up = functional.linear(self._norm(x), gate_up).chunk(2, -1)
            x = x + functional.linear(functional.silu(gate) * up, down)
        return functional.linear(self._norm(x), self.head).argmax(-1)

    def timed_batch(self, count: int, position: int) -> Callable[[], float]:
        """A function that runs the compiled step of a batch in a CUDA graph."""
        torch = self.torch
        dims = (count, self.kv, self.places.shape[0], self.dim)
        self.caches = [
            tuple(torch.zeros(dims, device="cuda", dtype=torch.bfloat16) for _ in range(2))
            for _ in self.weights
        ]
        compiled = torch.compile(self.batch_step, dynamic=False)
        ids = torch.ones(count, device="cuda", dtype=torch.long)
        place = torch.full((1,), position, device="cuda", dtype=torch.long)
        with torch.no_grad():
            for _ in range(3):
                compiled(ids, place)
            return graph_of(torch, lambda: compiled(ids, place), 1)

    def timed_step(self, tokens: int, position: int) -> Callable[[], float]:
        """A function that runs the compiled step in a CUDA graph and gives its seconds: with the
        way to attend that is faster here."""
        found = [self._timed(way, tokens, position) for way in (self._by_products, self._by_sdpa)]
        return min(found, key=lambda timed: timed())

    def _timed(self, attend: Callable[..., Any], tokens: int, position: int) -> Callable[[], float]:
        torch = self.torch
        compiled = torch.compile(partial(self.step, attend=attend), dynamic=False)
        ids = torch.ones(tokens, device="cuda", dtype=torch.long)
        places = torch.arange(position, position + tokens, device="cuda")
        with torch.no_grad():
            for _ in range(3):
                compiled(ids, places)
            return graph_of(torch, lambda: compiled(ids, places), 1)
