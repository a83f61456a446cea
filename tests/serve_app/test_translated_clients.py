"""What Codex, and OpenAI's and Anthropic's own packages, send is known here, field by field."""

from __future__ import annotations

import json
from typing import Any

import pytest
from anthropic import types as anthropic
from openai.types import chat, responses, shared_params

from lexshard.serve_app.messages_api import protocol as messages_api
from lexshard.serve_app.openai.chat_fields import ChatCompletionRequest, TextPart, text_of
from lexshard.serve_app.responses import items, protocol, translation
from lexshard.serve_app.tools.offer import ToolDefinition
from tests.support.mock_server import Client, serve
from tests.support.tool_chats import saying, tool_tokenizer

# Refused on purpose: calls beside others, a look for what must not be said, tools of the server's
# own. The last two are headers.
REFUSED = {"async", "moderation", "toolset_name", "workspace_id", "user_profile_id"}
HINTS = {"prompt_cache_breakpoint": {"mode": "explicit"}, "cache_control": {"type": "ephemeral"}}
# Of Codex 0.147, its texts and tools shortened.
PASSED: dict[str, Any] = {"internal_chat_message_metadata_passthrough": {"turn_id": "t1"}}
SAID = {"type": "message", "content": [{"type": "input_text", "text": "x"}], **PASSED}
CODEX = json.loads("""{"model": "mock", "instructions": "You are Codex.", "tool_choice": "auto",
"parallel_tool_calls": true, "store": false, "stream": true, "prompt_cache_key": "s1",
"include": ["reasoning.encrypted_content"], "text": {"verbosity": "low"}, "service_tier": "default",
"reasoning": {"effort": "medium", "summary": "auto", "context": "auto", "mode": "standard"},
"stream_options": {"reasoning_summary_delivery": "sequential_cutoff"},
"client_metadata": {"session_id": "s1"}, "access_programs": {"cyber": "standard"}, "tools": [
{"type": "function", "name": "exec", "strict": false, "parameters": {"type": "object"}},
{"type": "web_search", "external_web_access": false},
{"type": "custom", "name": "apply_patch", "description": "Edits", "format":
 {"type": "grammar", "syntax": "lark", "definition": "start: /a/"}},
{"type": "namespace", "name": "mcp__fs", "description": "Files", "tools": [
 {"type": "function", "name": "read", "strict": false, "parameters": {"type": "object"}}]}]}""")
CODEX["input"] = [SAID | {"role": role} for role in ("developer", "user", "user")]
CALL = 'Hm</think><tool_call>\n{"name": "mcp__fs__read", "arguments": {"path": "a"}}\n</tool_call>'


def test_a_call_of_an_mcp_server_goes_to_codex_and_comes_back() -> None:
    tokenizer = tool_tokenizer()
    engine = saying(CALL, tokenizer)

    async def test(client: Client) -> None:
        lines = (await client.post("/v1/responses", json=CODEX)).text.split("\n")
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
        assert [each["name"] for each in events if "name" in each] == ["read"]
        named = [each["item"] for each in events if "call_id" in each.get("item", ())]
        assert [(each["namespace"], each["name"]) for each in named] == 2 * [("mcp__fs", "read")]
        assert events[0]["response"]["constraint_notes"][0].startswith("'web_search' was left out")
        call = named[-1] | PASSED
        output = {"type": "function_call_output", "call_id": call["call_id"], "output": "x"}
        again = CODEX | {"input": [*CODEX["input"], call, output | PASSED]}
        assert (await client.post("/v1/responses", json=again)).status_code == 200
        *others, space = CODEX["tools"]
        space = space | {"tools": [space["tools"][0] | {"parameters": {"type": "string"}}]}
        wrong = await client.post("/v1/responses", json=CODEX | {"tools": [*others, space]})
        assert wrong.json()["error"]["param"] == "tools[3].tools[0].parameters"

    serve(test, engine, tokenizer)
    prompt = tokenizer.decode(engine.requests[-1].prompt_ids)
    assert prompt.count("<system>") == prompt.count("<user>") == 1
    assert "<tool_call>mcp__fs__read:path=a;</tool_call><tool mcp__fs__read " in prompt


@pytest.mark.parametrize(
    ("sent", "known"),
    [
        (responses.response_create_params.ResponseCreateParamsBase, protocol.ResponsesRequest),
        (shared_params.Reasoning, protocol.ReasoningOptions),
        (responses.FunctionToolParam, translation.FunctionFields),
        (responses.NamespaceToolParam, translation.NamespaceFields),
        (responses.ResponseOutputMessageParam, items.MessageItem),
        (responses.ResponseFunctionToolCallParam, items.FunctionCallItem),
        (responses.response_input_item_param.FunctionCallOutput, items.CallOutputItem),
        (responses.ResponseReasoningItemParam, items.ReasoningInput),
        (responses.ResponseInputTextParam, items.InputText),
        (chat.completion_create_params.CompletionCreateParamsBase, ChatCompletionRequest),
        (chat.ChatCompletionContentPartTextParam, TextPart),
        (chat.ChatCompletionFunctionToolParam, ToolDefinition),
        (anthropic.message_create_params.MessageCreateParamsBase, messages_api.MessagesRequest),
        (anthropic.ToolParam, messages_api.SchemaTool),
        (anthropic.ToolUseBlockParam, messages_api.ToolUseBlock),
        (anthropic.ToolResultBlockParam, messages_api.ToolResultBlock),
        (anthropic.OutputConfigParam, messages_api.OutputConfig),
    ],
)
def test_every_field_of_the_packages_is_known_or_refused_on_purpose(sent: Any, known: Any) -> None:
    assert sent.__annotations__.keys() - known.model_fields.keys() <= REFUSED


def test_a_chat_may_hold_hints_and_what_was_refused() -> None:
    said = [{"type": "refusal", "refusal": "No"}, {"type": "text", "text": "!", **HINTS}]
    tool = {"type": "function", "function": {"name": "f"}, "cache_control": {}}
    told = {"messages": [{"role": "assistant", "content": said}], "tools": [tool]}
    asked = ChatCompletionRequest.model_validate(told)
    assert text_of(asked.messages[0]) == "No\n!"
    assert [each.name for each in asked.offered()] == ["f"]
