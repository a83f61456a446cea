"""What every route of one server shares."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version

from actors.configuration import EngineInformation
from cluster.config import ServeConfig
from serve_app.admission import Admission
from serve_app.engine_client import EngineClient
from serve_app.metrics import ServerMetrics
from serve_app.openai.errors import model_not_found, overloaded
from serve_app.openai.tokenization import ModelTokenizer

VERSION = version("lexshard")


@dataclass(slots=True)
class ServerState:
    """Built once per API process; ``created`` is when the server began, in Unix seconds."""

    config: ServeConfig
    client: EngineClient
    tokenizer: ModelTokenizer
    admission: Admission
    metrics: ServerMetrics
    created: int

    def information(self) -> EngineInformation:
        """Raises:
        ApiError: 503 while there is no engine to ask.
        """
        if not self.client.ready:
            raise overloaded(f"not ready: {self.client.health_reason}", retry_after_seconds=2)
        return self.client.information

    def model_name(self, requested: str | None) -> str:
        """The name to answer under; a request may leave it out.

        Raises:
            ApiError: 404 for a model that is not served here.
        """
        names = self.config.model_names
        if requested is None:
            return names[0]
        if requested not in names:
            raise model_not_found(requested)
        return requested

    def fingerprint(self, information: EngineInformation) -> str:
        """Changes with whatever may change the tokens a seed gives."""
        return _fingerprint(
            VERSION,
            information.model,
            information.dtype,
            information.body,
            information.device,
        )


@lru_cache(maxsize=1)  # the same for every request to one engine
def _fingerprint(*parts: str) -> str:
    return "lexshard-" + hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]
