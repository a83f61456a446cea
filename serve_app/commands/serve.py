"""``lexshard serve``: from flags to a server that runs until it is told to stop."""

from __future__ import annotations

import argparse
import http.client
import json
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

from cluster.config import ConfigError, ServeConfig, load_config
from serve_app.banner import banner, decisions
from serve_app.launch import check_port, running_server

POLL_SECONDS = 0.5


class StartupError(Exception):
    """The server cannot start, with one line that says why."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags left out leave no trace, so that the configuration file can speak."""

    def add(flag: str, **options: Any) -> None:
        parser.add_argument(flag, default=argparse.SUPPRESS, **options)

    add("--config", metavar="FILE", help="YAML file of these options, named with underscores")
    add("--model", metavar="FOLDER", help="model folder (safetensors, config.json, tokenizer.json)")
    add("--served-model-name", action="append", metavar="NAME", help="name for clients; repeatable")
    add("--dtype", help="auto, float32 or bfloat16")
    add("--device", help="auto, cpu or cuda: where the model body computes")
    add("--max-model-len", type=int, metavar="TOKENS", help="longest prompt plus output")
    add("--kv-cache-memory", metavar="BYTES", help="memory of the KV cache, for example 4GiB")
    add("--threads", type=int, help="threads of the engine")
    add("--body", help="auto, fused or general")
    add("--head", help="auto, certified, paper or dense: how tokens are found, never which")
    add(
        "--tier",
        action="append",
        dest="tiers",
        help="int8, int4, int4-dither or 1-bit: what may screen, repeatable (default int8, int4)",
    )
    add("--index", metavar="FILE", help="vocabulary index (default: beside the model)")
    add("--samplers", type=int, metavar="N", help="decide tokens beside the forward pass (0: not)")
    add("--sampler-threads", type=int, metavar="T", help="threads of each sampler (default 1)")
    add("--sampler-placement", help="threads, processes (default) or ray: where samplers run")
    add("--hot-vocabulary", metavar="FILE", help="tokens to look at first (lexshard hotset build)")
    add("--fast-prefill", action="store_true", help="faster prompts, not batch-invariant")
    add("--max-batch-size", type=int, metavar="N", help="sequences in one engine step")
    add("--max-running-requests", type=int, metavar="N", help="sequences admitted at once")
    add("--max-waiting-tokens", type=int, metavar="N", help="prompt tokens that may wait")
    add("--max-requests-per-client", type=int, metavar="N", help="open requests of one client")
    add("--api-key", action="append", dest="api_keys", metavar="KEY", help="repeatable")
    add("--host", help="address to listen on (default 127.0.0.1)")
    add("--port", type=int, help="port to listen on (default 8000)")


def run(arguments: argparse.Namespace) -> int:
    """Serves until SIGINT or SIGTERM; the process's exit code."""
    flags = {key: value for key, value in vars(arguments).items() if value is not None}
    try:
        config = load_config(flags.pop("config", None), flags)
        check(config)
    except (ConfigError, StartupError) as error:
        print(f"lexshard: {error}", file=sys.stderr)
        return 2
    stop_on_signals()
    print(f"lexshard serve with:\n{decisions(config)}", flush=True)
    try:
        serve_until_stopped(config)
    except KeyboardInterrupt:
        print("lexshard: stopped", flush=True)
        return 0
    except StartupError as error:
        print(f"lexshard: {error}", file=sys.stderr)
        return 1
    return 0


def stop_on_signals() -> None:
    """Makes the first SIGINT or SIGTERM a KeyboardInterrupt; shutting down ignores further ones."""

    def stop(signal_number: int, frame: FrameType | None) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)


def check(config: ServeConfig) -> None:
    """What can be known to be wrong before anything is started.

    Raises:
        StartupError: no model or hot vocabulary there, or the port is taken.
    """
    folder = Path(config.model)
    if not folder.is_dir():
        raise StartupError(f"no model folder at {config.model}")
    for name in ("config.json", "tokenizer.json"):
        if not (folder / name).is_file():
            raise StartupError(f"{config.model} is no model folder: it has no {name}")
    if config.hot_vocabulary is not None and not Path(config.hot_vocabulary).is_file():
        raise StartupError(f"no hot vocabulary at {config.hot_vocabulary}")
    try:
        check_port(config.host, config.port)
    except OSError as error:
        raise StartupError(
            f"cannot listen on {config.host} port {config.port}: {error.strerror}"
        ) from error


def serve_until_stopped(config: ServeConfig) -> None:
    """Raises:
    StartupError: the server or its engine could not start.
    KeyboardInterrupt: it was told to stop; everything has been shut down.
    """
    print("starting Ray and the engine ...", flush=True)
    try:
        with running_server(config) as handle:
            stop_on_signals()  # again: starting Ray has put its own handler there
            wait_until_ready(config)
            information = handle.information.remote().result()
            has_chat = handle.has_chat_template.remote().result()
            print(banner(config, information, has_chat), flush=True)
            while True:
                signal.pause()
    except RuntimeError as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        raise StartupError(f"the server could not start: {lines[-1].strip()}") from error


def wait_until_ready(config: ServeConfig) -> None:
    """Polls ``/health``, telling every new reason for waiting.

    Raises:
        StartupError: the engine will never be ready.
    """
    told = ""
    while True:
        status, reason, hopeful = _health(config)
        if status == 200:
            return
        if not hopeful:
            raise StartupError(reason)
        if reason != told:
            print(reason, flush=True)
            told = reason
        time.sleep(POLL_SECONDS)


def _health(config: ServeConfig) -> tuple[int, str, bool]:
    """Status, reason, and whether waiting makes sense."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(config.host, config.host)
    connection = http.client.HTTPConnection(host, config.port, timeout=10)
    try:
        connection.request("GET", "/health")
        response = connection.getresponse()
        body = json.loads(response.read())
    except (OSError, http.client.HTTPException, json.JSONDecodeError) as error:
        return 0, f"not reachable yet: {error}", True
    finally:
        connection.close()
    if response.status == 200:
        return 200, "", True
    return response.status, body["error"]["message"], "Retry-After" in response.headers
