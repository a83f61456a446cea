"""Prometheus text as tests read it."""

from __future__ import annotations

import re
from math import nan
from urllib.request import urlopen

_ORIGIN = re.compile(r'(model|replica)="[^"]*",?')
_SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}


def unlabelled(text: str) -> str:
    """``text`` without the labels that every sample of a server has."""
    text = _ORIGIN.sub("", text)
    return text.replace(",}", "}").replace("{}", "")


def metric(url: str, name: str) -> float:
    """The sample of this name and these labels that the server at ``url`` tells; NaN where it tells
    none at the moment."""
    with urlopen(f"{url}/metrics", timeout=5) as reply:
        lines = unlabelled(reply.read().decode()).splitlines()
    return next((float(line.split()[-1]) for line in lines if line.startswith(f"{name} ")), nan)


def exported_names(text: str) -> set[str]:
    """The names of all samples there can be, also of metrics that have none yet."""
    names = set()
    for _, name, kind in re.findall(r"^# (TYPE) (\S+) (\w+)$", text, re.MULTILINE):
        base = name.removesuffix("_total") if kind == "counter" else name
        names |= {base + suffix for suffix in _SUFFIXES[kind]}
    return names
