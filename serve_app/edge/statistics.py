"""What a device counts of its link, for ``/metrics`` and ``lexshard bench edge``."""

from __future__ import annotations

from dataclasses import dataclass, field

from lexshard.actors.edge.threshold import ConformalThreshold
from lexshard.actors.messages import EngineStatistics
from lexshard.actors.statistic import counter


@dataclass(frozen=True, slots=True)
class EdgeStatistics(EngineStatistics):
    """Those of an engine that a device has, and those of its link."""

    edge_uplink_bits: int = field(
        default=0, kw_only=True, metadata=counter("Bits of messages to the server")
    )
    edge_downlink_bits: int = field(
        default=0, kw_only=True, metadata=counter("Bits of messages from the server")
    )
    edge_answers: int = field(
        default=0, kw_only=True, metadata=counter("Messages of the server that told of tokens")
    )
    edge_rejections: int = field(
        default=0, kw_only=True, metadata=counter("Guesses that were tested and did not stand")
    )
    edge_lost_links: int = field(
        default=0, kw_only=True, metadata=counter("Connections that were lost")
    )
    edge_dropped_mass: float = field(
        default=0.0,
        kw_only=True,
        metadata=counter("Mass that conformal control dropped, summed over tokens"),
    )
    edge_dropped_bound: float = field(
        default=0.0,
        kw_only=True,
        metadata=counter("What that sum could not exceed, by the bound of each text"),
    )
    edge_bounds_broken: int = field(
        default=0, kw_only=True, metadata=counter("Times that a text dropped more than its bound")
    )


class EdgeCounters:
    """What is counted while texts are said."""

    def __init__(self) -> None:
        self.uplink_bits = self.downlink_bits = self.lost_links = self.bounds_broken = 0
        self.guess_bits = self._answers = self._wrong = 0
        self.encode_seconds = self._draft_seconds = 0.0
        self._batches = self._guesses = self._stood = self._tokens = 0
        self._texts = 0
        self._dropped = self._bound = 0.0

    def drafted(self, guesses: int, bits: int, seconds: float) -> None:
        self._batches += 1
        self.guess_bits += bits
        self._guesses += guesses
        self._draft_seconds += seconds

    def heard(self, tokens: int, tested: int, stood: int) -> None:
        self._answers += 1
        self._tokens += tokens
        self._stood += stood
        self._wrong += tested - stood

    def ended(self, threshold: ConformalThreshold | None) -> None:
        """A text has."""
        self._texts += 1
        if threshold is not None:
            self._dropped += threshold.dropped
            self._bound += threshold.bound * threshold.tokens

    def statistics(self) -> EdgeStatistics:
        return EdgeStatistics(
            generated_tokens=self._tokens,
            finished=self._texts,
            draft_steps=self._batches,
            draft_tokens=self._guesses,
            draft_accepted_tokens=self._stood,
            draft_seconds=self._draft_seconds,
            edge_uplink_bits=self.uplink_bits,
            edge_downlink_bits=self.downlink_bits,
            edge_answers=self._answers,
            edge_rejections=self._wrong,
            edge_lost_links=self.lost_links,
            edge_dropped_mass=self._dropped,
            edge_dropped_bound=self._bound,
            edge_bounds_broken=self.bounds_broken,
        )
