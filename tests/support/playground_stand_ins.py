"""What tests of the playground give its page in an engine's place."""

from __future__ import annotations

import json
from typing import Any

from tests.support.mock_engine import EOS

CERTIFICATE = {
    "need": "nucleus-draw",
    "guarantee": "deterministic",
    "tier": "int8",
    "rescored_rows": 40,
    "bytes_read": 4_000_000,
    "opened_share": 0.002,
    "fallback": False,
    "tightness": 0.97,
    "failure_probability": 0,
}
CANDIDATES = range(100, 108)  # letters from "d" on, as the byte tokenizer has them


def streamed(*events: dict[str, Any]) -> dict[str, Any]:
    """A response that a route is fulfilled with."""
    lines = [f"data: {each}" for each in (*map(json.dumps, events), "[DONE]")]
    return {"content_type": "text/event-stream", "body": "\n\n".join([*lines, ""])}


def proven_reply(text: str) -> dict[str, Any]:
    """The only event of a reply that has certificates and a receipt, and ends by itself."""
    ids = [*text.encode(), EOS]
    receipt = {"output_ids": ids, "options": {}, "seed": 1, "made_by": {"model": "ab" * 32}}
    choice = {
        "index": 0,
        "delta": {"content": text},
        "token_ids": ids,
        "token_bytes": [[each] for each in text.encode()] + [[]],
        "certificates": [CERTIFICATE] * len(ids),
        "finish_reason": "stop",
        "receipt": receipt,
    }
    return {"choices": [choice], "prompt_token_ids": [1, 2, 3]}


def verdict(tokens: int) -> dict[str, Any]:
    """The last event of a proof of so many tokens, all of them equal."""
    told = {"object": "receipt.verdict", "equal": True, "equal_tokens": tokens, "tokens": tokens}
    return told | {"signed_by": None}


def answer_candidates(page: Any) -> list[dict[str, Any]]:
    """Has the page find `CANDIDATES` at every token, and any other token far behind them. Returns
    the other completions that it will ask for; these go to the server."""
    passed: list[dict[str, Any]] = []

    def answer(route: Any) -> None:
        body = route.request.post_data_json
        if "candidates" not in body:
            passed.extend([] if "receipt" in body else [body])  # the mock server writes none
            route.continue_()
            return
        far = body.get("allowed_token_ids")
        top = [
            {"token_id": each, "bytes": [each], "logit": 9.0 - 2 * i, "logprob": -1.0 - i}
            for i, each in enumerate(far or CANDIDATES, 20 if far else 0)
        ]
        route.fulfill(json={"choices": [{"candidates": [{**top[0], "top": top}]}]})

    page.route("**/v1/completions", answer)
    return passed
