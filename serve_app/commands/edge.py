"""``lexshard edge``: an OpenAI endpoint on this device, whose draft model a server verifies."""

from __future__ import annotations

import argparse
import os
from typing import get_args

from lexshard.actors.configuration import DraftHeadChoice
from lexshard.actors.edge.frames import MOST_GUESSES, EdgeMode
from lexshard.cluster.config_sources import ConfigError
from lexshard.cluster.models.folders import model_folder
from lexshard.cluster.models.progress import tell
from lexshard.serve_app.commands.argument_types import at_least

REFUSALS = (ConfigError, ValueError, OSError)
KEY_VARIABLE = "LEXSHARD_CLOUD_KEY"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to a parser."""
    parser.add_argument(
        "--cloud",
        required=True,
        metavar="URL",
        help=f"of a lexshard server (its key: {KEY_VARIABLE})",
    )
    parser.add_argument(
        "--draft", required=True, metavar="MODEL", help="folder, or ORG/NAME on the Hub"
    )
    parser.add_argument(
        "--mode",
        choices=get_args(EdgeMode),
        default="same-token",
        help="what is sent of a guess: its token (the text is the server's own, the default), or "
        "what it was drawn from: above a threshold, of K tokens, of all",
    )
    parser.add_argument("--host", default="127.0.0.1", help="to listen on (default 127.0.0.1)")
    parser.add_argument("--port", type=at_least(1), default=8100, help="default 8100")
    parser.add_argument(
        "--offline",
        choices=("refuse", "draft"),
        default="refuse",
        help="while the server is away: refuse (503, the default), or answer with the draft model "
        "alone, which every reply says ('offline': true)",
    )
    parser.add_argument(
        "--longest", type=at_least(1), default=16, metavar="N", help="guesses of a batch (16)"
    )
    parser.add_argument(
        "--budget-bits", type=at_least(1), default=5_000, metavar="N", help="of a batch (5000)"
    )
    parser.add_argument(
        "--thrift",
        type=float,
        default=0.1,
        metavar="P",
        help="how likely a guess must be to be drafted ahead: 0 saves time, 1 energy (0.1)",
    )
    parser.add_argument(
        "--size", type=at_least(1), default=32, metavar="K", help="tokens of ksqs (32)"
    )
    parser.add_argument(
        "--resolution", type=at_least(1), default=100, metavar="L", help="parts of a whole (100)"
    )
    parser.add_argument(
        "--alpha", type=float, default=0.05, help="mass that csqs may drop on the average (0.05)"
    )
    parser.add_argument("--eta", type=float, default=0.01, help="learning rate of csqs (0.01)")
    parser.add_argument(
        "--first-threshold", type=float, default=0.01, metavar="BETA", help="of csqs (0.01)"
    )
    parser.add_argument(
        "--draft-head",
        choices=get_args(DraftHeadChoice),
        default="auto",
        help="as of lexshard serve",
    )
    parser.add_argument("--log-format", choices=("text", "json"), default="text")


def run(arguments: argparse.Namespace) -> int:
    """Answers until SIGINT or SIGTERM; the process's exit code."""
    if not arguments.cloud.startswith(("http://", "https://")):
        raise ValueError(f"--cloud {arguments.cloud}: give an address that begins with http")
    folder = model_folder(arguments.draft, tell)
    from lexshard.serve_app.edge.client import EdgeSettings
    from lexshard.serve_app.edge.server import EdgeServer

    settings = EdgeSettings(
        mode=arguments.mode,
        size=arguments.size,
        resolution=arguments.resolution,
        budget_bits=arguments.budget_bits,
        longest=arguments.longest,
        thrift=arguments.thrift,
        alpha=arguments.alpha,
        eta=arguments.eta,
        first_threshold=arguments.first_threshold,
    )
    settings.threshold()  # what bounds nothing is refused before anything is loaded
    if arguments.longest > MOST_GUESSES or not 0 <= arguments.thrift <= 1:
        raise ValueError(f"--longest is at most {MOST_GUESSES}, --thrift from 0 to 1")
    return EdgeServer(
        arguments.cloud,
        str(folder),
        settings,
        key=os.environ.get(KEY_VARIABLE),
        host=arguments.host,
        port=arguments.port,
        offline=arguments.offline == "draft",
        draft_head=arguments.draft_head,
        log_format=arguments.log_format,
    ).serve()
