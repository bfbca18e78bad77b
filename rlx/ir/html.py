"""HTML cards for notebooks: a title, a small table and collapsible text."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

_MOST_LINES = 400  # of expanded text; a page with a whole model is slow
_STYLE = "text-align:left;font-family:monospace"


def card(title: str, rows: Mapping[str, object], text: str = "", label: str = "") -> str:
    """An HTML table of `rows` under `title`, and collapsible `text` with the summary `label`."""
    cells = "".join(
        f'<tr><td style="text-align:left">{escape(str(name))}</td>'
        f'<td style="{_STYLE}">{escape(str(value))}</td></tr>'
        for name, value in rows.items()
    )
    return f"<div><b>{escape(title)}</b><table>{cells}</table>{_collapsed(text, label)}</div>"


def _collapsed(text: str, label: str) -> str:
    if not text:
        return ""
    lines = text.splitlines()
    if len(lines) > _MOST_LINES:
        lines = [*lines[:_MOST_LINES], f"… {len(lines) - _MOST_LINES} more lines"]
    shown = escape("\n".join(lines))
    return f"<details><summary>{escape(label)}</summary><pre>{shown}</pre></details>"
