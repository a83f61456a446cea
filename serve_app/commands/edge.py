"""The options of ``lexshard edge``."""

from __future__ import annotations

import argparse
from functools import partial
from typing import get_args

from lexshard.actors.configuration import DraftHeadChoice
from lexshard.actors.edge.frames import EdgeMode
from lexshard.cluster.config_sources import CLOUD_KEY
from lexshard.serve_app.commands.argument_types import at_least
from lexshard.serve_app.commands.status import server_address

MODES = "sent of a guess: its token (default), or what it was drawn from: what is likely, K, all"
OFFLINE = "while the server is away: 503 (default), or the draft model answers alone, and says so"
THRIFT = "how likely a guess must be to be drafted ahead: 0 saves time, 1 energy (0.1)"
CLOUD = f"of a lexshard server (its key: {CLOUD_KEY})"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to a parser."""
    add, count = parser.add_argument, at_least(1)
    add("--cloud", required=True, type=server_address, metavar="URL", help=CLOUD)
    add("--draft", required=True, metavar="MODEL", help="folder, or ORG/NAME on the Hub")
    add("--host", default="127.0.0.1", help="to listen on (default 127.0.0.1)")
    add("--port", type=count, default=8100, help="default 8100")
    add("--offline", choices=("refuse", "draft"), default="refuse", help=OFFLINE)
    add("--draft-head", choices=get_args(DraftHeadChoice), default="auto", help="as of serve")
    add("--log-format", choices=("text", "json"), default="text")
    own = partial(add, default=argparse.SUPPRESS)  # those of `EdgeSettings` have theirs there
    own("--mode", choices=get_args(EdgeMode), help=MODES)
    own("--longest", type=count, metavar="N", help="guesses of a batch (16)")
    own("--budget-bits", type=count, metavar="N", help="of a batch (5000)")
    own("--thrift", type=float, metavar="P", help=THRIFT)
    own("--size", type=count, metavar="K", help="tokens of ksqs (32)")
    own("--resolution", type=count, metavar="L", help="parts of a whole (100)")
    own("--alpha", type=float, help="mass that csqs may drop on the average (0.05)")
    own("--eta", type=float, help="learning rate of csqs (0.01)")
    own("--first-threshold", type=float, metavar="BETA", help="of csqs (0.01)")
