"""A million runs of a small program from four threads: results equal, memory flat."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading

import numpy as np
import pytest

import rlx

RUNS = 1_000_000
THREADS = 4


def _resident() -> int:
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGESIZE")


def soak() -> dict[str, list[int]]:
    """Which threads saw a wrong result, and how much memory was in use along the way."""
    g = rlx.Graph("small")
    g.set_outputs(g.tanh(g.matmul(g.input("x", [1, 16]), g.param("w", [16, 16]))))
    w = np.random.default_rng(0).standard_normal((16, 16), dtype=np.float32)
    wrong: list[int] = []
    sizes: list[int] = []
    ready = threading.Barrier(THREADS)

    def work(seed: int) -> None:
        f = rlx.Session("cpu").compile(g, {"threads": 1}).set_param("w", w)
        x = np.random.default_rng(seed).standard_normal((1, 16), dtype=np.float32)
        expected = f.run(x=x)[0].tobytes()
        out = f.slot(f.output_names[0])
        ready.wait()  # compiling takes memory too, and is not what is looked at
        for i in range(RUNS // THREADS):
            f.run_slots(x)
            if i % 1000 == 0 and out.tobytes() != expected:
                wrong.append(seed)
            if seed == 0 and i % 5_000 == 1:
                sizes.append(_resident())

    threads = [threading.Thread(target=work, args=(i,)) for i in range(THREADS)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return {"wrong": wrong, "sizes": sizes}


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="reads memory from /proc")
def test_a_million_runs_from_four_threads() -> None:
    # in a process of its own, where the C library keeps one heap: what other tests left behind,
    # and heaps that each thread fills for a while, come and go by megabytes
    done = subprocess.run(
        [sys.executable, __file__],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"MALLOC_ARENA_MAX": "1"},
    )
    found = json.loads(done.stdout)
    assert found["wrong"] == []
    sizes = found["sizes"]
    assert len(sizes) == RUNS // THREADS // 5_000
    # 16 bytes kept per run would add 6 MB between the second third of the runs and the last
    third = len(sizes) // 3
    grown = np.median(sizes[-third:]) - np.median(sizes[third : 2 * third])
    assert grown < 1 << 20, sizes


if __name__ == "__main__":
    print(json.dumps(soak()))
