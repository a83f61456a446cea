"""A server that scores pairs: its options, an engine, and what is asked of it."""

from __future__ import annotations

from typing import Any

from lexshard.actors.messages import Request
from tests.support.mock_engine import MockEngine, Script, spell
from tests.support.paths import ROOT

LABELS = ["Y", "N"]
TEMPLATE = ROOT / "tests" / "support" / "score.jinja"
PAIRS: dict[str, Any] = {"score_labels": LABELS, "score_template": str(TEMPLATE)}


def asked(query: str, document: str) -> tuple[int, ...]:
    """The tokens of such a pair: what the template makes of it."""
    return tuple(f"{query}?{document}=".encode())


def labels_only() -> MockEngine:
    """Draws what alone is allowed, where that is said."""

    def say(request: Request) -> Script:
        allowed = request.parameters.allowed_ids
        return spell("Hello") if allowed is None else Script([allowed[:1]], "length")

    return MockEngine(script=say)
