"""torch behind a pipe, for small elementwise and row ops.

Commands: {"do": "time", "op": name, "rows": n, "width": k, "repeat": r}.
"""

from __future__ import annotations

import json
import statistics
import sys
import time

import torch
import torch.nn.functional as nn

torch.set_num_threads(int(sys.argv[1]))


def operations(rows: int, width: int) -> dict[str, object]:
    x, r, g = torch.randn(rows, width), torch.randn(rows, width), torch.randn(width)
    cos, sin = torch.randn(rows, width // 2), torch.randn(rows, width // 2)

    def rope() -> torch.Tensor:
        a, b = x[:, : width // 2], x[:, width // 2 :]
        return torch.cat((a * cos - b * sin, b * cos + a * sin), 1)

    return {
        "softmax": lambda: torch.softmax(x, -1),
        "layer_norm": lambda: nn.layer_norm(x, (width,), g, g),
        "rms_norm": lambda: nn.rms_norm(x, (width,), g, 1e-6),
        "gelu": lambda: nn.gelu(x),
        "rope": rope,
        "residual_norm": lambda: nn.rms_norm(x + r, (width,), g, 1e-6),
    }


def main() -> None:
    print(json.dumps({"ready": True, "version": torch.__version__}), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        run = operations(command["rows"], command["width"])[command["op"]]
        times = []
        for _ in range(command["repeat"]):
            start = time.perf_counter()
            for _ in range(20):
                run()
            times.append((time.perf_counter() - start) / 20)
        print(json.dumps({"seconds": statistics.median(times)}), flush=True)


if __name__ == "__main__":
    main()
