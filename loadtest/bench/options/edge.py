"""The options of ``lexshard bench edge``."""

from __future__ import annotations

import argparse
from typing import get_args

from lexshard.actors.edge.frames import EdgeMode
from lexshard.loadtest.bench.frame import add_common_arguments, count, names_of, numbers

MODES: tuple[str, ...] = get_args(EdgeMode)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", default="models/lexshard-demo", metavar="DIR", help="of the server")
    add("--draft", default="models/lexshard-demo-draft", metavar="DIR", help="of the device")
    add("--modes", type=names_of(MODES), default=MODES, metavar="M,M", help=", ".join(MODES))
    add("--rates", type=numbers, default=(10, 100, 1000), metavar="N,N", help="kbit/s, each way")
    add("--round-trips", type=numbers, default=(20, 100, 300), metavar="N,N", help="ms")
    add("--jitter", type=float, default=0.0, metavar="MS", help="of a packet, either way")
    add("--loss", type=float, default=0.0, metavar="SHARE", help="of packets (0)")
    add("--temperatures", type=_floats, default=(0.8,), metavar="T,T", help="default 0.8")
    add("--sizes", type=numbers, default=(32,), metavar="K,K", help="of ksqs (32)")
    add("--alphas", type=_floats, default=(0.05,), metavar="A,A", help="of csqs (0.05)")
    add("--budgets", type=numbers, default=(5000,), metavar="B,B", help="bits of a batch (5000)")
    add("--thrift", type=float, default=0.1, help="see lexshard edge")
    add("--prompts", type=count, default=4, metavar="N", help="of a run (4)")
    add("--tokens", type=count, default=64, metavar="N", help="to generate after each (64)")
    add_common_arguments(parser, runs=5, quick_runs=1, seed=11)


def _floats(text: str) -> tuple[float, ...]:
    try:
        return tuple(map(float, text.split(",")))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: give numbers, for example 0,0.8") from None
