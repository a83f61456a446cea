"""What fields mean in requests of the protocols that are translated to chat completions, and of
scores of pairs, where that is not what the same name means in one of those."""

from __future__ import annotations

from lexshard.serve_app.description.fields import ABSENT, IGNORED

TOKENS_AT_MOST = "at most so many, reasoning too"
# By model, then by field.
TRANSLATED_MEANINGS: dict[str, dict[str, str]] = {
    "ResponsesRequest": {
        "input": "the conversation: text, or items",
        "instructions": "the system message; not carried over to responses that follow",
        "previous_response_id": "goes on after a response that was kept, and those before it",
        "store": "keep the response for a day, among the last that were asked for (so unless "
        "false)",
        "tools": "of the types function and custom: the client runs them",
        "tool_choice": "none, auto, required, one tool, or allowed_tools",
        "parallel_tool_calls": "false: at most one call in a reply",
        "text": "`format`: text, json_object or json_schema",
        "reasoning": "`effort`: how much the model thinks first, where its template reads that",
        "include": "`message.output_text.logprobs`; the others have nothing to tell",
        "truncation": "auto: forget the beginning of what does not fit",
        "stream_options": "usage is in the last event without it",
        "max_output_tokens": TOKENS_AT_MOST,
        "top_logprobs": "log-probabilities of the text: how many of the likeliest",
        "metadata": "told again in the response",
        "max_tool_calls": IGNORED,
        **dict.fromkeys(
            (
                *("background", "conversation", "prompt", "context_management"),
                *("moderation", "image", "access_programs"),
            ),
            ABSENT,
        ),
    },
    "MessagesRequest": {
        "messages": "the conversation; an answer that has begun is gone on with",
        "system": "text, or blocks of it",
        "tools": "with an `input_schema`: the client runs them",
        "tool_choice": "auto, any, tool or none, and `disable_parallel_tool_use`",
        "thinking": "enabled or disabled, where the template reads that",
        "output_config": "`effort` of thinking, where the template reads that; a `format`",
        "max_tokens": TOKENS_AT_MOST,
        "stop_sequences": "texts that end an answer",
        **dict.fromkeys(("cache_control", "speed", "inference_geo"), IGNORED),
        **dict.fromkeys(("context_management", "mcp_servers", "container"), ABSENT),
    },
}
_NOT_CUT = {"truncate_prompt_tokens": ABSENT}
TRANSLATED_MEANINGS["ScoreTextsRequest"] = _NOT_CUT
TRANSLATED_MEANINGS["ScoreQueriesRequest"] = _NOT_CUT | {
    "documents": "a text or texts, each scored by itself",
}
TRANSLATED_MEANINGS["RerankRequest"] = _NOT_CUT | {
    "query": "what the documents are ranked by",
    "documents": "texts, or objects with a `text`",
}
TRANSLATED_MEANINGS["CountTokensRequest"] = TRANSLATED_MEANINGS["MessagesRequest"]
