"""The options of ``lexshard bench sampler``, and the controls that it switches on and off."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path

from lexshard.actors.messages import SamplingParameters
from lexshard.loadtest.bench.frame import add_common_arguments, names_of, numbers

VLLM, NAIVE = "vllm", "naive torch"
OFFLOADED, WITH_MAXIMA = "offloaded", "offloaded + maxima"
CANDIDATES, COLD = "certified candidates", "candidates, cold caches"
VARIANTS = (NAIVE, OFFLOADED, WITH_MAXIMA, CANDIDATES, COLD)
VOCABULARY, BATCH, HISTORY, CONTROLS = (151_936,), (1, 8, 32), (400,), ("all", "none")


@dataclass(frozen=True, slots=True)
class Setting(SamplingParameters):
    """How every row of a case is sampled; the defaults are everything off."""

    name: str = "none"
    max_tokens: int = 1 << 30

    @property
    def penalised(self) -> bool:
        return any(getattr(self, name) != getattr(OFF, name) for name in _PENALTIES)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def asks_for(self) -> str:
        """What kind of certificate a row of this setting asks of the head."""
        if self.greedy:
            return "top1"
        if self.top_k:
            return "topk"
        if self.min_p:
            return "minp"
        return "nucleus" if self.top_p < 1 else "gumbel"


OFF = Setting()
ALL = Setting(
    name="all",
    temperature=0.8,
    top_k=50,
    top_p=0.95,
    min_p=0.05,
    repetition_penalty=1.1,
    frequency_penalty=0.3,
    presence_penalty=0.2,
)
_PENALTIES = ("repetition_penalty", "frequency_penalty", "presence_penalty")
_SWITCHES: dict[str, tuple[str, ...]] = {
    "penalties": _PENALTIES,
    **{name.removesuffix("_penalty"): (name,) for name in (*_PENALTIES, "temperature")},
    "minp": ("min_p",),
    "topk": ("top_k",),
    "topp": ("top_p",),
}


def _only(name: str) -> Setting:
    on = {field: getattr(ALL, field) for field in _SWITCHES[name]}
    return replace(OFF, name=name, **on)


def _without(name: str) -> Setting:
    off = {field: getattr(OFF, field) for field in _SWITCHES[name]}
    return replace(ALL, name=f"all-but-{name}", **off)


# All controls, none, greedy; each one alone, and all but each one.
SETTINGS = {
    setting.name: setting
    for setting in (
        ALL,
        OFF,
        Setting(name="greedy", temperature=0.0),
        *map(_only, _SWITCHES),
        *map(_without, _SWITCHES),
    )
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--vocabulary", "-V", type=numbers, default=VOCABULARY, metavar="N,N")
    add("--batch", type=numbers, default=BATCH, metavar="N,N")
    add(
        "--controls",
        type=names_of(SETTINGS),
        default=CONTROLS,
        metavar="A,B",
        help=f"{', '.join(SETTINGS)} (default {','.join(CONTROLS)})",
    )
    add("--history", type=numbers, default=HISTORY, metavar="N,N", help="tokens before step 0")
    add(
        "--variants",
        type=names_of(VARIANTS),
        default=VARIANTS,
        metavar="A,B",
        help=f"{', '.join(VARIANTS)} (default all)",
    )
    add(
        "--vllm-python",
        type=Path,
        metavar="PATH",
        help="interpreter of an environment that has vLLM for CPUs: measure against its sampler",
    )
    add_common_arguments(parser, runs=9, quick_runs=3, seed=17)
