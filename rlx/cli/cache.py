"""`rlx cache`: compiled kernels on disk, and models that were fetched."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlx.cli import console
from rlx.cli.disk import bytes_in
from rlx.cli.options import Json

if TYPE_CHECKING:
    from rlx.codegen.diskcache import DiskCache

app = typer.Typer(
    no_args_is_help=True, help="Look after the compiled kernels that are kept on disk."
)
_SUFFIX = ".rlxk"


def kernel_directory() -> Path | None:
    """Where compiled kernels are kept; None where RLX_CACHE=0 turns that off."""
    from rlx.codegen.diskcache import default_directory

    return default_directory()


def kernel_files() -> Iterator[Path]:
    root = kernel_directory()
    if root is not None and root.is_dir():
        yield from sorted(root.glob(f"??/*{_SUFFIX}"))


@app.command("list")
def list_kernels(json: Json = False) -> None:
    """List the compiled kernels, the latest first."""
    found = [(path, path.stat()) for path in kernel_files()]
    found.sort(key=lambda item: -item[1].st_mtime)
    if json:
        rows = [
            {"key": p.stem, "bytes": s.st_size, "written": s.st_mtime, "path": str(p)}
            for p, s in found
        ]
        console.write_json(rows)
        return
    console.table(
        ("kernel", "size", "written"),
        [(p.stem[:16], console.size(s.st_size), _when(s.st_mtime)) for p, s in found],
        right="size",
    )


def _when(stamp: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(stamp))


@app.command("size")
def show_size(json: Json = False) -> None:
    """Say how much is kept, and where."""
    from rlx.formats.fetch import models_dir

    kernels = [*kernel_files()]
    rows = [
        ("kernels", kernel_directory(), len(kernels), sum(p.stat().st_size for p in kernels)),
        ("models", models_dir(), len(_models()), bytes_in(models_dir())),
    ]
    if json:
        keys = ("directory", "count", "bytes")
        console.write_json(
            {
                name: dict(zip(keys, (place and str(place), count, size), strict=True))
                for name, place, count, size in rows
            }
        )
        return
    console.table(
        ("what", "count", "size", "where"),
        [(name, n, console.size(b), place or "off (RLX_CACHE=0)") for name, place, n, b in rows],
        right="count size",
    )


def _models() -> list[str]:
    from rlx.formats.catalogue import CATALOGUE
    from rlx.formats.fetch import models_dir

    return [name for name in CATALOGUE if (models_dir() / name).is_dir()]


@app.command("clear")
def clear(
    models: Annotated[bool, typer.Option("--models", help="Also the models fetched.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    json: Json = False,
) -> None:
    """Delete the compiled kernels; they are made again when they are needed."""
    from rlx.formats.fetch import models_dir, remove

    kernels, fetched = [*kernel_files()], _models() if models else []
    freed = sum(p.stat().st_size for p in kernels)
    freed += sum(bytes_in(models_dir() / name) for name in fetched)
    if fetched and not yes:
        typer.confirm(f"Delete {', '.join(fetched)} ({console.size(freed)})?", abort=True, err=True)
    for path in kernels:
        path.unlink(missing_ok=True)
    for name in fetched:
        remove(name)
    if json:
        console.write_json({"kernels": len(kernels), "models": fetched, "bytes": freed})
    else:
        print(f"deleted {len(kernels)} kernels and {len(fetched)} models, {console.size(freed)}")


@app.command("verify")
def verify(
    fix: Annotated[bool, typer.Option("--fix", help="Delete what is damaged.")] = False,
    json: Json = False,
) -> None:
    """Read every compiled kernel and check its digest; exit code 1 when one is damaged."""
    from rlx.codegen.diskcache import DiskCache

    found = [*kernel_files()]
    root = kernel_directory()
    disk = DiskCache(root) if root is not None else None
    with console.counted("checking", len(found)) as done:
        faults: dict[Path, str] = {}
        for path in found:
            why = _fault(disk, path)
            if why:
                faults[path] = why
            done()
    for path in faults if fix else ():
        path.unlink(missing_ok=True)
    if json:
        console.write_json(
            {"checked": len(found), "damaged": {str(p): w for p, w in faults.items()}}
        )
    else:
        for path, why in faults.items():
            print(f"{path}: {why}" + (", deleted" if fix else ""))
        print(f"{len(found)} kernels checked, {len(faults)} damaged")
    if faults and not fix:
        raise typer.Exit(1)


def _fault(disk: DiskCache | None, path: Path) -> str:
    """Why a kernel would not be used; empty if it would."""
    assert disk is not None  # there is a file, so there is a directory
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if disk.load(path.stem) is not None:
            return ""
    return str(caught[0].message).rpartition("compiled again: ")[2] if caught else "gone"
