"""`python -m bench all`: every bench in a process of its own, a table of figures for each."""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

PEERED = (
    "arrays",
    "encoder",
    "import_models",
    "llm",
    "long",
    "quantize",
    "regions",
    "start",
    "train",
)
TYPED = ("llm", "qgemm")  # take --type and --avx2


def run_all(names: list[str], rest: list[str], out: Path) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench all")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument("--peer-python", metavar="PYTHON", help="has torch, llama.cpp, …")
    parser.add_argument("--genai-python", metavar="PYTHON", help="has openvino-genai")
    parser.add_argument("--ort-genai-python", metavar="PYTHON", help="has onnxruntime-genai")
    parser.add_argument("--llm", action="append", default=[], metavar="FILE.gguf")
    parser.add_argument("--type", action="append", default=[], help="of `llm` and `qgemm`; all")
    parser.add_argument(
        "--avx2-peer", metavar="DIR", help="llama.cpp for AVX2: `llm` and `qgemm` run with it too"
    )
    options = parser.parse_args(rest)
    sections: dict[str, list[dict[str, object]]] = {}
    for name in names:
        found = _run(name, _arguments(name, options))
        if options.avx2_peer and name in TYPED:
            held = ["--avx2"] + (["--avx2-peer", options.avx2_peer] if name == "llm" else [])
            found += _run(name, _arguments(name, options) + held)
        sections[name] = found
    out.write_text(_page(sections), encoding="utf-8")
    print(f"wrote {out.name}")
    return 0 if all(found and all(r["met"] for r in found) for found in sections.values()) else 1


def _arguments(name: str, options: argparse.Namespace) -> list[str]:
    """What of the options a bench takes."""
    given = ["--quick"] if options.quick else []
    if name in PEERED and options.peer_python:
        given += ["--peer-python", options.peer_python]
    if name == "llm" and options.genai_python:
        given += ["--genai-python", options.genai_python]
    if name == "llm" and options.ort_genai_python:
        given += ["--ort-genai-python", options.ort_genai_python]
    if name in TYPED:
        given += [a for kind in options.type for a in ("--type", kind)]
    if name in ("llm", "long", "memory"):
        given += [a for file in options.llm for a in ("--model", file)]
    return given


def _run(name: str, given: list[str]) -> list[dict[str, object]]:
    """The bars of one bench, run in a process of its own; none when it could not measure."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "bars.json"
        print(f"== {name}", flush=True)
        command = [sys.executable, "-m", "bench", name, "--json", str(file), *given]
        subprocess.run(command, check=False)
        rows: list[dict[str, object]] = json.loads(file.read_text()) if file.exists() else []
    return rows


def _page(sections: dict[str, list[dict[str, object]]]) -> str:
    """A section for each bench that measured, then the names of those that could not."""
    lines = [
        "# Figures",
        "",
        f"{datetime.date.today()}, {_cpu()}, Python {platform.python_version()}, "
        + ", ".join(f"{p} {importlib.metadata.version(p)}" for p in ("numpy", "llvmlite")),
    ]
    for name, rows in sections.items():
        if rows:
            lines += ["", f"## `python -m bench {name}`", "", *_table(rows)]
    absent = [name for name, rows in sections.items() if not rows]
    if absent:
        lines += ["", f"Not measured in this run: {', '.join(absent)}."]
    return "\n".join(lines) + "\n"


def _table(rows: list[dict[str, object]]) -> list[str]:
    head = [
        "| bar | value | unit | peer | peer value | ratio | goal | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    return head + [
        f"| {r['name']} | {r['value']:.4g} | {r['unit']} | {r['peer']} | "
        f"{r['peer_value']:.4g} | {r['ratio']:.2f} | {r['goal']:g} | "
        f"{'met' if r['met'] else 'missed'} |"
        for r in rows
    ]


def _cpu() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine()
    model = next((r.split(":")[1].strip() for r in text.splitlines() if "model name" in r), "CPU")
    return f"{model}, {text.count('processor')} cores"
