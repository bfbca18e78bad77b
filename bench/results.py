"""`python -m bench all`: every bench in a process of its own, one table of figures."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import platform
import subprocess
import sys
import tempfile
from pathlib import Path


def run_all(names: list[str], rest: list[str], out: Path) -> int:
    rows: list[dict[str, object]] = []
    status = 0
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "bars.json"
            command = [sys.executable, "-m", "bench", name, "--json", str(file), *rest]
            print(f"== {name}", flush=True)
            status |= subprocess.run(command, check=False).returncode
            if file.exists():
                rows += json.loads(file.read_text())
    out.write_text(_table(rows), encoding="utf-8")
    print(f"wrote {out.name}")
    return 1 if status else 0


def _table(rows: list[dict[str, object]]) -> str:
    lines = [
        "# Figures",
        "",
        f"{datetime.date.today()}, {_cpu()}, Python {platform.python_version()}, "
        + ", ".join(f"{p} {importlib.metadata.version(p)}" for p in ("numpy", "llvmlite")),
        "",
        "| bar | value | unit | peer | peer value | ratio | goal | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        lines.append(
            f"| {r['name']} | {r['value']:.4g} | {r['unit']} | {r['peer']} | "
            f"{r['peer_value']:.4g} | {r['ratio']:.2f} | {r['goal']:g} | "
            f"{'met' if r['met'] else 'missed'} |"
        )
    return "\n".join(lines) + "\n"


def _cpu() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine()
    model = next((r.split(":")[1].strip() for r in text.splitlines() if "model name" in r), "CPU")
    return f"{model}, {text.count('processor')} cores"
