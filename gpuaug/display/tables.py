"""HTML tables for notebooks."""

from __future__ import annotations

import html
from collections.abc import Sequence

from gpuaug.display.sheet import printable


def table(rows: Sequence[Sequence[str]], *, head: Sequence[str] = ()) -> str:
    """An HTML table of texts. Without a ``head``, the first column is bold."""
    lines = [f"<tr>{''.join(f'<th>{_cell(text)}</th>' for text in head)}</tr>"] if head else []
    for row in rows:
        kinds = ["td" if head else "th", *["td"] * (len(row) - 1)]
        cells = (
            f'<{kind} style="text-align: left">{_cell(text)}</{kind}>' for kind, text in zip(kinds, row, strict=True)
        )
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return f"<table>{''.join(lines)}</table>"


def _cell(text: str) -> str:
    return "<br>".join(html.escape(printable(line)) for line in text.split("\n"))
