"""Tables as commands print them."""

from __future__ import annotations

from collections.abc import Sequence


def table(names: str, *rows: Sequence[str], left: Sequence[int] = (0,)) -> list[str]:
    """Columns as wide as their widest cell; those in ``left`` begin flush left."""
    lines = [names.split(","), *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    aligned = [
        [
            cell.ljust(width) if place in left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        for line in lines
    ]
    return [("  " + "  ".join(line)).rstrip() for line in aligned]
