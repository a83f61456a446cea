"""The items of a request as they are kept: each with what clients expect of one they ask for."""

from __future__ import annotations

from typing import Any

from lexshard.serve_app.responses.writer import new_id

ITEM_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
}


def kept_items(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The items of an ``input`` that was read without error, each with its ``id`` and ``type``;
    those of messages with parts."""
    return [_kept(item) for item in items]


def _kept(item: dict[str, Any]) -> dict[str, Any]:
    kind = item.get("type") or "message"
    own_id = item.get("id") or new_id(ITEM_PREFIXES[kind])
    kept = {"id": own_id, "status": "completed", **item, "type": kind}
    kept["id"] = own_id
    if kind == "reasoning":
        kept["summary"] = item.get("summary") or []
    if kind != "message" or not isinstance(item["content"], str):
        return kept
    if item["role"] == "assistant":
        part = {"type": "output_text", "text": item["content"], "annotations": []}
    else:
        part = {"type": "input_text", "text": item["content"]}
    return kept | {"content": [part]}
