"""``POST /v1/chat/completions``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from msgspec.structs import replace
from starlette.types import ASGIApp

from lexshard.serve_app.http_call import HttpCall
from lexshard.serve_app.openai.chat_fields import ChatCompletionRequest, text_of
from lexshard.serve_app.openai.choice import Delta
from lexshard.serve_app.openai.errors import bad_request
from lexshard.serve_app.openai.preparation import Wanted, answer, begun, read_fields
from lexshard.serve_app.openai.prompts import Prompt, TextReader, ToldMessages, json_bytes
from lexshard.serve_app.openai.response_writer import ReplyWriter, ResponseWriter, encoded
from lexshard.serve_app.openai.streaming import respond
from lexshard.serve_app.tools.calls import CallPiece
from lexshard.serve_app.tools.offer import offer
from lexshard.serve_app.tools.plan import ReplyPlan


async def create_chat_completion(call: HttpCall) -> ASGIApp:
    """Raises:
    ApiError: whatever is wrong with the request.
    """
    return await answer(call, *await call.read(partial(_read, call)))


async def chat_reply(
    call: HttpCall,
    body: dict[str, Any],
    writer: Callable[[ChatWriter], ReplyWriter],
    *,
    stream: bool,
) -> ASGIApp:
    """The response to a request of a protocol that tells of a chat completion in its own words:
    ``body`` is one of ``POST /v1/chat/completions``, ``writer`` makes what tells of its one choice
    from what would tell of it there.

    Raises:
        ApiError: whatever is wrong with the request, and names fields of ``body``.
    """
    generation, own = await begun(call, *await _read_beside(call, body))
    assert isinstance(own, ChatWriter)  # as is wanted
    return await respond(call, generation, writer(own), stream=stream)


async def chat_prompt_tokens(call: HttpCall, body: dict[str, Any]) -> int:
    """How many tokens the prompt of such a ``body`` has; nothing is generated.

    Raises:
        ApiError: whatever is wrong with the request, and names fields of ``body``.
    """
    _, wanted = await _read_beside(call, body)
    reader = call.reader()
    with call.without_sequences():
        [prompt] = await wanted.encode(reader)
    return len(prompt.ids)


async def _read_beside(
    call: HttpCall, body: dict[str, Any]
) -> tuple[ChatCompletionRequest, Wanted]:
    """What a translated body asks for, beside the loop where it is long."""
    return await call.run(json_bytes(body, "messages"), partial(_read, call, body))


def _read(call: HttpCall, body: Any) -> tuple[ChatCompletionRequest, Wanted]:
    state = call.state
    chat = read_fields(ChatCompletionRequest, body, state, call.record)
    if chat.top_logprobs and not chat.logprobs:
        raise bad_request("'top_logprobs' needs 'logprobs'", "top_logprobs")

    special = bool(chat.add_special_tokens)
    free = bool(chat.ignore_eos or chat.min_tokens or chat.allowed_token_ids)
    free = free or not state.holds_grammars
    tools = chat.offered()
    offered = offer(tools, chat.tool_choice, chat.parallel_tool_calls)
    plan = ReplyPlan(state.tokenizer.reply_format, offered, free)
    continued = text_of(chat.messages[-1]) if chat.continue_final_message else None
    told = ToldMessages.of(chat)

    async def encode(reader: TextReader) -> list[Prompt]:
        prompt = await reader.conversation(chat, told, special)
        plan.note_prompt(prompt.text or "", continued)
        return [prompt]

    limit = chat.max_tokens if chat.max_completion_tokens is None else chat.max_completion_tokens
    wanted = Wanted(
        ChatWriter,
        "messages",
        texts=["".join((*(each["content"] for each in told.messages), *map(str, tools)))],
        encode=encode,
        max_tokens=limit,
        logprobs=(chat.top_logprobs or 0) if chat.logprobs else None,
        prompt_logprobs=chat.prompt_logprobs,
        reasoning=chat.include_reasoning is not False,
        plan=plan,
    )
    return chat, wanted


class ChatWriter(ResponseWriter):
    id_prefix = "chatcmpl"
    object_name = "chat.completion"
    chunk_object_name = "chat.completion.chunk"
    opens = True

    def body(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        told = (self._choice(delta, "message", _message(delta)) for delta in deltas)
        choices = [encoded({"token_ids": None, **each}) for each in told]
        body: dict[str, Any] = {"choices": choices, **self.not_asked}
        first = deltas[0].choice
        if self.options.prompt_logprobs:
            body["prompt_logprobs"] = self.prompt_scores(first)
        if self.options.return_token_ids:
            body["prompt_token_ids"] = first.request.prompt_ids
        return body

    def chunks(self, delta: Delta) -> list[dict[str, Any]]:
        """The first delta of a choice is told after a chunk with the role. A chunk tells of one
        call at most, in one piece, as OpenAI's do: some clients read no further."""
        chunks = [self._opening(delta)] if delta.first else []
        if self.has_news(delta):
            parts = _one_call_each(delta)
            chunks += ({"choices": [self._choice(each, "delta", _added(each))]} for each in parts)
        return chunks

    def _choice(self, delta: Delta, name: str, said: dict[str, Any]) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": delta.choice.index,
            name: said,
            "logprobs": self.logprobs(delta),
            "finish_reason": _finish_reason(delta),
        }
        if delta.finish_reason is not None:
            choice["stop_reason"] = delta.choice.stop_reason
        return {**choice, **self.told_tokens(delta)}

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
        if self.options.return_token_bytes:
            choice["token_bytes"] = []
            if self.options.draft:
                choice["rejected_bytes"] = []
        if self.options.candidates:
            choice["candidates"] = []
        opening: dict[str, Any] = {"choices": [choice]}
        if self.options.return_token_ids:
            opening["prompt_token_ids"] = delta.choice.request.prompt_ids
        return opening

    def logprobs(self, delta: Delta) -> dict[str, Any] | None:
        """Of the tokens of ``delta``, where they were asked for."""
        return None if self.options.logprobs is None else self.formatter.chat(delta.logprobs)


def _finish_reason(delta: Delta) -> str | None:
    called = delta.choice.called and delta.finish_reason == "stop"
    return "tool_calls" if called else delta.finish_reason


def _added(delta: Delta) -> dict[str, Any]:
    """What a chunk adds to the message."""
    added: dict[str, Any] = {"reasoning": delta.reasoning} if delta.reasoning else {}
    if delta.text or not (added or delta.calls or delta.finish_reason):
        added["content"] = delta.text
    if delta.calls:
        added["tool_calls"] = list(map(_call_piece, delta.calls))
    return added


def _call_piece(piece: CallPiece) -> dict[str, Any]:
    kind, text = ("custom", "input") if piece.custom else ("function", "arguments")
    if piece.name is None:
        return {"index": piece.index, kind: {text: piece.text}}
    part = {"name": piece.name, text: piece.text}
    return {"index": piece.index, "id": piece.call_id, "type": kind, kind: part}


def _message(delta: Delta) -> dict[str, Any]:
    """The whole message. One that calls tools, or has not come beyond its reasoning, need not have
    a text."""
    silent = not delta.text and (delta.calls or delta.reasoning)
    message: dict[str, Any] = {
        "role": "assistant",
        "content": None if silent else delta.text,
        "refusal": None,
    }
    if delta.reasoning:
        message["reasoning"] = delta.reasoning
    calls = [
        {name: value for name, value in _call_piece(call).items() if name != "index"}
        for call in _joined_calls(delta.calls)
    ]
    if calls:
        message["tool_calls"] = calls
    return message


def _joined_calls(pieces: Sequence[CallPiece]) -> list[CallPiece]:
    """One piece for each call that ``pieces`` tell of."""
    by_call: dict[int, list[CallPiece]] = {}
    for piece in pieces:
        by_call.setdefault(piece.index, []).append(piece)
    return [replace(own[0], text="".join(piece.text for piece in own)) for own in by_call.values()]


def _one_call_each(delta: Delta) -> list[Delta]:
    """``delta`` in parts that tell of one call at most. Tokens are told with the first of them, the
    end with the last."""
    calls = _joined_calls(delta.calls)
    nothing: dict[str, Any] = dict.fromkeys(
        ("token_ids", "logprobs", "certificates", "origins"), ()
    )
    later = [replace(delta, text="", reasoning="", calls=[call], **nothing) for call in calls[1:]]
    *parts, last = replace(delta, calls=calls[:1]), *later
    return [*(replace(part, finish_reason=None) for part in parts), last]
