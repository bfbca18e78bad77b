"""The browser that opens reports in tests: the system's Chromium, or Chrome."""

from __future__ import annotations

import os
import shutil

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip
LAPTOP, PHONE = (1280, 800), (390, 844)


def find_chromium() -> str | None:
    """Its path: what CHROMIUM names, or the first that is installed."""
    return next(filter(None, map(shutil.which, (os.environ.get("CHROMIUM", ""), *NAMES))), None)
