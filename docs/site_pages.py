"""Pages of the site that are made: README and others from outside this folder, and the API.

mkdocs runs it (mkdocs.yml, hooks).
"""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File
from pygments.formatters import HtmlFormatter

import rlx

ROOT = Path(__file__).resolve().parents[1]
COPIED = {
    "index.md": "README.md",
    "contributing.md": "CONTRIBUTING.md",
    "results.md": "bench/RESULTS.md",
}
HEADS = {
    "models": "Models",
    "runtime": "Runtime",
    "specialize": "Specialisation",
    "ir": "IR",
    "passes": "Passes",
    "backends": "Backends",
    "errors": "Errors",
}

ROOMS = {
    "nn": ("Networks", ("rlx.nn", "rlx.nn.functional", "rlx.nn.init")),
    "random": ("Random numbers", ("rlx.random",)),
}


def on_files(files: Any, config: Any) -> Any:
    for name, source in COPIED.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, name, content=_moved(text)))
    for folder in HEADS:
        files.append(File.generated(config, f"api/{folder}.md", content=api_page(folder)))
    for room in ROOMS:
        files.append(File.generated(config, f"api/{room}.md", content=room_page(room)))
    files.append(File.generated(config, "code.css", content=code_colours()))
    return files


def _moved(text: str) -> str:
    """Links as they are on the site, where all pages are in one folder."""
    for name, source in COPIED.items():
        text = text.replace(f"]({source}", f"]({name}")
    return re.sub(r"\]\((?:\.\./)?docs/", "](", text)


def api_page(folder: str) -> str:
    """The public names that live in a folder of the package, by module, with what they say."""
    parts = [f"# {HEADS[folder]}\n"]
    for module, names in rlx._HOMES.items():
        if module.split(".")[1] == folder:
            parts.append(
                f"::: {module}\n    options:\n      members: [{', '.join(names.split())}]\n"
            )
    return "\n".join(parts)


def room_page(room: str) -> str:
    """The public names of modules that users import, by the files that define them."""
    title, packages = ROOMS[room]
    parts = [f"# {title}\n"]
    for package in packages:
        found: dict[str, list[str]] = {}
        for name, value in vars(import_module(package)).items():
            home = getattr(value, "__module__", "")
            if not name.startswith("_") and home.startswith(package):
                found.setdefault(home, []).append(name)
        for module, names in found.items():
            listed = ", ".join(sorted(names))
            parts.append(f"::: {module}\n    options:\n      members: [{listed}]\n")
    return "\n".join(parts)


def code_colours() -> str:
    """Colours of code in the light and in the dark."""
    light = HtmlFormatter(style="default").get_style_defs(".highlight")
    dark = HtmlFormatter(style="github-dark").get_style_defs('[data-bs-theme="dark"] .highlight')
    return f"{light}\n{dark}\n"
