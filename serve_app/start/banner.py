"""What a server says of itself once it is ready."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lexshard.actors.hub_cache import in_hub_cache
from lexshard.cluster.config import ServeConfig
from lexshard.serve_app.start.settings import labelled
from lexshard.serve_app.start.timings import told_screens, told_threads


def base_url(config: ServeConfig) -> str:
    """Where a client on this machine reaches the server."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(config.host, config.host)
    host = f"[{host}]" if ":" in host else host
    scheme = "http" if config.ssl_certfile is None else "https"
    return f"{scheme}://{host}:{config.port}"


def banner(config: ServeConfig, information: dict[str, Any], has_chat: bool) -> str:
    """What was decided, and how to ask. ``information`` is an ``EngineInformation`` as a dict."""
    rows = [*_decided(config, information), ("more", _more(config))]
    lines = [line for label, text in rows for line in labelled(label, text)]
    curl = _curl(config, config.model_names[0], has_chat)
    return "\n".join(["", "lexshard is ready", *lines, "", "Try it:", curl, ""])


def _decided(config: ServeConfig, information: dict[str, Any]) -> list[tuple[str, str]]:
    """Labels and texts; an empty text is no line."""
    told = information
    invariant = "batch-invariant" if told["batch_invariant"] else "not batch-invariant"
    # Which sums of products those are: they are others than all other processors'.
    matrices = told["processor"] == "AMX" and told["dtype"] == "bfloat16"
    by_matrices = " by AMX" if matrices else ""
    head = f"{told['head']}, {told['vocabulary_size']:,} tokens"
    if told["head_timings"]:
        head += f"; {told_screens(told['head_timings'])}"
    processes = f", {config.api_processes} API processes" if config.api_processes > 1 else ""
    page = f"; a page to try it: {base_url(config)}/" if config.has_playground else ""
    return [
        ("model", f"{config.model_names[0]} ({_place(told)}, {told['parameters']:,} parameters)"),
        ("device", f"{told['device']}, {told_threads(told['thread_choices'])}"),
        ("GPU", told["accelerator"]),
        ("body", f"{told['body']}, {told['dtype']}{by_matrices}, {invariant}"),
        ("head", head),
        ("decisions", told["decisions"]),
        ("drafts", told["drafts"]),
        (
            "KV cache",
            f"{told['kv_tokens']:,} tokens ({told['kv_bytes'] / 2**20:,.0f} MiB), "
            f"at most {told['max_model_len']:,} of a sequence",
        ),
        ("URL", f"{base_url(config)}/v1{processes}{page}"),
        ("runs", _how_it_runs(config)),
    ]


def _place(told: dict[str, Any]) -> str:
    """The model's folder; of one from the Hub, what it is a folder of."""
    folder = Path(told["model"])
    if in_hub_cache(folder):
        return f"commit {folder.name[:12]} of the Hub"
    return str(told["model"])


def _how_it_runs(config: ServeConfig) -> str:
    if config.on_ray:
        return "on Ray, behind Ray Serve (one engine without Ray, lighter: `make serve`)"
    return "in plain processes (on Ray, with shards and samplers as actors: `make cluster`)"


def _more(config: ServeConfig) -> str:
    return f"lexshard status --url {base_url(config)} (--timings: what was timed at the start)"


def _curl(config: ServeConfig, name: str, has_chat: bool) -> str:
    path, asked = "completions", '"prompt": "Once upon a time"'
    if has_chat:
        path, asked = "chat/completions", '"messages": [{"role": "user", "content": "Hello!"}]'
    key = "  -H 'Authorization: Bearer KEY' \\\n" if config.api_keys else ""
    return (
        f"curl {base_url(config)}/v1/{path} \\\n{key}"
        "  -H 'Content-Type: application/json' \\\n"
        f'  -d \'{{"model": {json.dumps(name)}, "max_tokens": 32,\n       {asked}}}\''
    )
