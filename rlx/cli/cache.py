"""`rlx cache`: the kernel, artifact, tokenizer and model caches on disk.

What RLX caches on disk: compiled kernels, artifacts of whole variants, indexes of vocabularies,
fetched models.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlx.cli import console
from rlx.cli.options import Json
from rlx.support.files import bytes_in, cache_directory

if TYPE_CHECKING:
    from rlx.backends.inspection import CachedFile, Inspection
    from rlx.runtime.aot import AotCache


KINDS = ("kernels", "artifacts", "functions", "tokenizers")


def cached_files() -> list[CachedFile]:
    """All kernels, artifacts and indexes, the latest first."""
    from rlx.backends.inspection import CachedFile
    from rlx.formats.tokenizer.index_cache import cached_indexes

    found = _inspection().cached_kernels()
    for kind, cache in _caches():
        for entry in cache.entries():
            found.append(CachedFile(kind, entry.path, entry.num_bytes, entry.used))
    for index in cached_indexes():
        found.append(CachedFile("tokenizers", index.path, index.num_bytes, index.used))
    return sorted(found, key=lambda file: (-file.written, file.path))


def damaged_files() -> dict[Path, str]:
    """The files that cannot be used, and why."""
    from rlx.formats.tokenizer.index_cache import damaged_indexes

    found = _inspection().damaged_kernels() | damaged_indexes()
    for _, cache in _caches():
        found |= cache.verify()
    return found


def _caches() -> list[tuple[str, AotCache]]:
    """The caches of artifacts: those of models, and those of jitted functions."""
    from rlx.runtime.aot import AotCache
    from rlx.runtime.lazy_template import function_cache

    made = (("artifacts", AotCache.default()), ("functions", function_cache()))
    return [(kind, cache) for kind, cache in made if cache is not None]


def _inspection() -> Inspection:
    from rlx.backends.registry import Device

    return Device.of("cpu").backend.inspection()


def fetched_models() -> list[str]:
    """Models of the catalogue that are in the cache."""
    from rlx.formats.catalogue import CATALOGUE
    from rlx.formats.fetch import models_dir

    return [name for name in CATALOGUE if (models_dir() / name).is_dir()]


app = typer.Typer(
    no_args_is_help=True,
    help="Manage what is cached on disk: kernels, artifacts, tokenizers and models.",
)


@app.command("list")
def list_files(json: Json = False) -> None:
    """List the compiled kernels, artifacts and indexes of vocabularies, the latest first."""
    found = cached_files()
    if json:
        console.write_json(
            [
                {"kind": k.kind, "path": str(k.path), "bytes": k.num_bytes, "written": k.written}
                for k in found
            ]
        )
        return
    rows = [(k.path.name[:24], k.kind, console.size(k.num_bytes), _when(k.written)) for k in found]
    console.table(("file", "kind", "size", "written"), rows, right="size")


def _when(stamp: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(stamp))


@app.command("size")
def show_size(json: Json = False) -> None:
    """Show the size and place of each cache."""
    from rlx.formats.fetch import models_dir

    found = cached_files()
    rows = []
    for kind in KINDS:
        sizes = [k.num_bytes for k in found if k.kind == kind]
        rows.append((kind, cache_directory(kind), len(sizes), sum(sizes)))
    rows.append(("models", models_dir(), len(fetched_models()), bytes_in(models_dir())))
    if json:
        console.write_json(
            {
                kind: {"directory": place and str(place), "count": count, "bytes": size}
                for kind, place, count, size in rows
            }
        )
        return
    console.table(
        ("what", "count", "size", "where"),
        [(kind, n, console.size(b), place or "off (RLX_CACHE=0)") for kind, place, n, b in rows],
        right="count size",
    )


@app.command("clear")
def clear(
    models: Annotated[bool, typer.Option("--models", help="Also delete fetched models.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    json: Json = False,
) -> None:
    """Delete kernels, artifacts and indexes; they are made again when they are needed."""
    from rlx.formats.fetch import models_dir, remove

    found, fetched = cached_files(), fetched_models() if models else []
    freed = sum(k.num_bytes for k in found)
    freed += sum(bytes_in(models_dir() / name) for name in fetched)
    if (found or fetched) and not yes:
        what = ", ".join([f"{len(found)} kernels, artifacts and indexes", *fetched])
        typer.confirm(f"Delete {what} ({console.size(freed)})?", abort=True, err=True)
    for file in found:
        file.path.unlink(missing_ok=True)
    for name in fetched:
        remove(name)
    if json:
        console.write_json({"files": len(found), "models": fetched, "bytes": freed})
    else:
        print(f"deleted {len(found)} files and {len(fetched)} models, {console.size(freed)}")


@app.command("verify")
def verify(
    fix: Annotated[bool, typer.Option("--fix", help="Delete files that cannot be used.")] = False,
    json: Json = False,
) -> None:
    """Read every kernel, artifact and index; exit code 1 when one is damaged or out of date."""
    with console.working("checking"):
        total, found = len(cached_files()), damaged_files()
    for path in found if fix else ():
        path.unlink(missing_ok=True)
    if json:
        unusable = {str(path): why for path, why in found.items()}
        console.write_json({"checked": total, "unusable": unusable})
    else:
        for path, why in found.items():
            print(f"{path}: {why}" + (", deleted" if fix else ""))
        print(f"{total} files checked, {len(found)} cannot be used")
    if found and not fix:
        raise typer.Exit(1)
