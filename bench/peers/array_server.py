"""NumPy, JAX and torch behind a pipe, for `bench arrays`: one process, 2 threads each.

Commands: {"do": "prepare", "row": name, "peer": name, "save": file}, {"do": "time", "row": name,
"peer": name, "samples": n, "calls": n, "cpu": bool}, {"do": "new_shapes", "peer": name}. Peers:
numpy, jax (jitted), torch, torch.compile.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

THREADS = int(sys.argv[1])
os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = str(THREADS)

import array_functions as rows  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402

torch.set_num_threads(THREADS)
torch.set_grad_enabled(False)
if os.environ.get("BENCH_PEER_ISA") == "avx2":
    import torch._inductor.config

    torch._inductor.config.cpp.simdlen = 256


# -- NumPy ----------------------------------------------------------------------------------------


def numpy_kmeans(points: Any, centroids: Any) -> Any:
    ids = rows.nearest(np, points, centroids)
    counts = np.bincount(ids, minlength=len(centroids))
    sums = [np.bincount(ids, column, len(centroids)) for column in points.T]
    return (np.stack(sums, 1) / np.maximum(counts, 1)[:, None]).astype(np.float32)


def numpy_conv(x: Any, w: Any) -> Any:
    padded = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), (2, 3))
    return np.einsum("nchwij,ocij->nohw", windows, w, optimize=True)


# -- JAX ------------------------------------------------------------------------------------------


def jax_softmax(x: Any) -> Any:
    return jax.nn.softmax(x)


def jax_kmeans(points: Any, centroids: Any) -> Any:
    ids = rows.nearest(jnp, points, centroids)
    chosen = jax.nn.one_hot(ids, len(centroids), dtype=points.dtype)
    return chosen.T @ points / jnp.maximum(chosen.sum(0), 1.0)[:, None]


def jax_conv(x: Any, w: Any) -> Any:
    return jax.lax.conv(x, w, (1, 1), "SAME")


# -- torch ----------------------------------------------------------------------------------------


def torch_layer_norm(x: Any, gain: Any, bias: Any) -> Any:
    return F.layer_norm(x, (x.shape[-1],), gain, bias)


def torch_mlp(x: Any, w1: Any, b1: Any, w2: Any, b2: Any) -> Any:
    return torch.addmm(b2, torch.relu(torch.addmm(b1, x, w1)), w2)


def torch_kmeans(points: Any, centroids: Any) -> Any:
    distances = (centroids * centroids).sum(1) - 2.0 * (points @ centroids.T)
    ids = distances.argmin(1)
    sums = torch.zeros_like(centroids).index_add_(0, ids, points)
    counts = torch.bincount(ids, minlength=len(centroids))
    return sums / counts.clamp(min=1)[:, None]


_PLAIN: dict[str, Callable[..., Any]] = {
    "chain_5": rows.chain_5, "chain_20": rows.chain_20, "sum": rows.total,
    "softmax": rows.softmax, "layer_norm": rows.layer_norm, "mlp": rows.mlp,
    "attention": rows.attention,
}  # fmt: skip


def _torch_chain(function: Callable[..., Any]) -> Callable[..., Any]:
    class Names:
        tanh, maximum = torch.tanh, staticmethod(lambda x, low: torch.clamp(x, min=low))

    return lambda x, y: function(Names, x, y)


def _functions(peer: str) -> dict[str, Callable[..., Any]]:
    """The functions of a library, before it compiles them."""
    if peer == "numpy":
        plain = {name: functools.partial(f, np) for name, f in _PLAIN.items()}
        return {**plain, "kmeans": numpy_kmeans, "conv": numpy_conv, "tiny": rows.tiny}
    if peer == "jax":
        plain = {name: functools.partial(f, jnp) for name, f in _PLAIN.items()}
        own = {"softmax": jax_softmax, "kmeans": jax_kmeans, "conv": jax_conv, "tiny": rows.tiny}
        return {**plain, **own}
    return {
        "chain_5": _torch_chain(rows.chain_5),
        "chain_20": _torch_chain(rows.chain_20),
        "sum": torch.sum,
        "softmax": lambda x: torch.softmax(x, -1),
        "layer_norm": torch_layer_norm,
        "mlp": torch_mlp,
        "attention": F.scaled_dot_product_attention,
        "kmeans": torch_kmeans,
        "conv": lambda x, w: F.conv2d(x, w, padding=1),
        "tiny": rows.tiny,
    }


def _compiled(peer: str, function: Callable[..., Any]) -> Callable[..., Any]:
    if peer == "jax":
        return jax.jit(function)
    return torch.compile(function) if peer == "torch.compile" else function


def _array(peer: str, data: Any) -> Any:
    if peer == "numpy":
        return data
    return jnp.asarray(data) if peer == "jax" else torch.tensor(data)


def _wait(result: Any) -> Any:
    return result.block_until_ready() if hasattr(result, "block_until_ready") else result


class Server:
    def __init__(self) -> None:
        self._arguments: tuple[str, list[Any]] = ("", [])
        self._ready: dict[tuple[str, str], tuple[Callable[..., Any], list[Any]]] = {}

    def prepare(self, row: str, peer: str, save: str) -> dict[str, Any]:
        """Compile and run once; the result goes to a file."""
        if self._arguments[0] != row:  # one row at a time: its arguments are large
            self._arguments = row, rows.arguments(row)
            self._ready.clear()
        function = _compiled(peer, _functions(peer)[row])
        given = [_array(peer, x) for x in self._arguments[1]]
        self._ready[row, peer] = function, given
        np.save(save, np.asarray(_wait(function(*given))))
        return {"ready": True}

    def time(self, row: str, peer: str, samples: int, calls: int, cpu: bool) -> dict[str, Any]:
        """Seconds a call, until its result is there: samples of so many calls each. `cpu`: those
        that all threads worked."""
        function, given = self._ready[row, peer]
        clock = time.process_time if cpu else time.perf_counter
        found = []
        for _ in range(samples):
            start = clock()
            for _ in range(calls - 1):
                function(*given)
            _wait(function(*given))
            found.append((clock() - start) / calls)
        return {"seconds": found}

    def new_shapes(self, peer: str) -> dict[str, Any]:
        """Seconds of the first call with each of the new shapes, after calls with another."""
        function = _compiled(peer, _functions(peer)["mlp"])
        given = [_array(peer, x) for x in rows.mlp_arguments(32)]
        for _ in range(3):
            _wait(function(*given))
        seconds = []
        for n in rows.NEW_SHAPES:
            given[0] = _array(peer, rows.mlp_arguments(n)[0])
            start = time.perf_counter()
            _wait(function(*given))
            seconds.append(time.perf_counter() - start)
        return {"seconds": seconds}


def main() -> None:
    versions = {"numpy": np.__version__, "jax": jax.__version__, "torch": torch.__version__}
    print(json.dumps({"ready": True, "versions": versions}), flush=True)
    server = Server()
    for line in sys.stdin:
        command = json.loads(line)
        print(json.dumps(getattr(server, command.pop("do"))(**command)), flush=True)


if __name__ == "__main__":
    main()
