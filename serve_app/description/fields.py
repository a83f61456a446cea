"""What every field of a request means, in a few words. How it is checked, its model says."""

from __future__ import annotations

from lexshard.serve_app.openai.protocol import MAX_BAD_WORD_CHARACTERS

IGNORED = "accepted, without effect"
ABSENT = "not implemented: null or what asks for nothing"

MEANINGS: dict[str, str] = {
    # what to answer
    "model": "one of /v1/models; the only one where it is left out",
    "prompt": "a text, texts, token ids, or lists of ids",
    "messages": "the conversation; a `name` is told to the chat template, which may read it",
    "tokens": "the token ids",
    "query": "a text or its ids, before each of `items`",
    "items": "texts or lists of ids, each scored by itself",
    "label_token_ids": "the score is the likelihood of the first as the next token",
    "apply_softmax": "among the labels (so unless false), else among all tokens",
    "item_first": "the item stands before the query",
    "queries": "a text for all of `documents`, or one for each",
    "text_1": "a text for all of `text_2`, or one for each",
    "text_2": "a text or texts, each scored by itself",
    "top_n": "so many of the best; 0: all",
    "return_documents": "with their texts (so unless false)",
    "use_activation": "the score is a probability: anything but true is not implemented",
    "n": "answers to each prompt; prompts times n are at most what the server runs at once",
    "add_special_tokens": "begin as the tokenizer begins texts",
    "truncate_prompt_tokens": "keep the last so many tokens of a prompt; -1: as many as fit",
    "truncation_side": "right: keep the first ones instead of the last",
    "add_generation_prompt": "end with the beginning of an answer (so unless continued)",
    "continue_final_message": "go on in the last message instead of answering it",
    "chat_template_kwargs": "further variables that the model's chat template reads",
    "tools": "what the model may call: functions, with a JSON Schema of their arguments, and "
    "custom tools, whose input is a text",
    "tool_choice": "`auto`; `none`; `required`: a call at least; or which tool, or some of them",
    "parallel_tool_calls": "false: one call at most",
    "include_reasoning": "false: what is thought is not told, and counts all the same",
    "reasoning_effort": "told to the chat template; refused where it does not read it",
    # how tokens are chosen; the model's own defaults where they are left out
    "temperature": "0 takes the likeliest token",
    "top_k": "choose among so many of the likeliest; 0 and -1: all",
    "top_p": "choose among the likeliest with this probability together",
    "min_p": "choose among those at least so likely, relative to the likeliest",
    "repetition_penalty": "divides what was said before, in the prompt too",
    "presence_penalty": "lowers what was generated before, once",
    "frequency_penalty": "lowers what was generated before, each time",
    "logit_bias": "by token id",
    "bad_words": f"never said; {MAX_BAD_WORD_CHARACTERS} characters together",
    "allowed_token_ids": "nothing else is said",
    "seed": "the same seed gives the same tokens; a random one where it is left out",
    "response_format": "what the reply must be: `text`, `json_object`, `json_schema` or "
    "`structural_tag`",
    "structured_outputs": "the same as vLLM has it: one of `json`, `json_object`, `regex`, "
    "`choice`, `grammar` and `structural_tag`, and how JSON is written",
    "guided_json": "the reply is JSON of this schema",
    "guided_regex": "the reply matches this regular expression",
    "guided_choice": "the reply is one of these",
    "guided_grammar": "the reply matches this grammar (Lark or GBNF)",
    "guided_whitespace_pattern": "what stands between two values of `guided_json`",
    # where it ends
    "max_tokens": "at most so many; all that fit (chat), else 16; 0 only with echo",
    "max_completion_tokens": "the same, and goes first",
    "min_tokens": "no end before",
    "stop": "texts that end an answer",
    "stop_token_ids": "tokens that end an answer",
    "include_stop_str_in_output": "keep the text that ended it",
    "ignore_eos": "go on after the model's own end",
    # what is told
    "stream": "as server-sent events",
    "stream_options": "`include_usage` in the last event, `continuous_usage_stats` in all",
    "echo": "begin with the prompt",
    "logprobs": "log-probabilities of the tokens: how many of the likeliest (chat: yes or no)",
    "top_logprobs": "how many of the likeliest; needs `logprobs`",
    "prompt_logprobs": "the same for the prompt's tokens; not streamed",
    "return_tokens_as_token_ids": "tokens as `token_id:5` in log-probabilities",
    "return_token_ids": "the ids of prompt and answer",
    "return_token_bytes": "of each token of the answer, its bytes; with `draft` of rejected "
    "guesses, too",
    "return_token_strs": "the tokens as the vocabulary spells them",
    "return_seed": "the seed that was used",
    "skip_special_tokens": "leave them out of the text (so unless false)",
    "candidates": "of each token, so many of the likeliest with their exact logits; without "
    "`logprobs`",
    "certificate": "of each token, why it is the right one and what finding it cost",
    "draft": "of each token, whether it was guessed",
    "receipt": "what the reply can be made again from: see docs/receipts.md",
    "draft_tokens": "longest draft of this request, at most the server's; 0: none",
    "receipts": "of replies, as they came with them",
    # in which order
    "priority": "lower goes first; below 0 only where the API key allows it",
    "request_id": "in the reply's id and in the server's log",
    # for others
    **dict.fromkeys(
        (
            *("user", "store", "metadata", "service_tier", "safety_identifier", "verbosity"),
            *("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"),
        ),
        IGNORED,
    ),
    **dict.fromkeys(
        (
            *("functions", "function_call", "suffix"),
            *("audio", "modalities", "prediction", "web_search_options"),
        ),
        ABSENT,
    ),
    "best_of": "not implemented: as many as n",
}


TOKENS_AT_MOST = "at most so many, reasoning too"
# By model, then by field.
TRANSLATED_MEANINGS: dict[str, dict[str, str]] = {
    "ResponsesRequest": {
        "input": "the conversation: text, or items",
        "instructions": "the system message; not carried over to responses that follow",
        "previous_response_id": "goes on after a response that was kept, and those before it",
        "store": "keep the response for a day, among the last that were asked for (so unless "
        "false)",
        "tools": "of the types function, custom and namespace: the client runs them",
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
        **dict.fromkeys(("max_tool_calls", "client_metadata", "access_programs"), IGNORED),
        **dict.fromkeys(
            (
                *("background", "conversation", "prompt", "context_management"),
                *("moderation", "image"),
            ),
            ABSENT,
        ),
    },
    "MessagesRequest": {
        "messages": "the conversation; an answer that has begun is gone on with",
        "system": "text, or blocks of it",
        "tools": "with an `input_schema`: the client runs them",
        "tool_choice": "auto, any, tool or none, and `disable_parallel_tool_use`",
        "thinking": "enabled or disabled, where the template reads that; others leave it to it",
        "output_config": "`effort` of thinking, where the template reads that; a `format`",
        "max_tokens": TOKENS_AT_MOST,
        "stop_sequences": "texts that end an answer",
        **dict.fromkeys(("cache_control", "speed", "inference_geo", "diagnostics"), IGNORED),
        **dict.fromkeys(("context_management", "mcp_servers", "container", "thread"), ABSENT),
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
