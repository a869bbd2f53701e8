"""A generation as a notebook shows it."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import Final

from ckptfmt.engine.opened import Opened

ROWS_MAX: Final = 20
"""So many tensors are listed, the largest first."""


def html_of(opened: Opened) -> str:
    """A table of what the generation is, and one of its largest tensors. Reads nothing."""
    info, index, table = opened.info, opened.index, opened.manifest.tensors
    sizes = index.tensor_bytes
    largest = sorted(range(len(sizes)), key=lambda row: -sizes[row])[:ROWS_MAX]
    facts = [
        ("run", info.run),
        ("step", f"{info.step:,}"),
        ("committed", "" if info.committed_at is None else f"{info.committed_at:%Y-%m-%d %H:%M:%S} UTC"),
        ("size", f"{opened.manifest.nbytes:,} bytes in {len(table.name):,} tensors"),
        ("saved by", opened.ranks_text),
        ("tags", ", ".join(info.tags)),
        ("key", info.key),
    ]
    rows = [
        (
            table.name[row] + (f" (rank {table.rank[row]})" if table.rank[row] >= 0 else ""),
            table.dtype[row],
            " × ".join(map(str, table.shape[row])) or "scalar",
            f"{sizes[row]:,}",
        )
        for row in largest
    ]
    left = len(sizes) - len(largest)
    return (
        f"<div><strong>Generation #{info.id}</strong>"
        f"<table>{''.join(_row(pair, head=True) for pair in facts if pair[1])}</table>"
        f"<table><thead><tr><th>tensor</th><th>dtype</th><th>shape</th><th>bytes</th></tr></thead>"
        f"<tbody>{''.join(_row(row) for row in rows)}</tbody></table>"
        f"{f'<p>and {left:,} smaller tensors</p>' if left else ''}</div>"
    )


def _row(cells: Iterable[str], *, head: bool = False) -> str:
    first, *rest = map(escape, cells)
    mark = "th" if head else "td"
    return (
        f'<tr><{mark} style="text-align: left">{first}</{mark}>'
        + "".join(f"<td>{cell}</td>" for cell in rest)
        + "</tr>"
    )
