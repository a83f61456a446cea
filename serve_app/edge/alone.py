"""What the draft model says by itself while the server is away: quick, and another model's text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields

from lexshard.actors.edge.drafting import EdgeDrafter
from lexshard.actors.messages import FinishReason, Request, SamplingParameters, SequenceEvent
from lexshard.serve_app.edge.device import InThread, failure

TOKENS_AT_ONCE = 8
DRAWING_AND_ENDING = {
    *("temperature", "top_k", "top_p", "min_p", "seed", "draft"),
    *("max_tokens", "stop_token_ids", "ignore_eos"),
}


async def say_alone(
    request: Request,
    drafter: EdgeDrafter,
    eos_token_ids: tuple[int, ...],
    in_thread: InThread,
    emit: Callable[[SequenceEvent], None],
) -> None:
    """Says a text; every event goes to ``emit``. What takes more than drawing is refused there."""
    parameters, history = request.parameters, list(request.prompt_ids)
    others = (field for field in fields(SamplingParameters) if field.name not in DRAWING_AND_ENDING)
    asked = [each.name for each in others if getattr(parameters, each.name) != each.default]
    if asked:
        reason = f"the server is away, and the draft model alone has no {', '.join(asked)}"
        emit(failure(request, reason, refused=True))
        return
    said, most = 0, parameters.max_tokens
    end: FinishReason | None = None
    stop: int | None = None
    while end is None:
        drawn = await in_thread(drafter.tokens, history, min(TOKENS_AT_ONCE, most - said))
        told: list[int] = []
        for token in drawn:
            told.append(token)
            said += 1
            end, stop = parameters.end_with(token, said, eos_token_ids)
            if end is not None:
                break
        history.extend(told)
        if not told:
            end = "length"  # there is no room for more
        name, choice = request.request_id, request.choice
        emit(SequenceEvent(name, choice, tuple(told), finish_reason=end, stop_reason=stop))
