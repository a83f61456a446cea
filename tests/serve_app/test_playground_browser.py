"""The playground in a real browser, before a real server: asserted on what the page shows."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.support.browser import answered, ask, browser, page_of, violations, words
from tests.support.paths import DEMO_DRAFT
from tests.support.real_server import Server, running_server

FOX = "Tell me a story about a fox."
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 9}, "kind": {"enum": ["red", "grey"]}},
    "required": ["name", "kind"],
    "additionalProperties": False,
}
PHONE = {"viewport": {"width": 390, "height": 800}, "has_touch": True, "is_mobile": True}


@pytest.fixture(scope="module")
def chrome() -> Iterator[Any]:
    with browser() as running:
        yield running


@pytest.fixture(scope="module")
def server(chrome: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    # However busy the machine is, something is guessed.
    flags = ("--draft", str(DEMO_DRAFT), "--draft-length", "fixed", "--samplers", "1")
    with running_server(tmp_path_factory.mktemp("playground"), *flags) as running:
        yield running


@pytest.fixture
def page(chrome: Any, server: Server) -> Iterator[Any]:
    with page_of(chrome, server.url) as opened:
        yield opened


def test_a_message_is_typed_and_streamed_and_every_token_is_shown_with_its_certificate(
    page: Any,
) -> None:
    ask(page, FOX, seed="7")
    tokens = page.locator(".reply .t")
    assert tokens.count() > 20
    assert page.locator(".reply .t.deterministic").count() == tokens.count()
    assert page.locator(".reply .t.accepted").count() > 0
    assert re.fullmatch(r"\d+ tokens · .* · seed 7", page.inner_text(".reply footer .told"))
    assert page.inner_text("#figure-certified") == "100 %"
    assert re.fullmatch(r"[\d.]+ [kM]B, its share of a pass", page.inner_text("#figure-bytes"))
    assert int(page.inner_text("#figure-rate").replace(",", "")) > 0


def test_the_same_seed_says_the_same_and_regenerate_asks_again(page: Any) -> None:
    ask(page, FOX, seed="7")
    first = words(page)
    page.click("text=Regenerate")
    answered(page)
    assert words(page) == first
    page.fill("#option-seed", "8")
    page.click("text=Regenerate")
    answered(page)
    assert words(page) != first


def test_a_stream_is_stopped(page: Any) -> None:
    page.check("label:has-text('Completion')")
    page.evaluate("for (const each of document.querySelectorAll('details')) each.open = true")
    page.check("#option-ignore_eos")
    ask(page, "Once upon a time", wait=False, max_tokens="1500", seed="3")
    page.wait_for_selector(".reply.live .t >> nth=20")
    page.press("#prompt", "Escape")
    answered(page)
    assert page.locator(".reply .t").count() < 1500
    assert "stopped" in page.inner_text(".reply footer .told")


def test_several_replies_stand_side_by_side(page: Any) -> None:
    ask(page, FOX, seed="7", n="3", max_tokens="30")
    places = [each.bounding_box() for each in page.locator(".reply").all()]
    assert len(places) == 3
    assert places[0]["y"] == places[1]["y"]
    assert places[0]["x"] < places[1]["x"]
    assert len({words(page, i) for i in range(3)}) == 3
    page.locator(".reply").nth(1).locator("button", has_text="Go on with this").click()
    first = words(page, 1).replace("■", "")
    page.fill("#option-n", "1")
    with page.expect_request("**/v1/chat/completions") as asked:
        ask(page, "And then?")
    assert json.loads(asked.value.post_data)["messages"][1]["content"] == first


def test_a_token_that_is_pointed_at_tells_what_it_cost_and_what_else_could_have_been(
    page: Any,
) -> None:
    ask(page, FOX, seed="7")
    page.locator(".reply .t").nth(6).hover()
    page.wait_for_selector("#candidates table")
    facts = page.inner_text(".facts")
    assert "the 50 best tokens (top-k)" in facts
    assert "int8" in facts
    assert re.search(r"\d+ of 16,384 \(0\.\d\d %\)", facts)
    assert re.search(r"[\d.]+ [kM]B, its share of a pass", facts)
    logits = [float(each) for each in page.locator("#candidates td:nth-child(2)").all_inner_texts()]
    assert logits == sorted(logits, reverse=True)
    gaps = page.locator("#candidates td:nth-child(3)").all_inner_texts()
    expected = [better - worse for better, worse in pairwise(logits[:8])]
    assert [float(each) for each in gaps[:7]] == pytest.approx(expected, abs=0.001)
    assert set(gaps[7:]) == {""}, "none before a token that is drawn from far behind"
    assert page.locator("#candidates .drawn").count() == 1


def test_tokens_are_reached_by_keyboard_and_named_to_those_who_hear_the_page(page: Any) -> None:
    ask(page, FOX, seed="7")
    page.focus(".reply .tokens")
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    assert page.locator(".t.seen").count() == 1
    assert "certified" in page.inner_text("#announce")
    page.keyboard.press("Enter")
    page.wait_for_selector("#evidence.open #candidates table")
    assert page.inner_text(".where").startswith("Token 3 of ")


def test_another_candidate_branches_the_reply(page: Any) -> None:
    ask(page, FOX, seed="7")
    page.locator(".reply .t").nth(5).click()
    page.locator("#candidates button", has_text="Branch").first.click()
    page.wait_for_selector(".reply + .reply:not(.live)", timeout=60_000)
    first, second = (page.locator(".reply").nth(i) for i in (0, 1))
    begin = first.locator(".t").all_inner_texts()[:5]
    assert second.locator(".t.kept").all_inner_texts() == begin
    assert second.locator(".t.chosen").count() == 1
    assert second.locator(".t").nth(5).inner_text() != first.locator(".t").nth(5).inner_text()
    assert second.locator(".t.deterministic:not(.kept)").count() > 3


def test_a_branch_at_the_token_that_was_drawn_would_go_on_with_the_same_text(
    page: Any, server: Server
) -> None:
    """The page's own request, sent with the drawn token in the candidate's place."""
    ask(page, FOX, seed="7")
    with page.expect_request("**/v1/completions") as looked:
        page.locator(".reply .t").nth(5).click()
    prompt = json.loads(looked.value.post_data)["prompt"]
    body = {"prompt": prompt, "seed": 7, "max_tokens": 251, "temperature": 0.8}
    told = page.request.post(f"{server.url}/v1/completions", data=body).json()
    shown = page.locator(".reply .t:not(.end)").evaluate_all(
        "all => all.slice(5).map(each => each.textContent).join('')"
    )
    assert told["choices"][0]["text"] == shown


def test_a_reply_is_proven_and_an_altered_token_is_found(page: Any) -> None:
    ask(page, FOX, seed="7")
    page.click("text=Prove")
    page.wait_for_selector(".proof.equal")
    count = page.locator(".reply .t").count()
    assert page.locator(".reply .t.equal").count() == count, "a tick for each token"
    assert page.inner_text(".proof").startswith(f"Equal: all {count} tokens")
    page.locator(".reply .t").nth(10).click()
    page.locator("#candidates button", has_text="Alter").first.click()
    assert page.locator(".reply .t").nth(10).get_attribute("class").split().count("altered") == 1
    page.click("button:has-text('Prove')")
    page.wait_for_selector(".proof.wrong")
    assert page.inner_text(".proof").startswith("Altered: 10 tokens came out equal")
    assert page.locator(".reply .t.equal").count() == 10
    assert "wrong" in page.locator(".reply .t").nth(10).get_attribute("class")


def test_a_schema_holds_the_reply_and_forced_tokens_are_told_apart(page: Any) -> None:
    ask(page, "A fox, please.", schema=json.dumps(SCHEMA), seed="5", max_tokens="80")
    assert json.loads(words(page).replace("■", "")).keys() == {"name", "kind"}
    assert page.locator(".reply .t.forced").count() > 3
    page.locator(".reply .t.forced").first.hover()
    assert "the grammar allowed no other" in page.inner_text(".verdict")
    page.click("text=Prove")
    page.wait_for_selector(".proof.equal")


def test_a_call_of_a_tool_is_shown_with_its_arguments(page: Any) -> None:
    parameters = {"type": "object", "properties": {"people": {"enum": [2, 4]}}}
    parameters |= {"required": ["people"], "additionalProperties": False}
    tool = {"type": "function", "function": {"name": "book_table", "parameters": parameters}}
    asked = {"tools": json.dumps([tool]), "tool_choice": '"required"'}
    ask(page, "A table for two.", seed="7", max_tokens="120", **asked)
    assert page.inner_text(".call figcaption") == "Calls book_table"
    assert json.loads(page.inner_text(".call code"))["people"] in (2, 4)


def test_what_cannot_be_read_is_told(page: Any) -> None:
    ask(page, "A fox", schema="{", wait=False)
    assert page.locator("#announce.warning").inner_text().startswith("JSON schema is no JSON")
    assert page.locator(".turn").count() == 0


def test_rejected_guesses_are_shown_on_demand(page: Any) -> None:
    page.check("label:has-text('Completion')")
    ask(page, "Once upon a time there was a little girl who", seed="11", max_tokens="200")
    page.wait_for_selector(".ghost", state="attached")
    ghost = page.locator(".ghost").first
    assert not ghost.is_visible()
    page.check("#option-ghosts")
    assert ghost.is_visible()
    assert ghost.evaluate("each => getComputedStyle(each).textDecorationLine") == "line-through"


def test_a_conversation_is_kept_in_the_browser_and_can_be_proven_later(page: Any) -> None:
    ask(page, FOX, seed="7")
    said = words(page)
    page.reload()
    page.wait_for_selector("body.ready")
    assert page.locator(".turn").count() == 0
    page.click("#tab-history")
    page.click(".pick")
    assert words(page) == said
    page.click("text=Prove")
    page.wait_for_selector(".proof.equal")
    page.click("[aria-label^=Forget]")
    assert page.evaluate("localStorage.getItem('lexshard-conversations')") is None


def test_a_link_holds_prompt_options_and_seed(page: Any, chrome: Any, server: Server) -> None:
    ask(page, FOX, temperature="1.1")
    said = words(page)
    page.click("#share")
    link = page.inner_text("#share-text")
    with page_of(chrome, link) as other:
        assert other.input_value("#option-temperature") == "1.1"
        other.press("#prompt", "Enter")
        answered(other)
        assert words(other) == said
    page.check("label:has-text('curl')")
    assert page.inner_text("#share-text").startswith(f"curl {server.url}/v1/chat/completions")
    page.check("label:has-text('Python')")
    program = page.inner_text("#share-text")
    compile(program, "shared", "exec")
    assert "temperature=1.1" in program


@pytest.mark.slow
def test_a_killed_engine_is_a_pause_and_the_text_is_the_same(page: Any) -> None:
    page.check("label:has-text('Completion')")
    page.evaluate("for (const each of document.querySelectorAll('details')) each.open = true")
    page.check("#option-ignore_eos")
    story = {"max_tokens": "1200", "seed": "11"}
    ask(page, "Once upon a time there was a little girl who", **story)
    expected = words(page)
    page.click("text=Regenerate")
    page.wait_for_selector(".reply.live .t >> nth=40")
    page.click("[aria-label^='Kill the engine']")
    page.wait_for_selector(".lamp.gone")
    page.wait_for_selector(".reply.live .told:has-text('Waiting')")
    answered(page)
    assert words(page) == expected
    page.wait_for_selector(".lamp.running")
    page.click("text=Prove")
    page.wait_for_selector(".proof.equal", timeout=60_000)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_to_complain_about(chrome: Any, server: Server, scheme: str) -> None:
    with page_of(chrome, server.url, color_scheme=scheme) as page:
        assert violations(page) == []
        ask(page, FOX, seed="7")
        page.locator(".reply .t").nth(6).click()
        page.wait_for_selector("#candidates table")
        page.click("text=Prove")
        page.wait_for_selector(".proof.equal")
        assert violations(page) == []
        page.click("#share")
        assert violations(page) == []
        page.click("#share-close")
        paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
        brightness = sum(map(int, re.findall(r"\d+", paper)[:3])) / 3
        assert (brightness < 60) == (scheme == "dark")


def test_a_phone_has_room_for_all_of_it(chrome: Any, server: Server) -> None:
    with page_of(chrome, server.url, **PHONE) as page:
        page.fill("#prompt", FOX)
        page.tap("#send")
        answered(page)
        assert page.evaluate("document.documentElement.scrollWidth") == 390
        page.locator(".reply .t").nth(4).tap()
        page.wait_for_selector("#evidence.open #candidates table")
        assert violations(page) == []
        page.tap("#evidence .close")
        assert not page.is_visible("#evidence")
        page.tap("#show-options")
        assert page.is_visible("#option-temperature")
        assert page.evaluate("document.documentElement.scrollWidth") == 390
        assert violations(page) == []
        page.tap("#hide-options")
        assert not page.is_visible("#option-temperature")


@pytest.mark.slow
def test_a_key_is_asked_for_refused_and_kept_in_memory_alone(chrome: Any, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("the-key\n")
    keys.chmod(0o600)
    with (
        running_server(tmp_path, "--api-key-file", str(keys)) as server,
        page_of(chrome, server.url, ready=False) as page,
    ):
        page.fill("#key", "wrong")
        page.press("#key", "Enter")
        page.wait_for_selector("#key-told.error")
        assert "refused" in page.inner_text("#key-told")
        assert violations(page) == []
        page.fill("#key", "the-key")
        page.press("#key", "Enter")
        page.wait_for_selector("body.ready")
        ask(page, FOX, max_tokens="20")
        assert page.locator(".reply .t").count() > 0
        kept = page.evaluate("JSON.stringify([localStorage, sessionStorage, document.cookie])")
        assert "the-key" not in kept
        page.reload()
        page.wait_for_selector("#key-dialog[open]")
