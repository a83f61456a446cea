"""How tests fetch from `tests.support.hub_server`, and what they look at."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from lexshard.cluster.models.fetch import Wish, fetched_folder
from lexshard.cluster.models.hub import Hub
from lexshard.cluster.models.names import ModelNameError, hub_name
from lexshard.cluster.models.refusal import LoadingOptions
from tests.support.hub_server import HubServer

NAME = "lexshard/demo"
WEIGHTS = "model.safetensors"


@dataclass
class Fetching:
    """A user of one Hub with one cache; ``said`` is what was announced."""

    server: HubServer
    cache: Path
    offline: bool = False
    said: list[str] = field(default_factory=list)

    def hub(self) -> Hub:
        return Hub(self.server.url, self.cache, self.offline)

    def folder(
        self, given: str = NAME, loading: LoadingOptions | None = None, *, weights: bool = True
    ) -> Path:
        name = hub_name(given)
        assert name is not None
        return fetched_folder(Wish(name, loading, weights), self.hub(), self.said.append)

    def refused(self, given: str = NAME, loading: LoadingOptions | None = None) -> str:
        """The reason, which is one sentence on one line."""
        with pytest.raises(ModelNameError) as refusal:
            self.folder(given, loading)
        text = str(refusal.value)
        assert "\n" not in text
        assert not text.endswith(".")
        return text

    def partial(self) -> Path | None:
        """What is there of weights that are not all there."""
        return next(self.cache.glob("models--*/blobs/*.incomplete"), None)
