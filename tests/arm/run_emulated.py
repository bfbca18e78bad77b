"""Runs tests as AArch64 code on an x86 machine: an arm64 Python in qemu's user-mode emulation.

    python tests/arm/run_emulated.py --root DIR [--cpu max --cpu cortex-a72] [--suite parity]

DIR gets an arm64 Python with its libraries and wheels (200 MB), through apt-get and pip, the first
time. It needs Debian or Ubuntu with qemu-user, and no rights. `-cpu max` of qemu has dotprod, i8mm,
bf16 and SVE2, `neoverse-n1` has dotprod alone, `cortex-a72` plain NEON. Kernels are compiled by
this Python's LLVM for the emulated CPU; everything else runs emulated. Prints counts for each CPU
and suite; exit code 1 where something failed.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCES = HERE.parent.parent
SUITES = {
    "parity": ["tests/parity/test_parity.py", "-k", "cpu"],
    "tiny": ["tests/models/test_goldens.py", "-k", "cpu"],
    "smollm2": ["tests/models/test_smollm2.py"],
    "kernels": [
        *(f"tests/kernels/test_{name}.py" for name in (
            "attention", "batch_invariance", "convert", "executor", "gemm", "jit", "math", "qgemm",
            "region", "reductions", "target", "thread_pool",
        ))
    ],
}  # fmt: skip
PACKAGES = ["python3.11", "libstdc++6"]
WHEELS = ["numpy", "llvmlite", "ml_dtypes", "pytest", "hypothesis", "tokenizers", "jinja2", "regex",
          "gguf", "safetensors"]  # fmt: skip
PLATFORMS = [f"manylinux{v}_aarch64" for v in ("2014", "_2_17", "_2_27", "_2_28")]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--root", type=Path, required=True, help="folder of the arm64 system")
    parser.add_argument("--cpu", action="append", help="a CPU that qemu knows, default: max")
    parser.add_argument("--suite", action="append", choices=SUITES, help="default: the first three")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("tests", nargs="*", help="arguments of pytest instead of a suite")
    options = parser.parse_args()
    guest = Guest(options.root.resolve())
    guest.install()
    suites = {name: SUITES[name] for name in options.suite or list(SUITES)[:3]}
    if options.tests:
        suites = {"tests": options.tests}
    failed = False
    for cpu in options.cpu or ["max"]:
        for name, tests in suites.items():
            start = time.time()
            counts = guest.run(cpu, tests, options.workers)
            text = ", ".join(f"{counts[k]} {k}" for k in ("passed", "failed", "skipped"))
            print(f"{cpu} {name}: {text}, {time.time() - start:.0f} s", flush=True)
            failed |= counts["failed"] > 0 or counts["passed"] == 0
    return int(failed)


class Guest:
    """An arm64 system in a folder, and the emulator for it."""

    def __init__(self, root: Path) -> None:
        self.root, self.system, self.site = root, root / "system", root / "site"
        self.emulator = _need("qemu-aarch64", "qemu-user")

    # -- making it --------------------------------------------------------------------------

    def install(self) -> None:
        """Fetch and unpack what is missing."""
        if not (self.root / "complete").exists():
            print(f"installing an arm64 Python in {self.root}", flush=True)
            self._unpack_packages()
            self._unpack_wheels()
            (self.root / "complete").touch()

    def _unpack_packages(self) -> None:
        """Debian's packages, by an apt-get that knows nothing but arm64 and is kept apart."""
        state = self.root / "apt"
        for folder in ("state/lists/partial", "cache/archives/partial"):
            (state / folder).mkdir(parents=True, exist_ok=True)
        (state / "state/status").touch()
        settings = {
            "APT::Architecture": "arm64",
            "APT::Architectures": "arm64",
            "APT::Sandbox::User": "",
            "Debug::NoLocking": "1",
            "Dir::State": state / "state",
            "Dir::State::status": state / "state/status",
            "Dir::Cache": state / "cache",
        }
        apt = [_need("apt-get", "apt"), "-q", "-y"]
        apt += [word for key, value in settings.items() for word in ("-o", f"{key}={value}")]
        _check([*apt, "update"])
        _check([*apt, "install", "--download-only", "--no-install-recommends", *PACKAGES])
        self.system.mkdir(exist_ok=True)
        for package in sorted((state / "cache/archives").glob("*.deb")):
            _check([_need("dpkg", "dpkg"), "-x", str(package), str(self.system)])

    def _unpack_wheels(self) -> None:
        platforms = [word for name in PLATFORMS for word in ("--platform", name)]
        pip = [sys.executable, "-m", "pip", "install", "-q", "--target", str(self.site)]
        pip += ["--upgrade", "--only-binary=:all:", "--implementation", "cp"]
        _check([*pip, "--python-version", "3.11", *platforms, *WHEELS])

    # -- running it -------------------------------------------------------------------------

    def run(self, cpu: str, tests: list[str], workers: int) -> Counter[str]:
        """Run pytest on a CPU, its tests dealt out to some processes. Returns the counts."""
        python = self._python(cpu)
        running = []
        for number in range(workers):
            report = self.root / f"report-{number}.xml"
            report.unlink(missing_ok=True)
            command = [str(python), "-m", "pytest", "-q", "-p", "arm_guest", "--tb=short"]
            command += ["-p", "no:cacheprovider", f"--junitxml={report}", *tests]
            process = subprocess.Popen(
                command, cwd=SOURCES, env=self._environment(python, f"{number}/{workers}")
            )
            running.append((process, report))
        counts: Counter[str] = Counter()
        for process, report in running:
            code = process.wait()
            if code not in (0, 1, 5) or not report.exists():  # 5: no test was for this process
                print(f"pytest ended with code {code}", file=sys.stderr)
                counts["failed"] += 1
            else:
                counts += _counts(report)
        return counts

    def _python(self, cpu: str) -> Path:
        """A script that is the arm64 Python; tests that start a Python start it."""
        script = self.root / f"python-{cpu}"
        words = [self.emulator, "-L", self.system, "-cpu", cpu, self.system / "usr/bin/python3.11"]
        line = shlex.join(str(w) for w in words)
        script.write_text(f'#!/bin/sh\nexec {line} "$@"\n', encoding="utf-8")
        script.chmod(0o755)
        return script

    def _environment(self, python: Path, share: str) -> dict[str, str]:
        cache = self.root / "cache"
        cache.mkdir(mode=0o700, exist_ok=True)
        models = cache / "models"
        if not models.exists():  # those of `tests/install.py`
            models.unlink(missing_ok=True)
            models.symlink_to(_cache_of_models())
        return {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(str(p) for p in (SOURCES, HERE, self.site)),
            "PYTHONPYCACHEPREFIX": str(self.root / "pycache"),
            "RLX_CACHE_DIR": str(cache),
            "ARM_HOST_PYTHON": sys.executable,
            "ARM_GUEST_PYTHON": str(python),
            "ARM_SOURCES": str(SOURCES),
            "ARM_SHARE": share,
        }


def _cache_of_models() -> Path:
    sys.path.insert(0, str(SOURCES))
    from rlx.support.files import cache_root

    return cache_root() / "models"


def _counts(report: Path) -> Counter[str]:
    counts: Counter[str] = Counter()
    for case in ElementTree.parse(report).iter("testcase"):
        kinds = {child.tag for child in case}
        kind = "failed" if kinds & {"failure", "error"} else "passed"
        counts["skipped" if "skipped" in kinds else kind] += 1
    return counts


def _check(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{shlex.join(command)} failed:\n{done.stdout}{done.stderr}")


def _need(program: str, package: str) -> str:
    found = shutil.which(program)
    if found is None:
        raise SystemExit(f"there is no {program} here\nhint: apt-get install {package}")
    return found


if __name__ == "__main__":
    sys.exit(main())
