"""Gets what tests need and pip does not install: a browser, and the models of the catalogue.

    python tests/install.py

Does nothing where all are there. CHROMIUM names a browser that has another name or place.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "browser"))
from chromium import NAMES, find_chromium

from rlx.formats.catalogue import CATALOGUE
from rlx.formats.fetch import fetch


def main() -> None:
    if find_chromium() is None:
        install_chromium()
    for name in CATALOGUE:
        fetch(name)


def install_chromium() -> None:
    """Debian's package, as root or through sudo without a password."""
    rights = [] if os.geteuid() == 0 else ["sudo", "-n"]
    if shutil.which("apt-get") is None or (rights and shutil.which("sudo") is None):
        raise SystemExit(_missing("there is no apt-get here that this user may run"))
    print("installing chromium", flush=True)
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for step in (["update", "-q"], ["install", "-qy", "--no-install-recommends", "chromium"]):
        command = [*rights, "apt-get", *step]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(_missing(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}"))
    if find_chromium() is None:
        raise SystemExit(_missing("apt-get installed none"))


def _missing(why: str) -> str:
    return (
        f"tests need a browser: {why}\n"
        f"hint: install one of {', '.join(NAMES)}, or set CHROMIUM to the path of one"
    )


if __name__ == "__main__":
    main()
