"""Run the array API standard's test suite on `rlx.numpy` and on `array_api_strict`, and compare.

    python tests/arrays/run_conformance.py PATH/TO/array-api-tests --max-examples 50
    python tests/arrays/run_conformance.py PATH/TO/array-api-tests --device reference
    python tests/arrays/run_conformance.py PATH/TO/array-api-tests --jit --max-examples 5

The suite is https://github.com/data-apis/array-api-tests; its requirements and `array-api-strict`
must be installed. Prints how many tests pass, and exits with 1 if one fails that passes with
`array_api_strict` and is not in conformance-xfails.txt. Other options, such as `-n2`, go to pytest.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

HERE = Path(__file__).resolve().parent
XFAILS = HERE / "conformance-xfails.txt"


class Results(NamedTuple):
    """The tests of a run: `test_module.Class::name[case]`."""

    passed: frozenset[str]
    failed: frozenset[str]
    skipped: frozenset[str]

    def __str__(self) -> str:
        counts = len(self.passed), len(self.failed), len(self.skipped)
        return "{} passed, {} failed, {} skipped".format(*counts)


def expected_failures(text: str) -> dict[str, str]:
    """Tests and the reasons why they fail, from lines `test: reason`."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    pairs = [line.partition(": ") for line in lines]
    return {test.strip(): reason.strip() for test, _, reason in pairs}


def read_results(report: Path) -> Results:
    """The results in a JUnit report."""
    found: dict[str, set[str]] = {"passed": set(), "failed": set(), "skipped": set()}
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.get('classname', '').removeprefix('array_api_tests.')}::{case.get('name')}"
        tags = {child.tag for child in case}
        kind = "failed" if tags & {"failure", "error"} else "skipped" if tags else "passed"
        found[kind].add(name)
    return Results(*[frozenset(found[kind]) for kind in Results._fields])


def run_suite(suite: Path, module: str, device: str, examples: int, more: list[str]) -> Results:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        environment = os.environ | {
            "ARRAY_API_TESTS_MODULE": module,
            "RLX_DEVICE": device,
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), str(HERE)]),
        }
        command = [
            sys.executable, "-m", "pytest", "array_api_tests", "-q", "--tb=short",
            f"--max-examples={examples}", "--disable-deadline", "-p", "no:cacheprovider",
            f"--junit-xml={report}", *more,
        ]  # fmt: skip
        run = subprocess.run(command, cwd=suite, env=environment, capture_output=True, text=True)
        if not report.exists():
            sys.exit(f"the suite did not run with {module}:\n{run.stdout[-2000:]}{run.stderr}")
        print(f"{module}: ", end="")
        (Path(tempfile.gettempdir()) / f"conformance-{module}.txt").write_text(run.stdout, "utf-8")
        return read_results(report)


def compare(ours: Results, strict: Results, known: dict[str, str]) -> list[str]:
    """Failures of ours that neither the list nor `array_api_strict` has."""
    unexpected = sorted(ours.failed - strict.failed - known.keys())
    for test in sorted(ours.failed & known.keys()):
        print(f"  expected: {test}: {known[test]}")
    for test in sorted(known.keys() & ours.passed):
        print(f"  passed, though it is in {XFAILS.name}: {test}")
    for test in sorted(ours.failed & strict.failed):
        print(f"  with array_api_strict too: {test}")
    for test in unexpected:
        print(f"  UNEXPECTED: {test}")
    return unexpected


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("suite", type=Path)
    parser.add_argument("--max-examples", type=int, default=50)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jit", action="store_true", help="each function inside rlx.jit")
    given, more = parser.parse_known_args()
    runs = []
    for module in ("array_api_strict", "jitted_namespace" if given.jit else "rlx.numpy"):
        runs.append(run_suite(given.suite, module, given.device, given.max_examples, more))
        print(runs[-1], flush=True)
    strict, ours = runs
    known = expected_failures(XFAILS.read_text("utf-8"))
    unexpected = compare(ours, strict, known)
    print(f"{len(unexpected)} unexpected failures")
    return 1 if unexpected else 0


if __name__ == "__main__":
    sys.exit(main())
