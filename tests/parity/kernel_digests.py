"""Digests of machine code, to show that a refactoring changed no kernel.

    python tests/parity/kernel_digests.py collect before.json     # in the tree before
    python tests/parity/kernel_digests.py collect after.json      # in the tree after
    python tests/parity/kernel_digests.py compare before.json after.json

`collect` compiles every kernel of SmolLM2 (prefill, decode, draft verification), of MiniLM (f32 and
int8) and of the parity table, for this CPU and for AVX2, into an empty kernel cache, and takes a
digest of the code and data of each object. Symbol and section names do not enter it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HEADER = 40  # bytes of a cached object before the ELF file
ALLOCATED = 2  # section flag: it takes memory at run time
NOBITS, RELA = 8, 4  # section types

SMOLLM2 = """
import rlx
model = rlx.load("smollm2-135m", context=256)
model.generate("The capital of France is", max_tokens=8, temperature=0, stream=False)
prompt = "one two one two one two one"
model.generate(prompt, max_tokens=8, temperature=0, speculate=3, stream=False)
model.logits([1, 2, 3])
model.close()
"""
MINILM = """
import rlx
for quant in (None, "int8"):
    model = rlx.load("all-minilm-l6-v2", quant=quant)
    for texts in (["one"], ["a longer text of some words"] * 3, ["word " * 200] * 9):
        model.embed(texts)
"""


def collect() -> dict[str, list[str]]:
    """Digests by what the kernels were compiled for."""
    table = ["-m", "pytest", "-q", "-x", "-n", "2", "-p", "no:cacheprovider"]
    table.append(str(ROOT / "tests/parity/test_parity.py"))
    jobs = {"smollm2": ["-c", SMOLLM2], "minilm": ["-c", MINILM], "parity": table}
    return {name: _kernels_of(arguments) for name, arguments in jobs.items()}


def _kernels_of(arguments: list[str]) -> list[str]:
    """Digests of all that a Python process compiles, starting from an empty cache."""
    with tempfile.TemporaryDirectory() as folder:
        _link_models(Path(folder))
        environment = os.environ | {"RLX_CACHE_DIR": folder, "PYTHONPATH": str(ROOT)}
        subprocess.run([sys.executable, *arguments], env=environment, cwd=ROOT, check=True)
        files = sorted((Path(folder) / "kernels").rglob("*.rlxk"))
        return sorted(digest(file.read_bytes()[HEADER:]) for file in files)


def _link_models(folder: Path) -> None:
    """Let the process find models that were fetched before."""
    base = os.environ.get("RLX_CACHE_DIR") or str(
        Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "rlx"
    )
    models = Path(base) / "models"
    if models.is_dir():
        (folder / "models").symlink_to(models.resolve())


def digest(elf: bytes) -> str:
    """SHA-256 of the loaded sections of an ELF object and of the relocations of each."""
    table, count = struct.unpack_from("<Q", elf, 40)[0], struct.unpack_from("<H", elf, 60)[0]
    found = hashlib.sha256()
    loaded: set[int] = set()
    for index in range(count):
        _, kind, flags, _, start, size, _, info, *_ = struct.unpack_from(
            "<IIQQQQIIQQ", elf, table + 64 * index
        )
        if flags & ALLOCATED and kind != NOBITS:
            loaded.add(index)
            found.update(struct.pack("<IQ", kind, size) + elf[start : start + size])
        elif kind == RELA and info in loaded:
            for at in range(start, start + size, 24):
                place, what, addend = struct.unpack_from("<QQq", elf, at)
                found.update(struct.pack("<QIq", place, what & 0xFFFFFFFF, addend))
    return found.hexdigest()


def compare(before: Path, after: Path) -> int:
    """Print how many kernels are the same; the exit status is 0 when all are."""
    old, new = (json.loads(file.read_text()) for file in (before, after))
    changed = 0
    for name in old:
        a, b = set(old[name]), set(new[name])
        print(
            f"{name:8} {len(a & b):5} the same, {len(a - b)} only before, {len(b - a)} only after"
        )
        changed += len(a ^ b)
    return 1 if changed else 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("collect").add_argument("out", type=Path)
    comparing = commands.add_parser("compare")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    options = parser.parse_args()
    if options.command == "compare":
        return compare(options.before, options.after)
    found = collect()
    options.out.write_text(json.dumps(found, indent=1))
    print(", ".join(f"{name} {len(kernels)}" for name, kernels in found.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
