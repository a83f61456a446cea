"""The metrics of several servers as one text, for Prometheus asks an address, not a replica."""

from __future__ import annotations

from collections.abc import Iterable


def merged_metrics(texts: Iterable[bytes]) -> bytes:
    """``texts`` in Prometheus' text format, whose samples differ in a label, as one: each metric
    with its description once and the samples of all, as the format wants it."""
    described: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for text in texts:
        name = ""
        for line in text.decode().splitlines():
            if not line.startswith("# "):
                samples[name].append(line)
                continue
            name = line.split(" ", 3)[2]
            samples.setdefault(name, [])
            lines = described.setdefault(name, [])
            if line not in lines:
                lines.append(line)
    told = [line for name, lines in described.items() for line in (*lines, *samples[name])]
    return "".join(f"{line}\n" for line in told).encode()
