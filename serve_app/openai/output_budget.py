"""How many tokens may follow a prompt."""

from __future__ import annotations

from dataclasses import dataclass

from actors.configuration import EngineInformation
from serve_app.openai.errors import bad_request


@dataclass(frozen=True, slots=True)
class OutputBudget:
    """What a client asked for in the request field ``field`` (None: nothing), and the default
    where it asked for nothing (None: all that fits)."""

    field: str
    requested: int | None
    default: int | None

    @property
    def wanted(self) -> int:
        """The fewest tokens that must fit after the prompt (when truncating it to the context)."""
        return self.requested or self.default or 1

    def tokens(self, prompt_tokens: int, information: EngineInformation) -> int:
        """Raises:
        ApiError: 400, with both numbers, when prompt and output do not fit the context.
        """
        context = min(information.max_model_len, information.kv_tokens)
        if prompt_tokens + max(1, self.requested or 0) > context:
            limit = f"this model's context is {context} tokens"
            if context < information.max_model_len:
                limit = f"this server's KV cache holds {context} tokens"
            asked = "the prompt alone has" if self.requested is None else "the prompt has"
            more = "" if self.requested is None else f" and {self.requested} more were asked for"
            raise bad_request(f"{limit}; {asked} {prompt_tokens}{more}", self.field)
        if self.requested is not None:
            return max(1, self.requested)
        room = context - prompt_tokens
        return room if self.default is None else min(self.default, room)
