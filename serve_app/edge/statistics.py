"""What a device counts of its link, for ``/metrics`` and ``lexshard bench edge``."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from lexshard.actors.messages import EngineStatistics
from lexshard.actors.statistic import counter


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeStatistics(EngineStatistics):
    """Those of an engine that a device has, and those of its link."""

    edge_uplink_bits: int = field(default=0, metadata=counter("Bits of messages to the server"))
    edge_downlink_bits: int = field(default=0, metadata=counter("Bits of messages from the server"))
    edge_guess_bits: int = field(default=0, metadata=counter("Bits of guesses in these messages"))
    edge_encode_seconds: float = field(
        default=0.0, metadata=counter("Seconds to make bits of them")
    )
    edge_answers: int = field(
        default=0, metadata=counter("Messages of the server that told of tokens")
    )
    edge_rejections: int = field(
        default=0, metadata=counter("Guesses that were tested and did not stand")
    )
    edge_lost_links: int = field(default=0, metadata=counter("Connections that were lost"))
    edge_dropped_mass: float = field(
        default=0.0, metadata=counter("Mass that conformal control dropped, summed over tokens")
    )
    edge_dropped_bound: float = field(
        default=0.0, metadata=counter("What that sum could not exceed, by the bound of each text")
    )
    edge_bounds_broken: int = field(
        default=0, metadata=counter("Times that a text dropped more than its bound")
    )


class EdgeCounters:
    """What is counted while texts are said, by the names of `EdgeStatistics`."""

    def __init__(self) -> None:
        self._counted: Counter[str] = Counter()

    def add(self, **amounts: Any) -> None:
        self._counted.update(amounts)

    def statistics(self) -> EdgeStatistics:
        counted: dict[str, Any] = {**self._counted}
        return EdgeStatistics(**counted)
