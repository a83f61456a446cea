"""Which of transformers' causal language models are served.

Every family is tried in a process of its own with a tiny model of random weights: served and equal
to transformers' own forward pass (batch-invariant or not), or refused with a reason. Exits with 1
where one is served and not equal, or ends in anything but a refusal.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from lexshard.loadtest.model_families.report import write_section
from lexshard.loadtest.model_families.sweep import families, sweep


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m lexshard.loadtest.model_families",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("family", nargs="*", help="families to try (default: all)")
    parser.add_argument("--at-once", type=int, default=2, metavar="N", help="processes (2)")
    parser.add_argument(
        "--markdown", type=Path, metavar="FILE", help="write the lists between the file's marks"
    )
    arguments = parser.parse_args()
    outcomes = sweep(
        arguments.family or families(),
        at_once=arguments.at_once,
        tell=lambda each: print(
            f"{each.family:<25} {each.verdict:<10} {each.reason}".rstrip(), flush=True
        ),
    )
    if arguments.markdown:
        write_section(arguments.markdown, outcomes)
    return int(any(outcome.verdict in ("wrong", "broken") for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
