"""How many tokens may follow a prompt."""

from __future__ import annotations

from dataclasses import dataclass

from lexshard.actors.configuration import EngineInformation
from lexshard.serve_app.openai.errors import context_length_exceeded


@dataclass(frozen=True, slots=True)
class OutputBudget:
    """What a client asked for (None: nothing), and the default where it asked for nothing (None:
    all that fits); ``prompt_field`` of its request holds the prompt."""

    prompt_field: str
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
            field = self.prompt_field
            if self.requested is None:
                reason = (
                    f"your {field} resulted in {prompt_tokens}, which leaves none for an answer."
                )
            else:
                both = prompt_tokens + self.requested
                parts = f"{prompt_tokens} in the {field}, {self.requested} in the completion"
                reason = f"you requested {both} tokens ({parts})."
            reason += f" Please reduce the length of the {field} or completion."
            if context < information.max_model_len:
                reason += f" (Of {information.max_model_len}, the KV cache holds {context}.)"
            raise context_length_exceeded(context, reason, field)
        if self.requested is not None:
            return max(1, self.requested)
        room = context - prompt_tokens
        return room if self.default is None else min(self.default, room)
