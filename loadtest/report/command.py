"""``lexshard report``: a page with plots of what ``--json`` wrote, or the overview of all of it."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

_PARTS = ("machine", "versions", "command", "results", "ratios")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to a parser."""
    add = parser.add_argument
    told = "what --json wrote; without any, the overview of all that --results holds"
    add("files", type=Path, nargs="*", metavar="FILE", help=told)
    add("--results", type=Path, default=Path("docs/results"), metavar="DIR", help="of the overview")
    add(
        "--out",
        type=Path,
        default=Path("docs/reports/index.html"),
        metavar="PAGE",
        help="an HTML file, default docs/reports/index.html",
    )


def run(arguments: argparse.Namespace) -> int:
    """Writes the page; 1 where a file is no report, 2 where something is missing."""
    if importlib.util.find_spec("matplotlib") is None:
        print(
            "lexshard report: needs matplotlib: pip install '.[load]' in a checkout",
            file=sys.stderr,
        )
        return 2
    from lexshard.loadtest.report.overview import write_overview
    from lexshard.loadtest.report.page import write_page

    try:
        if arguments.files:
            write_page([read_report(path) for path in arguments.files], arguments.out)
        elif not arguments.results.is_dir():
            raise ValueError(f"{arguments.results} is no folder: name files, or --results DIR")
        elif missing := write_overview(arguments.results, arguments.out):
            print(f"missing: {', '.join(missing)}")
    except (OSError, ValueError) as error:
        print(f"lexshard report: {error}", file=sys.stderr)
        return 1
    print(f"written: {arguments.out}")
    return 0


def read_report(path: Path) -> dict[str, Any]:
    """What a benchmark wrote with ``--json``.

    Raises:
        ValueError: the file is something else.
    """
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: no JSON ({error})") from None
    if not isinstance(report, dict) or not all(part in report for part in _PARTS):
        raise ValueError(f"{path}: not what --json writes, which has {', '.join(_PARTS)}")
    return report
