"""A report as one HTML file: styles, scripts, charting library and data inside, nothing fetched.

Names in models are untrusted. The data is JSON that cannot close its element, the script inserts it
as text only, and the content security policy lets no other script run.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import json
import os
from pathlib import Path
from string import Template

from rlx.support.files import atomic_file
from rlx.support.optional import library
from rlx.viz.report.records import Report

_ASSETS = Path(__file__).parent / "assets"
_SCRIPTS = ("base.js", "blocks.js", "tables.js", "charts.js", "page.js")  # one after the other
_CHARTS = ("bokeh.min.js", "bokeh-api.min.js")
_ESCAPES = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"}


def write_page(path: str | os.PathLike[str], report: Report) -> None:
    """Write the page atomically."""
    data = page(report).encode("utf-8", "xmlcharrefreplace")
    with atomic_file(path) as file:
        file.write(data)


def page(report: Report) -> str:
    script, charts = "\n".join(map(_asset, _SCRIPTS)), charting_library()
    return Template(_asset("page.html")).substitute(
        title=html.escape(report.name),
        policy=_policy(script, charts),
        style=_asset("page.css"),
        data=embedded_json(report),
        charts=base64.b64encode(gzip.compress(charts.encode(), mtime=0)).decode(),
        script=script,
    )


def embedded_json(value: object) -> str:
    """JSON that may stand in a script element: it holds no `<`, and is ASCII."""
    text = json.dumps(value, default=vars, separators=(",", ":"))
    for character, escape in _ESCAPES.items():
        text = text.replace(character, escape)
    return text


def _policy(*scripts: str) -> str:
    """Only these scripts run, and nothing is fetched from anywhere."""
    digests = (hashlib.sha256(text.encode()).digest() for text in scripts)
    allowed = " ".join(f"'sha256-{base64.b64encode(d).decode()}'" for d in digests)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; "
        "img-src data: blob:; font-src data:; base-uri 'none'; form-action 'none'"
    )


def _asset(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")


def charting_library() -> str:
    """The script that draws charts, out of the installed package."""
    package = library("bokeh", "a report with charts")
    folder = Path(package.__file__).parent / "server" / "static" / "js"
    return "\n".join((folder / name).read_text(encoding="utf-8") for name in _CHARTS)
