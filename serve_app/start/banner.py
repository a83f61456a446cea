"""What a server says of itself once it is ready."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from cluster.config import OPTIONS, ServeConfig

LABEL_WIDTH = 9
KINDS_OF_STEPS = {"one": "without top-k", "several": "with top-k"}


def decisions(config: ServeConfig) -> str:
    """The configuration in effect, one option a line."""
    return "\n".join(f"  {key:<24} {value}" for key, value in shown_values(config).items())


def shown_values(config: ServeConfig) -> dict[str, str]:
    """What is said of every option, by its key. Of secrets it is how many there are."""
    values = config.model_dump(by_alias=True)
    shown: dict[str, str] = {}
    for option in OPTIONS:
        value = values[option.key]
        if option.secret:
            shown[option.key] = f"{len(value)} set" if value else "none: open to all"
        else:
            shown[option.key] = "automatic" if value in (None, []) else str(value)
    return shown


def base_url(config: ServeConfig) -> str:
    """Where a client on this machine reaches the server."""
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(config.host, config.host)
    scheme = "http" if config.ssl_certfile is None else "https"
    return f"{scheme}://{host}:{config.port}"


def banner(config: ServeConfig, information: dict[str, Any], has_chat: bool) -> str:
    """``information`` is an ``EngineInformation`` as a dict."""
    name = config.model_names[0]
    invariant = "batch-invariant" if information["batch_invariant"] else "not batch-invariant"
    rows = {
        "model": f"{name} ({information['model']}, {information['parameters']:,} parameters)",
        "device": f"{information['device']}, {_threads(information['thread_choices'])}",
        "GPU": information["accelerator"],
        "dtype": information["dtype"],
        "body": f"{information['body']} ({invariant})",
        "head": f"{information['head']}, {information['vocabulary_size']:,} tokens",
        "decisions": information["decisions"],
        "drafts": information["drafts"],
        "context": f"{information['max_model_len']:,} tokens",
        "KV cache": f"{information['kv_tokens']:,} tokens "
        f"({information['kv_bytes'] / 2**20:,.0f} MiB)",
        "URL": f"{base_url(config)}/v1",
    }
    if config.api_processes > 1:
        rows["HTTP"] = f"{config.api_processes} API processes"
    lines: list[str] = []
    for label, value in rows.items():
        if not value:
            continue
        lines.append(f"  {label:<{LABEL_WIDTH}} {value}")
        if label == "device":
            lines.extend(_thread_table(information["thread_timings"]))
        if label == "head":
            lines.extend(_timing_table(config, information["head_timings"]))
    text = "\n".join(lines)
    return f"\nlexshard is ready\n{text}\n\nTry it:\n{_curl(config, name, has_chat)}\n"


def _threads(choices: Sequence[tuple[int, int]]) -> str:
    """``choices`` are from how many rows in a step on it has how many threads."""
    (_, first), *others = choices
    told = [f"{first} thread{'s' if first > 1 else ''}"]
    told.extend(f"{threads} from {rows} rows on" for rows, threads in others)
    return ", ".join(told)


def _thread_table(timings: Sequence[tuple[int, int, float]]) -> list[str]:
    """What the choice of the number of threads was based on; nothing where it was given."""
    if not timings:
        return []
    counts = sorted({threads for _, threads, _ in timings})
    taken = {(rows, threads): each for rows, threads, each in timings}
    table = [
        "milliseconds per step, by rows in the step and threads; more only where clearly faster:",
        "  ".join([f"{'rows':>4}", *(f"{threads:>8}" for threads in counts)]),
    ]
    for rows in sorted({rows for rows, _, _ in timings}):
        cells = (f"{_milliseconds(taken.get((rows, threads))):>8}" for threads in counts)
        table.append("  ".join([f"{rows:>4}", *cells]))
    return _indented(table)


def _indented(table: Sequence[str]) -> list[str]:
    return [f"  {'':<{LABEL_WIDTH}} {line}" for line in table]


def _timing_table(config: ServeConfig, timings: Sequence[tuple[str, int, str, float]]) -> list[str]:
    """What the choice of a screen was based on. A screen that had fallen far behind at fewer rows
    was not timed any more, nor one that was left alone."""
    if not timings:
        return []
    screens = list(dict.fromkeys(screen for _, _, screen, _ in timings))
    kinds = list(dict.fromkeys(kind for kind, _, _, _ in timings))
    taken = {(kind, rows, screen): each for kind, rows, screen, each in timings}
    widths = [max(len(screen), 8) for screen in screens]
    group = sum(widths) + 2 * (len(widths) - 1)
    chosen = "fastest certified one" if config.head == "certified" else "fastest"
    header = [f"{screen:>{width}}" for screen, width in zip(screens, widths, strict=True)]
    table = [
        f"milliseconds per step, by rows in the step and screen; the {chosen} was chosen:",
        "  ".join([f"{'':>4}", *(f"{KINDS_OF_STEPS[kind]:>{group}}" for kind in kinds)]),
        "  ".join([f"{'rows':>4}", *header * len(kinds)]),
    ]
    for rows in dict.fromkeys(rows for _, rows, _, _ in timings):
        cells = (
            f"{_milliseconds(taken.get((kind, rows, screen))):>{width}}"
            for kind in kinds
            for screen, width in zip(screens, widths, strict=True)
        )
        table.append("  ".join([f"{rows:>4}", *cells]))
    return _indented(table)


def _milliseconds(taken: float | None) -> str:
    return "-" if taken is None else f"{taken:.2f}"


def _curl(config: ServeConfig, name: str, has_chat: bool) -> str:
    body: dict[str, Any] = {"model": name, "max_tokens": 32}
    path = "completions"
    if has_chat:
        path = "chat/completions"
        body["messages"] = [{"role": "user", "content": "Hello!"}]
    else:
        body["prompt"] = "Once upon a time"
    key = "  -H 'Authorization: Bearer KEY' \\\n" if config.api_keys else ""
    return (
        f"curl {base_url(config)}/v1/{path} \\\n{key}"
        "  -H 'Content-Type: application/json' \\\n"
        f"  -d '{json.dumps(body)}'"
    )
