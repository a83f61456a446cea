"""``lexshard status``: every role of a running server, with its process and what it has done."""

from __future__ import annotations

import argparse
import http.client
import json
import os
import sys
from datetime import datetime
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import ProxyHandler, Request, build_opener

from lexshard.serve_app.start.timings import head_table, thread_table

KEY_VARIABLE = "LEXSHARD_API_KEY"
ANSWER_SECONDS = 10.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to a parser."""
    add_server_address(parser)
    parser.add_argument("--json", action="store_true", help="print the answer as it is")
    parser.add_argument(
        "--timings", action="store_true", help="what was timed at the start, in place of the roles"
    )


def add_server_address(parser: argparse.ArgumentParser) -> None:
    """Where the server is that a command asks."""
    parser.add_argument(
        "--url",
        type=server_address,
        default="http://127.0.0.1:8000",
        help="of the server, or HOST:PORT or :PORT (default %(default)s)",
    )
    parser.epilog = f"A server with API keys is asked with the one in {KEY_VARIABLE}."


def run(arguments: argparse.Namespace) -> int:
    """Print the report; returns the exit status."""
    try:
        report = _ask(arguments.url)
    except HTTPError as error:
        remedy = f": set {KEY_VARIABLE}" if error.code == 401 else ""
        print(f"lexshard: {arguments.url} answers {error.code}{remedy}", file=sys.stderr)
        return 1
    except (OSError, http.client.HTTPException) as error:
        print(f"lexshard: no server answers at {arguments.url}: {reason(error)}", file=sys.stderr)
        return 1
    except ValueError:
        print(f"lexshard: what answers at {arguments.url} is no lexshard server", file=sys.stderr)
        return 1
    if arguments.json:
        print(json.dumps(report, indent=2))
    else:
        print(describe_timings(report) if arguments.timings else describe(report))
    return 0 if report["ready"] else 1


def server_address(text: str) -> str:
    """The type of an argument that is a URL, or what of one a terminal needs: ``host:8000``,
    ``:8000``."""
    url = text if "://" in text else f"http://{'127.0.0.1' if text.startswith(':') else ''}{text}"
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname)
        is_address = is_address and parts.port != 0
    except ValueError:  # of brackets, or of a port
        is_address = False
    if not is_address:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no address: give HOST:PORT, :PORT, or a URL with http:// or https://"
        )
    return url.rstrip("/").removesuffix("/v1")  # as a banner and clients of OpenAI's have it


def reason(error: Exception) -> str:
    """In words, without the names of exceptions."""
    inner = error.reason if isinstance(error, URLError) else error
    if isinstance(inner, OSError) and inner.strerror:
        return inner.strerror[0].lower() + inner.strerror[1:]
    return str(inner) or "it sends no answer"


def own_words(error: HTTPError) -> str | None:
    """Why a server of ours refuses; None where it does not say."""
    try:
        return str(json.loads(error.read())["error"]["message"])
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError):
        return None


def opened(url: str, path: str, data: bytes | None = None, seconds: float | None = None) -> Any:
    """What the server at ``url`` answers, asked with the key of the environment. A server nearby is
    not asked through the proxy of the environment."""
    headers = {} if data is None else {"Content-Type": "application/json"}
    if key := os.environ.get(KEY_VARIABLE):
        headers["Authorization"] = f"Bearer {key}"
    request = Request(url.rstrip("/") + path, data, headers)
    return build_opener(ProxyHandler({})).open(request, timeout=seconds)


def _ask(url: str) -> dict[str, Any]:
    with opened(url, "/status", seconds=ANSWER_SECONDS) as answer:
        report = json.loads(answer.read())
    if not isinstance(report, dict) or not {"ready", "roles"} <= report.keys():
        raise ValueError("it tells of no roles")
    return report


def describe(report: dict[str, Any]) -> str:
    """The report as a page of text."""
    state = "ready" if report["ready"] else f"not ready: {report['reason']}"
    lines = [f"{report['model']}, lexshard {report['version']}: {state}", ""]
    rows = [("role", "host", "node", "process", "device", "what")]
    rows += [
        (
            f"{role['role']} {role['index']}",
            role["host"],
            role["node"][:8] or "-",
            str(role["process_id"]),
            role["device"],
            role["detail"],
        )
        for role in report["roles"]
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines += [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    counters = report["counters"]
    certified = counters["head_certified_rows"] / max(1, counters["head_rows"])
    drafted = counters["draft_accepted_tokens"] / max(1, counters["draft_tokens"])
    queue = report["queue"]
    known = counters["cached_prompt_tokens"] / max(1, counters["finished_prompt_tokens"])
    used = counters["kv_blocks_used"] / max(1, counters["kv_blocks_total"])
    tiers = ", ".join(
        f"{tier} {rows}" for tier, rows in sorted(counters["head_rows_by_tier"].items())
    )
    lines += [
        "",
        f"sequences   {counters['running']} running, {counters['waiting']} waiting, "
        f"{counters['finished']} finished, {counters['cancelled']} cancelled",
        f"queue       {queue['sequences']} of {queue['most_sequences']} sequences admitted, "
        f"{queue['waiting_tokens']} of {queue['most_waiting_tokens']} prompt tokens wait",
        f"tokens      {counters['prompt_tokens']} of prompts, {counters['generated_tokens']} drawn",
        f"KV blocks   {counters['kv_blocks_used']} of {counters['kv_blocks_total']} in use "
        f"({used:.0%}), {counters['kv_blocks_cached']} hold prefixes",
        f"prefixes    {known:.0%} of the prompt tokens of finished sequences were in the cache",
        f"head        {counters['head_rows']} rows, {certified:.1%} by certificate"
        + (f" (screened: {tiers})" if tiers else ""),
        f"drafts      {counters['draft_tokens']} guesses, {drafted:.0%} stood",
        f"lost        {report['engine_restarts']} engines, {counters['shards_lost']} groups of "
        f"shards, {counters['samplers_lost']} samplers",
    ]
    if report["faults"]:
        lines += ["", "last faults"]
        lines += [
            f"  {datetime.fromtimestamp(fault['time']).isoformat(' ', 'seconds')}  {fault['text']}"
            for fault in report["faults"]
        ]
    return "\n".join(lines)


def describe_timings(report: dict[str, Any]) -> str:
    """What the choices of a screen and of the number of threads are based on."""
    tables = {
        "output head": head_table(report["timings"]["head"]),
        "threads": thread_table(report["timings"]["threads"]),
    }
    told = [line for name, table in tables.items() if table for line in (name, *table, "")]
    return (
        "\n".join(told[:-1]) or "nothing was timed: the head and the threads were given, or small"
    )
