"""Which tests are the quick part: `pytest -m "not slow"`, under a minute on two cores.

Tests for the night, which repeat for every case what others show for some, run with `-m nightly`.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

# A job in the background of a shell ignores Ctrl-C, and so would the processes that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).resolve().parent
# folders whose tests compile kernels, start processes or go through thousands of cases
SLOW = ("browser", "cli", "cuda", "docs", "formats", "fuzz", "importers", "kernels", "models",
        "parity", "serve", "viz")  # fmt: skip
QUICK = (
    "kernels/test_builder.py",
    "models/test_generate.py",
    "parity/test_random_native.py",
)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        place = Path(item.fspath).relative_to(ROOT)
        if place.parts[0] in SLOW and place.as_posix() not in QUICK:
            item.add_marker(pytest.mark.slow)
    if "nightly" not in config.option.markexpr:
        left_out = [item for item in items if item.get_closest_marker("nightly")]
        items[:] = [item for item in items if not item.get_closest_marker("nightly")]
        config.hook.pytest_deselected(items=left_out)
