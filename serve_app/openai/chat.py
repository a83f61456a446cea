"""``POST /v1/chat/completions``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp

from lexshard.serve_app.openai.choice import Delta
from lexshard.serve_app.openai.errors import bad_request
from lexshard.serve_app.openai.preparation import Wanted, answer, read_fields
from lexshard.serve_app.openai.prompts import Prompt, TextReader
from lexshard.serve_app.openai.protocol import ChatCompletionRequest, text_of
from lexshard.serve_app.openai.response_writer import ResponseWriter, encoded
from lexshard.serve_app.request_record import RequestRecord
from lexshard.serve_app.server_state import ServerState


async def create_chat_completion(
    state: ServerState, request: Request, body: Any, record: RequestRecord
) -> ASGIApp:
    """Raises:
    ApiError: whatever is wrong with the request.
    """
    chat = read_fields(ChatCompletionRequest, body, state, record)
    if chat.top_logprobs is not None and not chat.logprobs:
        raise bad_request("'top_logprobs' needs 'logprobs'", "top_logprobs")

    async def encode(reader: TextReader) -> list[Prompt]:
        return [await reader.conversation(chat, bool(chat.add_special_tokens))]

    limit = chat.max_tokens if chat.max_completion_tokens is None else chat.max_completion_tokens
    wanted = Wanted(
        ChatWriter,
        "messages",
        texts=["".join(map(text_of, chat.messages))],
        encode=encode,
        max_tokens=limit,
        logprobs=(chat.top_logprobs or 0) if chat.logprobs else None,
        prompt_logprobs=chat.prompt_logprobs,
    )
    return await answer(state, request, chat, wanted, record)


class ChatWriter(ResponseWriter):
    id_prefix = "chatcmpl"
    object_name = "chat.completion"
    chunk_object_name = "chat.completion.chunk"

    def body(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        choices = [encoded(self._choice(delta)) for delta in deltas]
        body: dict[str, Any] = {"choices": choices}
        first = deltas[0].choice
        if self.options.prompt_logprobs:
            body["prompt_logprobs"] = self.prompt_scores(first)
        if self.options.return_token_ids:
            body["prompt_token_ids"] = first.request.prompt_ids
        return body

    def chunks(self, delta: Delta) -> list[dict[str, Any]]:
        """The first delta of a choice is told after a chunk with the role."""
        chunks = [self._opening(delta)] if delta.first else []
        if not self.has_news(delta):
            return chunks
        choice: dict[str, Any] = {
            "index": delta.choice.index,
            "delta": {"content": delta.text} if delta.text or not delta.finish_reason else {},
            "logprobs": self._logprobs(delta),
            "finish_reason": delta.finish_reason,
            **self.told_tokens(delta),
        }
        if delta.finish_reason is not None:
            choice["stop_reason"] = delta.choice.stop_reason
        return [*chunks, {"choices": [choice]}]

    def _choice(self, delta: Delta) -> dict[str, Any]:
        return {
            "index": delta.choice.index,
            "message": {"role": "assistant", "content": delta.text, "refusal": None},
            "logprobs": self._logprobs(delta),
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.choice.stop_reason,
            **self.told_tokens(delta),
        }

    def _opening(self, delta: Delta) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": delta.choice.index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        if self.options.certificate:
            choice["certificates"] = []
        if self.options.draft:
            choice["drafts"] = []
        opening: dict[str, Any] = {"choices": [choice]}
        if self.options.return_token_ids:
            opening["prompt_token_ids"] = delta.choice.request.prompt_ids
        return opening

    def _logprobs(self, delta: Delta) -> dict[str, Any] | None:
        return None if self.options.logprobs is None else self.formatter.chat(delta.logprobs)
