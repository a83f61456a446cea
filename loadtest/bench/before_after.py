"""Two checkouts of lexshard take turns at the same benchmark: did a change cost speed?

    git worktree add ../before COMMIT
    python -m lexshard.loadtest.bench.before_after ../before . --rounds 6 -- engine --quick

Every round runs ``lexshard bench`` once in each checkout, by turns first, with the interpreter that
runs this. Compared are the bench's own ratios, how many times faster ours is than ``generate`` or
torch, which no change of ours touches and which take turns with ours run by run: a slow minute of
the machine hits both and leaves the ratio alone.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from lexshard.loadtest.bench.record import format_table, percentile

Ratios = dict[tuple[str, str], float]  # (case, against whom): how many times faster ours is


def run_bench(checkout: Path, arguments: Sequence[str]) -> Ratios:
    """The ratios of one ``lexshard bench`` in a checkout.

    Raises RuntimeError with the end of its error output if it fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.json"
        command = [
            sys.executable,
            "-m",
            "lexshard.serve_app.cli",
            "bench",
            *arguments,
            "--json",
            str(path),
        ]
        finished = subprocess.run(
            command,
            cwd=checkout,
            env={**os.environ, "PYTHONPATH": str(checkout), "PYTHONSAFEPATH": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        if finished.returncode:
            raise RuntimeError(f"{checkout}: {finished.stderr[-2000:]}")
        report = json.loads(path.read_text(encoding="utf-8"))
    return {
        (", ".join(f"{key} {value}" for key, value in each["case"].items()), each["against"]): each[
            "ratio"
        ]
        for each in report["ratios"]
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--rounds", type=int, default=6, metavar="N")
    parser.add_argument("bench", nargs="+", help="after --: engine, head or sampler and options")
    arguments = parser.parse_args()
    checkouts = (arguments.before.resolve(), arguments.after.resolve())
    rounds: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for index in range(arguments.rounds):
        order = checkouts if index % 2 == 0 else checkouts[::-1]
        measured = {checkout: run_bench(checkout, arguments.bench) for checkout in order}
        before, after = (measured[checkout] for checkout in checkouts)
        for key in before.keys() & after.keys():
            rounds[key].append((before[key], after[key]))
        print(f"round {index + 1} of {arguments.rounds}", file=sys.stderr, flush=True)
    rows = []
    for (case, against), pairs in sorted(rounds.items()):
        changes = [after / before for before, after in pairs]
        middle = [percentile(values, 50) for values in zip(*pairs, strict=True)]
        spread = [percentile(changes, percent) for percent in (50, 10, 90)]
        cells = [f"{value:,.4g}" for value in middle] + [f"{value:.3f}" for value in spread]
        rows.append([case, against, *cells])
    headers = ["case", "faster than", "before", "after", "after/before", "p10", "p90"]
    print(format_table(headers, rows))


if __name__ == "__main__":
    main()
