"""`rlx list`: the models there are."""

from __future__ import annotations

from rlx.cli import console
from rlx.cli.options import Json


def list_models(json: Json = False) -> None:
    """List the models of the catalogue, and which of them are here already."""
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
