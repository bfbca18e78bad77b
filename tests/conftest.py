"""Which tests are the quick part: `pytest -m "not slow"`, under a minute on two cores."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent
# folders whose tests compile kernels, start processes or go through thousands of cases
SLOW = ("browser", "cli", "cuda", "docs", "formats", "fuzz", "kernels", "models", "parity", "serve",
        "viz")  # fmt: skip
QUICK = (
    "cuda/test_driver.py",
    "kernels/test_builder.py",
    "models/test_generate.py",
    "parity/test_random_native.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        place = Path(item.fspath).relative_to(ROOT)
        if place.parts[0] in SLOW and place.as_posix() not in QUICK:
            item.add_marker(pytest.mark.slow)
