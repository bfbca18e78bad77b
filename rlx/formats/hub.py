"""Models on the Hugging Face hub, through its own library where that is installed."""

from __future__ import annotations

import re
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from rlx.errors import InputError
from rlx.support.optional import library

REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+(?::[\w.-]+)?")
_FOLDER = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model")
_PREFERRED = ("Q4_K_M", "Q4_K_S", "Q4_0", "Q5_K_M", "Q6_K", "Q8_0", "F16", "BF16", "F32")


def from_hub(name: str) -> Path:
    """`owner/name`, or `owner/name:TYPE` for one of its GGUF files; in the hub's own cache."""
    repository, _, wanted = name.partition(":")
    hub = library("huggingface_hub", f"{name!r} on the Hugging Face hub")
    try:
        files: list[str] = hub.HfApi().list_repo_files(repository)
    except Exception as e:
        files = _cached(hub, repository)
        if not files:
            raise InputError(
                f"the Hugging Face hub gives no such model: {type(e).__name__}: {e}"[:300],
                where=name,
                hint="be online and spell it as on the hub, or name a model file on this machine",
            ) from e
    chosen = _chosen(files, wanted, name)
    try:
        folder = Path(hub.snapshot_download(repository, allow_patterns=chosen))
    except Exception as e:
        text = f"could not be fetched: {type(e).__name__}: {e}"[:300]
        raise InputError(text, where=name) from e
    return folder / chosen[0] if chosen[0].endswith(".gguf") else folder


def _cached(hub: Any, repository: str) -> list[str]:
    """The files of a repository in the local cache."""
    try:
        folder = Path(hub.snapshot_download(repository, local_files_only=True))
    except Exception:
        return []
    return [p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()]


def _chosen(files: list[str], wanted: str, name: str) -> list[str]:
    """The files to fetch: a model folder, or one GGUF model with all its parts."""
    top = [f for f in files if "/" not in f and any(fnmatch(f, p) for p in _FOLDER)]
    if not wanted and any(f.endswith(".safetensors") for f in top):
        return top
    # projectors of images and the like are no models of their own
    ggufs = sorted(f for f in files if f.endswith(".gguf") and "mmproj" not in f)
    for kind in (wanted,) if wanted else (*_PREFERRED, ""):
        found = [f for f in ggufs if kind.lower() in f.lower()]
        if found:
            stem = re.sub(r"-\d{5}-of-\d{5}\.gguf$", "", found[0])
            return [f for f in found if f == found[0] or f.startswith(stem + "-0")]
    raise InputError(
        f"no GGUF file of type {wanted}" if wanted else "neither safetensors nor GGUF files",
        where=name,
        got=", ".join((ggufs or files)[:12]) or "no files",
    )
