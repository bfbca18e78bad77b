"""Makes docs/onnx-ops.md, the table of supported operators: from the table that runs them.

python tests/importers/onnx_ops_page.py > docs/onnx-ops.md
"""

from __future__ import annotations

import sys
from typing import Any

from onnx import defs
from onnx_exclusions import EXCLUDED
from onnx_node_cases import cases

from rlx.onnx.table import Row, operators

HEAD = """# ONNX operators

What `rlx.load("model.onnx")` runs, by domain. *Device*: part of compiled graphs. *Host*: between
graphs, because the result's shape depends on data, or it computes with strings. *Function*: the
`onnx` package defines it by other operators, which run in its place. The column *since* has the
opset versions whose rules are followed; older files get the newest that is not above their own.
Made by `python tests/importers/onnx_ops_page.py` from the table that runs them. How to load a
model, and how to add an operator: [ONNX](onnx.md).
"""
TITLES = {
    "": "ai.onnx", "ai.onnx.ml": "ai.onnx.ml", "com.microsoft": "com.microsoft",
    "ai.onnx.preview": "ai.onnx.preview", "ai.onnx.preview.training": "ai.onnx.preview.training",
}  # fmt: skip


def schemas() -> dict[tuple[str, str], Any]:
    """The newest of each operator that the package knows."""
    return {(s.domain, s.name): s for s in defs.get_all_schemas() if not s.deprecated}


def rows_of(domain: str) -> list[str]:
    table, known = operators(), schemas()
    names = sorted({n for d, n in [*table, *known] if d == domain})
    return [
        f"| `{name}` | {_where(table.get((domain, name)), known.get((domain, name)))} |"
        for name in names
    ]


def _where(rows: list[Row] | None, schema: Any) -> str:
    if rows:
        place = "host" if rows[-1].on_host else "device"
        return f"{place} | {', '.join(str(row.since) for row in rows)}"
    if schema.has_function or schema.has_context_dependent_function:
        return f"function | {schema.since_version}"
    return "no | "


def page() -> str:
    parts = [HEAD]
    for domain, title in TITLES.items():
        body = "\n".join(rows_of(domain))
        parts.append(f"\n## {title}\n\n| operator | runs on | since |\n|---|---|---|\n{body}\n")
    total = len(cases())
    parts.append(
        f"\n## Conformance\n\nThe `onnx` package generates {total} tests of operators. "
        f"{total - len(EXCLUDED)} pass on the CPU, {100 * (1 - len(EXCLUDED) / total):.1f} %.\n\n"
        "| not passed | because the test |\n|---|---|\n"
    )
    parts.append("".join(f"| `{name}` | {why} |\n" for name, why in sorted(EXCLUDED.items())))
    return "".join(parts)


if __name__ == "__main__":
    sys.stdout.write(page())
