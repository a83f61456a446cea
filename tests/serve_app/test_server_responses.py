"""Whole responses: their shape, where they end, what they tell of single tokens."""

from __future__ import annotations

from lexshard.actors.messages import Request
from tests.support.mock_engine import BOS, EOS, MockEngine, Script, ids, spell
from tests.support.mock_server import HELLO, Client, chat, complete, post, says, serve, stream


def test_completion_has_openai_shape() -> None:
    reply = complete({"request_id": "mine"})
    assert reply["id"] == "cmpl-mine"
    assert reply["object"] == "text_completion"
    assert reply["model"] == "mock"
    assert isinstance(reply["created"], int)
    assert reply["system_fingerprint"].startswith("lexshard-")
    assert reply["choices"] == [
        {
            "index": 0,
            "text": "Hello",
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
            **dict.fromkeys(("token_ids", "prompt_token_ids", "prompt_logprobs")),
        }
    ]
    assert reply["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 6,
        "total_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_chat_has_openai_shape() -> None:
    engine = MockEngine(script=lambda _: spell("Hello", cached_tokens=16))
    reply = chat({"n": 2}, engine)
    assert reply["id"].startswith("chatcmpl-")
    assert reply["object"] == "chat.completion"
    assert [choice["index"] for choice in reply["choices"]] == [0, 1]
    message = {"role": "assistant", "content": "Hello", "refusal": None}
    assert all(choice["message"] == message for choice in reply["choices"])
    assert reply["prompt_logprobs"] is reply["prompt_token_ids"] is None
    assert [choice["token_ids"] for choice in reply["choices"]] == [None, None]
    assert reply["usage"]["prompt_tokens"] == len("<user>Hi\n<assistant>")
    assert reply["usage"]["completion_tokens"] == 12
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == 16


def refused_later(request: Request) -> Script:
    """What the engine refuses amid the output of one sequence, as a mask that costs too much."""
    if request.choice == 1:
        return Script([(97,)], error="too odd", refused=True)
    return spell("Hello", seconds_per_step=0.001)


def test_a_choice_that_is_refused_later_fails_alone() -> None:
    engine = MockEngine(script=refused_later)
    told = complete({"n": 3}, engine)["choices"]
    assert [(each["text"], each["finish_reason"]) for each in told] == [
        ("Hello", "stop"),
        ("a", "error"),
        ("Hello", "stop"),
    ]
    assert told[1]["error"]["message"] == "too odd"
    assert "error" not in told[0]
    chunks = stream("/v1/chat/completions", {"messages": HELLO, "n": 3}, engine)
    ends = [each for chunk in chunks for each in chunk["choices"] if each["finish_reason"]]
    assert sorted((each["index"], each["finish_reason"]) for each in ends) == [
        (0, "stop"),
        (1, "error"),
        (2, "stop"),
    ]
    assert [each["error"]["message"] for each in ends if "error" in each] == ["too odd"]


def test_where_all_choices_are_refused_so_is_the_request() -> None:
    for n in (1, 2):
        engine = MockEngine(script=lambda _: Script([(97,)], error="too odd", refused=True))
        reply = post("/v1/completions", {"prompt": "abc", "n": n}, engine)
        assert (reply.status_code, reply.json()["error"]["message"]) == (400, "too odd")


def test_choices_of_batched_prompts_are_in_order() -> None:
    def script(request: Request) -> Script:
        text = bytes(request.prompt_ids).decode() + str(request.choice)
        return spell(text, seconds_per_step=0.002 * (3 - len(request.prompt_ids)))

    reply = complete({"prompt": ["x", "yy"], "n": 2}, MockEngine(script=script))
    assert [choice["text"] for choice in reply["choices"]] == ["x0", "x1", "yy0", "yy1"]
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2, 3]
    assert reply["usage"]["prompt_tokens"] == 3


def test_length_is_told() -> None:
    reply = complete({"max_tokens": 3})
    assert reply["choices"][0]["text"] == "Hel"
    assert reply["choices"][0]["finish_reason"] == "length"


def test_a_character_cut_off_by_the_length_is_replaced() -> None:
    assert complete({"max_tokens": 2}, says("aé"))["choices"][0]["text"] == "a\ufffd"


def test_stop_strings_cut_the_text_cancel_the_sequence_and_count_what_was_generated() -> None:
    engine = MockEngine(script=lambda _: Script([ids("one t"), ids("wo three"), (65,)], hangs=True))
    reply = complete({"stop": ["zzz", "two"]}, engine)
    [choice] = reply["choices"]
    assert choice["text"] == "one "
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "two")
    assert reply["usage"]["completion_tokens"] == len("one two")
    assert engine.cancelled == [engine.requests[0].request_id]
    assert engine.running == 0


def test_a_stop_string_ends_one_choice_and_leaves_the_others() -> None:
    def script(request: Request) -> Script:
        return spell("a stop b") if request.choice == 0 else spell("long enough text")

    engine = MockEngine(script=script)
    reply = complete({"n": 2, "stop": "stop"}, engine)
    assert [choice["text"] for choice in reply["choices"]] == ["a ", "long enough text"]
    assert len(engine.cancelled) == 1


def test_the_stop_string_is_kept_on_request() -> None:
    reply = complete({"stop": "ll", "include_stop_str_in_output": True})
    assert reply["choices"][0]["text"] == "Hell"


def test_stop_tokens_are_shown_on_request_only() -> None:
    engine = MockEngine(script=lambda _: Script([ids("ab"), ids("!")], stop_reason=33))
    plain = complete({"stop_token_ids": [33]}, engine)["choices"][0]
    assert (plain["text"], plain["stop_reason"]) == ("ab", 33)
    fields = {"stop_token_ids": [33], "include_stop_str_in_output": True}
    assert complete(fields, engine)["choices"][0]["text"] == "ab!"


def test_special_tokens_are_shown_on_request_only() -> None:
    engine = MockEngine(script=lambda _: Script([(BOS, 65), (66,)], finish_reason="length"))
    assert complete({}, engine)["choices"][0]["text"] == "AB"
    shown = complete({"skip_special_tokens": False}, engine)["choices"][0]["text"]
    assert shown == "<|begin|>AB"


def test_token_ids_are_returned_on_request() -> None:
    choice = complete({"return_token_ids": True})["choices"][0]
    assert choice["prompt_token_ids"] == list(ids("abc"))
    assert choice["token_ids"] == [*ids("Hello"), EOS]
    reply = chat({"return_token_ids": True})
    assert reply["prompt_token_ids"] == list(ids("<user>Hi\n<assistant>"))
    assert reply["choices"][0]["token_ids"] == [*ids("Hello"), EOS]


# -- log-probabilities -----------------------------------------------------------------------------


def test_completion_logprobs() -> None:
    engine = MockEngine(script=lambda _: Script([ids("aé")], finish_reason="length"))
    logprobs = complete({"logprobs": 3}, engine)["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["a", "bytes:\\xc3", "bytes:\\xa9"]
    assert logprobs["token_logprobs"] == [-1.5] * 3
    assert logprobs["text_offset"] == [0, 1, 1]
    assert logprobs["top_logprobs"][0] == {"b": -0.25, "a": -1.5, "c": -9999.0}
    assert [next(iter(top)) for top in logprobs["top_logprobs"]] == logprobs["tokens"]


def test_zero_logprobs_still_tell_the_chosen_token() -> None:
    engine = MockEngine(script=lambda _: Script([ids("ab")], finish_reason="length"))
    logprobs = complete({"logprobs": 0}, engine)["choices"][0]["logprobs"]
    assert logprobs["top_logprobs"] == [{"a": -1.5}, {"b": -1.5}]


def test_chat_logprobs_keep_the_bytes_of_split_characters() -> None:
    engine = MockEngine(script=lambda _: Script([ids("é")], finish_reason="length"))
    choice = chat({"logprobs": True, "top_logprobs": 1}, engine)["choices"][0]
    assert choice["message"]["content"] == "é"
    content = choice["logprobs"]["content"]
    assert bytes(byte for token in content for byte in token["bytes"]).decode() == "é"
    assert [len(token["top_logprobs"]) for token in content] == [1, 1]
    bare = chat({"logprobs": True}, engine)["choices"][0]["logprobs"]["content"][0]
    assert (bare["logprob"], bare["top_logprobs"]) == (-1.5, [])


def test_tokens_can_be_written_as_ids() -> None:
    logprobs = complete({"logprobs": 1, "return_tokens_as_token_ids": True, "max_tokens": 1})
    assert logprobs["choices"][0]["logprobs"]["tokens"] == ["token_id:72"]


def test_prompt_logprobs() -> None:
    scores = complete({"prompt_logprobs": 1})["choices"][0]["prompt_logprobs"]
    assert scores[0] is None
    assert scores[1] == {
        "99": {"logprob": -0.25, "rank": 1, "decoded_token": "c"},
        "98": {"logprob": -1.5, "rank": 2, "decoded_token": "b"},
    }
    assert len(chat({"prompt_logprobs": 0})["prompt_logprobs"]) == len("<user>Hi\n<assistant>")


def test_choices_and_prompts_have_the_scores_of_their_own_prompt() -> None:
    reply = complete({"prompt": ["the cat", "a dog"], "n": 2, "prompt_logprobs": 0})
    told = [choice["prompt_logprobs"] for choice in reply["choices"]]
    assert told[0] == told[1] != told[2] == told[3]
    alone = complete({"prompt": "a dog", "prompt_logprobs": 0})["choices"][0]
    assert told[2] == alone["prompt_logprobs"]


def test_more_scores_than_a_server_can_write_beside_others_are_refused() -> None:
    """63 choices of a long prompt with 20 each were 200 MB of JSON, which took a server a gigabyte
    and stopped every other stream for seconds."""

    async def check(client: Client) -> None:
        body = {"prompt": list(ids("x" * 2000)), "max_tokens": 1, "n": 63}
        for scores in ({"prompt_logprobs": 20}, {"echo": True, "logprobs": 20}):
            refused = await client.post("/v1/completions", json={**body, **scores})
            assert refused.status_code == 400
            assert "2646000 or more; this server returns at most 500000" in refused.text
            assert refused.json()["error"]["param"] in scores
        taken = await client.post("/v1/completions", json={**body, "prompt_logprobs": 2})
        assert taken.status_code == 200

    serve(check)


def test_what_lm_eval_sends_is_scored() -> None:
    """Echo, one logprob and one token over batches of ids; scores are sliced [ctxlen:-1]."""
    body = {
        "prompt": [list(ids("the cat")), list(ids("a"))],
        "temperature": 0,
        "max_tokens": 1,
        "logprobs": 1,
        "seed": 1234,
        "echo": True,
    }
    for prompt, choice in zip(body["prompt"], complete(body)["choices"], strict=True):
        logprobs = choice["logprobs"]
        assert choice["text"] == bytes(prompt).decode() + "H"
        assert len(logprobs["tokens"]) == len(prompt) + 1
        assert logprobs["token_logprobs"][0] is None
        assert logprobs["top_logprobs"][0] is None
        for token, score, top in zip(
            logprobs["tokens"][1:],
            logprobs["token_logprobs"][1:],
            logprobs["top_logprobs"][1:],
            strict=True,
        ):
            assert top[token] == score
        assert logprobs["text_offset"] == list(range(len(prompt) + 1))


def test_echo_without_output_scores_the_prompt_alone() -> None:
    engine = MockEngine()
    reply = complete({"echo": True, "logprobs": 1, "max_tokens": 0}, engine)
    [choice] = reply["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("abc", "length")
    assert choice["logprobs"]["tokens"] == ["a", "b", "c"]
    assert reply["usage"]["completion_tokens"] == 0
    assert engine.running == 0
