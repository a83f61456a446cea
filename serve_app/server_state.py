"""What every route of one server shares."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from typing import Any

from lexshard.actors.configuration import EngineInformation
from lexshard.actors.faults import listen_for_faults
from lexshard.actors.messages import BY_DISTRIBUTION
from lexshard.actors.receipts.replay import BITS_OF_EVERY_MACHINE, MATRICES
from lexshard.actors.role import RunningRole, here
from lexshard.cluster.config import ServeConfig
from lexshard.serve_app.admission import Admission
from lexshard.serve_app.body_room import BodyRoom
from lexshard.serve_app.engine_client import EngineClient
from lexshard.serve_app.observability.server_metrics import ServerMetrics
from lexshard.serve_app.openai.errors import model_not_found, overloaded
from lexshard.serve_app.openai.tokenization import ModelTokenizer
from lexshard.serve_app.receipts.issuing import ReceiptIssuer
from lexshard.serve_app.responses.store import ResponseStore
from lexshard.serve_app.scoring.template import PairScoring
from lexshard.serve_app.structured.compiling import GrammarCompiler

VERSION = version("lexshard")


@dataclass(frozen=True, slots=True)
class Replica:
    """What an application knows of being one of several: its name among them, how to ask what all
    of them tell of themselves, and how the store of responses that they share."""

    name: str
    all_metrics: Callable[[], Awaitable[bytes]]
    responses: Callable[..., Awaitable[Any]]


@dataclass(slots=True)
class ServerState:
    """Built once per API process; ``created`` is when the server began, in Unix seconds. ``pairs``
    is None where the operator does not say how they are scored."""

    config: ServeConfig
    client: EngineClient
    tokenizer: ModelTokenizer
    admission: Admission
    bodies: BodyRoom
    metrics: ServerMetrics
    created: int
    responses: ResponseStore
    replica: Replica | None = None
    # Fields that every reply has beside those of its protocol.
    marks: Callable[[], dict[str, Any]] = dict
    # False where requests with grammars are refused: what need not be held to any is not.
    holds_grammars: bool = True
    grammars: GrammarCompiler = field(init=False)
    pairs: PairScoring | None = field(init=False)
    receipts: ReceiptIssuer = field(init=False)

    def __post_init__(self) -> None:
        self.receipts = ReceiptIssuer(self.config)
        self.grammars = GrammarCompiler(self.tokenizer)
        self.pairs = PairScoring.of(self.config, self.tokenizer)

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
            ApiError: 404 for a model that is not served here, 503 while that cannot be known.
        """
        names = self.config.model_names
        if requested is None:
            return names[0]
        if requested not in names:
            if not self.client.ready:  # a device learns its names from its server
                raise overloaded(f"not ready: {self.client.health_reason}", retry_after_seconds=2)
            raise model_not_found(requested)
        return requested

    def fingerprint(self, information: EngineInformation) -> str:
        """Changes with whatever may change the tokens a seed gives."""
        told = [information.model, information.dtype, information.body, information.device]
        by_matrices = information.dtype == "bfloat16" and information.processor == MATRICES
        if by_matrices or information.body not in BITS_OF_EVERY_MACHINE:
            told.append(information.processor)
        parts = "\n".join((VERSION, *told, information.files, *self._guesses()))
        return "lexshard-" + hashlib.sha256(parts.encode()).hexdigest()[:12]

    def _guesses(self) -> tuple[str, ...]:
        """What drafts are and how they are tested, where tokens depend on it."""
        config = self.config
        if config.draft is None or config.verify not in BY_DISTRIBUTION:
            return ()
        rules = (config.draft_tokens, config.draft_length, config.draft_head)
        limits = (config.sigmoid_alpha, config.sigmoid_beta) if config.verify == "sigmoid" else ()
        return (config.verify, config.draft, *map(str, (*rules, *limits)))

    async def report(self) -> dict[str, Any]:
        """What ``GET /status`` tells: the roles, in which process, and how busy all are."""
        words = f"one of {self.config.api_processes}: the one that answers"
        api = RunningRole("api", 0, here(), "cpu", words)
        return {
            "version": VERSION,
            "model": self.config.model_names[0],
            "ready": self.client.ready,
            "reason": self.client.health_reason,
            "engine_restarts": self.client.restarts,
            "roles": [
                {
                    "role": role.name,
                    "index": role.index,
                    "host": role.place.host,
                    "node": role.place.node,
                    "process_id": role.place.process_id,
                    "device": role.device,
                    "detail": role.detail,
                }
                for role in (api, *await self.client.roles())
            ],
            "queue": {
                "sequences": self.admission.sequences,
                "waiting_tokens": self.admission.waiting_tokens,
                "most_sequences": self.config.max_running_requests,
                "most_waiting_tokens": self.config.max_waiting_tokens,
            },
            "faults": [
                {"time": fault.time, "text": fault.text}
                for fault in sorted((*listen_for_faults().told(), *await self.client.faults()))
            ],
            "counters": asdict(self.client.statistics),
            "timings": self._timings(),
        }

    def _timings(self) -> dict[str, Any]:
        """What the engine timed when it started; nothing while there is none to ask."""
        if not self.client.ready:
            return {"head": [], "threads": []}
        information = self.client.information
        return {"head": information.head_timings, "threads": information.thread_timings}
