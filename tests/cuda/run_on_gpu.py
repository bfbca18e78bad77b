"""What needs a GPU, as one script: the parity table on `cuda`, the device itself, tiny models.

    python tests/cuda/run_on_gpu.py [--llvmlite WHEEL] [--seconds 330] [--workers 6] [--only TEXT]

It needs Python, NumPy, ml_dtypes and llvmlite (or a wheel of it), and neither pytest nor torch. The
cases are shared by worker processes: a fault in a kernel ends a process's CUDA context, so that
case is reported, and a new worker goes on with the rest. Exit code 1 when something failed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
PATHS = [str(ROOT), str(HERE), *(str(ROOT / "tests" / f) for f in ("parity", "goldens"))]
SHOWN = 12  # errors that are printed whole
STICKY = ("illegal", "misaligned", "launch failure", "unspecified", "hardware", "device-side")

Check = Callable[[], None]


# -- the worker: some checks, one line of JSON for each -------------------------------------------


def checks() -> dict[str, Check]:
    """All checks by name."""
    import checks_of_bits  # noqa: F401  (adds checks)
    import checks_of_sizes  # noqa: F401
    import checks_on_gpu
    import packed_checks  # noqa: F401  (adds checks)
    from cases import cases
    from layer_checks import LAYERS

    found: dict[str, Check] = {**checks_on_gpu.CHECKS, **LAYERS}
    for case in cases():
        found[f"parity {case.id}"] = lambda case=case: checks_on_gpu.compare_case(case)
    return found


def work(names: list[str]) -> None:
    """Run checks; after an error that ends the CUDA context the process ends too."""
    known = checks()
    for name in names:
        start, error = time.perf_counter(), ""
        try:
            known[name]()
        except BaseException as e:
            error = "".join(traceback.format_exception(e, limit=-4))[-3000:]
        seconds = round(time.perf_counter() - start, 3)
        print(json.dumps({"name": name, "error": error, "seconds": seconds}), flush=True)
        if error and any(word in error for word in STICKY):
            os._exit(3)


# -- the main process ----------------------------------------------------------------------------


class Runner:
    def __init__(self, deadline: float, environment: dict[str, str]) -> None:
        self.deadline, self.environment = deadline, environment
        self.results: list[dict[str, Any]] = []
        self.notes: list[str] = []

    def run(self, names: list[str]) -> None:
        """Run the checks in worker processes, one after another as long as some are left."""
        left = list(names)
        while left and time.time() < self.deadline:
            done = self._run_worker(left)
            if not done:
                self.results.append({"name": left[0], "error": "the worker died", "seconds": 0})
                done = {left[0]}
            left = [n for n in left if n not in done]

    def _run_worker(self, names: list[str]) -> set[str]:
        with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as errors:
            file = Path(folder) / "names.json"
            file.write_text(json.dumps(names), encoding="utf-8")
            command = [sys.executable, __file__, "--work", str(file)]
            worker = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=errors, text=True, env=self.environment
            )
            timer = threading.Timer(max(self.deadline - time.time(), 1), worker.kill)
            timer.start()
            said = list(self._lines(worker))
            timer.cancel()
            if worker.wait() not in (0, 3) and time.time() < self.deadline:
                errors.seek(0)
                self.notes.append(errors.read()[-1500:])
            return {line["name"] for line in said}

    def _lines(self, worker: subprocess.Popen[str]) -> Iterator[dict[str, Any]]:
        assert worker.stdout is not None
        for text in worker.stdout:
            if text.startswith("{"):
                line = json.loads(text)
                self.results.append(line)
                yield line
            else:
                print(text, end="", flush=True)


def with_llvmlite(wheel: str) -> list[str]:
    """Paths that make llvmlite importable: a folder, or a wheel that is unpacked."""
    if not wheel:
        return []
    if Path(wheel).is_dir():
        return [wheel]
    folder = Path(tempfile.gettempdir()) / "rlx-llvmlite"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return [str(folder)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--llvmlite", default="")
    parser.add_argument("--seconds", type=float, default=330)
    parser.add_argument("--workers", type=int, default=6)
    parser.add_argument("--only", default="", help="checks whose name has this text")
    parser.add_argument("--work", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    sys.path[:0] = PATHS
    if options.work:
        work(json.loads(Path(options.work).read_text(encoding="utf-8")))
        return 0
    start = time.time()
    paths = [*with_llvmlite(options.llvmlite), *PATHS]
    sys.path[:0] = paths
    before = [p for p in [os.environ.get("PYTHONPATH", "")] if p]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*paths, *before])}
    environment.setdefault("RLX_CACHE_DIR", tempfile.mkdtemp(prefix="rlx-cache-"))

    import rlx
    from rlx.backends.registry import Device

    if "cuda" not in rlx.available_devices():
        rlx.Device("cuda").backend  # noqa: B018  (says what is missing)
    for fact, value in Device("cuda").backend.inspection().machine().items():
        print(f"{fact}: {value}")
    names = [n for n in checks() if options.only in n]
    runner = Runner(start + options.seconds, environment)
    together = [n for n in names if n != "figures"]
    shares = [together[i :: options.workers] for i in range(options.workers)]
    threads = [threading.Thread(target=runner.run, args=(s,)) for s in shares if s]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    runner.run([n for n in names if n == "figures"])  # alone, so that nothing disturbs them
    return summary(runner, len(names), time.time() - start)


def summary(runner: Runner, total: int, seconds: float) -> int:
    failed = [r for r in runner.results if r["error"]]
    for result in failed[:SHOWN]:
        print(f"== {result['name']}\n{result['error']}")
    for note in runner.notes[:3]:
        print(f"== a worker ended early\n{note}")
    if len(failed) > SHOWN:
        print("also failed:", ", ".join(r["name"] for r in failed[SHOWN:]))
    slowest = sorted(runner.results, key=lambda r: -r["seconds"])[:5]
    print("slowest:", ", ".join(f"{r['name']} {r['seconds']:.1f} s" for r in slowest))
    passed, done = len(runner.results) - len(failed), len(runner.results)
    print(f"{passed} passed, {len(failed)} failed, {total - done} not run, {seconds:.0f} s")
    return int(bool(failed) or done < total)


if __name__ == "__main__":
    sys.exit(main())
