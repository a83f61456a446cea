"""What the page keeps, counts and asks for, in a real browser before an engine that says what the
test wrote: nothing that was typed or said is lost, and no number is another's."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from lexshard.actors.messages import Request
from tests.support.browser import answered, ask, browser, page_of, words
from tests.support.mock_engine import MockEngine, Script, ids, spell
from tests.support.mock_server import listening
from tests.support.playground_stand_ins import (
    CERTIFICATE,
    answer_candidates,
    proven_reply,
    streamed,
    verdict,
)

HANGS = Script([ids("H"), ids("e")], hangs=True)
FAILS = Script([], error="it is broken")


@pytest.fixture(scope="module")
def chrome() -> Iterator[Any]:
    with browser() as running:
        yield running


@contextmanager
def page_before(chrome: Any, script: Callable[[Request], Script]) -> Iterator[Any]:
    with listening(MockEngine(script=script)) as url, page_of(chrome, url) as page:
        page.set_default_timeout(10_000)
        yield page


@pytest.fixture
def page(chrome: Any) -> Iterator[Any]:
    with page_before(chrome, lambda _: spell("Hello")) as opened:
        yield opened


def messages_of(page: Any, text: str) -> list[dict[str, str]]:
    """What a chat's next message is sent with."""
    with page.expect_request("**/v1/chat/completions") as asked:
        ask(page, text)
    told: list[dict[str, str]] = json.loads(asked.value.post_data)["messages"]
    return told


def reopen(page: Any) -> None:
    """The newest conversation of the history."""
    page.click("#tab-history")
    page.locator(".pick").first.click()


def branch(page: Any, reply: int, token: int) -> None:
    """Goes on from the likeliest candidate there."""
    page.locator(".reply").nth(reply).locator(".t").nth(token).click()
    page.locator("#candidates button", has_text="Branch").first.click()
    answered(page)


# -- kept --------------------------------------------------------------------------------------


def test_a_conversation_without_room_takes_no_other_ones_place(page: Any) -> None:
    ask(page, "A short one")
    is_as_it_was = page.evaluate(KEEP_LONG, CERTIFICATE)
    assert is_as_it_was
    page.click("#tab-history")
    assert page.locator(".pick").all_inner_texts() == ["A short one\nchat, 1 turn"]
    assert "no room" in page.inner_text("#kept")


KEEP_LONG = """async (certificate) => {
  const stored = () => localStorage.getItem("lexshard-conversations");
  const before = stored();
  const history = await import("/playground/history.js");
  const origin = { drafted_by: "model", rejected: null };
  const tokens = Array(60000).fill({ id: 1, text: " word", certificate, origin });
  history.keep({ id: "long", turns: [{ text: "Long", replies: [{ tokens, body: {} }] }] });
  history.list("long", () => {});
  return before !== null && before === stored();
}"""


def test_what_was_said_before_is_kept_once(page: Any) -> None:
    ask(page, "A first message")
    ask(page, "A second one")
    stored = page.evaluate("localStorage.getItem('lexshard-conversations')")
    assert stored.count("A first message") == 1


@pytest.mark.parametrize("leave", ["#begin", "label:has-text('Completion')", ".pick"])
def test_who_leaves_a_reply_that_comes_finds_it_again(chrome: Any, leave: str) -> None:
    scripts = [HANGS, spell("Hello")]
    with page_before(chrome, lambda _: scripts.pop()) as page:
        ask(page, "Earlier")
        page.click("#begin")
        page.click("#tab-history")
        ask(page, "A question", wait=False)
        page.wait_for_selector(".reply.live .t >> nth=1")
        page.click(leave)
        answered(page) if leave == ".pick" else page.wait_for_selector(".welcome")
        assert page.locator(".turn", has_text="A question").count() == 0
        page.locator(".pick", has_text="A question").click()
        assert page.inner_text(".said") == "A question"
        assert words(page) == "He"


def test_a_reply_that_comes_outlives_its_tab(chrome: Any) -> None:
    with page_before(chrome, lambda _: HANGS) as page:
        other = page.context.new_page()
        other.goto(page.url)
        other.wait_for_selector("body.ready")
        ask(other, "A question", wait=False)
        other.wait_for_selector(".reply.live .t >> nth=1")
        other.close()
        page.reload()
        page.wait_for_selector("body.ready")
        reopen(page)
        assert words(page) == "He"


def test_two_tabs_lose_no_turn_of_each_other(page: Any) -> None:
    ask(page, "Both")
    other = page.context.new_page()
    other.goto(page.url)
    other.wait_for_selector("body.ready")
    reopen(other)
    ask(other, "One")
    ask(page, "Another")
    stored = json.loads(page.evaluate("localStorage.getItem('lexshard-conversations')"))
    texts = [[turn["text"] for turn in each["turns"]] for each in stored]
    assert texts == [["Both", "Another"], ["Both", "One"]]
    other.close()


@pytest.mark.parametrize("stored", ["{}", "[{}]", "[null]", "3", "{"])
def test_a_storage_that_another_wrote_keeps_no_page_from_starting(page: Any, stored: str) -> None:
    page.evaluate("all => localStorage.setItem('lexshard-conversations', all)", stored)
    page.reload()
    page.wait_for_selector("body.ready")
    ask(page, "Hi")
    page.click("#tab-history")
    assert page.locator(".pick").count() == 1


# -- what is asked for -------------------------------------------------------------------------


def test_a_branch_and_its_own_branch_leave_what_is_left_of_the_length(page: Any) -> None:
    passed = answer_candidates(page)
    ask(page, "Hi", max_tokens="100")
    branch(page, 0, 2)
    branch(page, 1, 5)
    branch(page, 1, 1)
    assert [each["max_tokens"] for each in passed] == [97, 94, 98]


def test_no_length_means_as_fits_in_a_chats_branch_too_and_sixteen_to_a_completion(
    page: Any,
) -> None:
    passed = answer_candidates(page)
    ask(page, "Hi", max_tokens="")
    assert page.get_attribute("#option-max_tokens", "placeholder") == "as fits"
    branch(page, 0, 2)
    assert passed[-1]["max_tokens"] == 4096 - len(passed[-1]["prompt"])
    page.check("label:has-text('Completion')")
    assert page.get_attribute("#option-max_tokens", "placeholder") == "16"
    ask(page, "Hi", max_tokens="")
    assert passed[-1]["max_tokens"] == 16


def test_a_chat_goes_on_with_the_reply_that_is_shown_as_chosen(page: Any) -> None:
    answer_candidates(page)
    ask(page, "Hi")
    branch(page, 0, 2)
    left = page.locator(".reply.left")
    assert left.locator(".told").inner_text().startswith("6 tokens"), "the branch is gone on with"
    assert messages_of(page, "And?")[1]["content"] == "HedHello"
    left.locator("button", has_text="Go on with this").click()
    assert left.locator(".branch").count() == 1
    assert messages_of(page, "And?")[1]["content"] == "Hello"
    page.click("#begin")
    reopen(page)
    assert left.locator(".branch").count() == 1


def test_a_branch_that_fails_is_not_gone_on_with(chrome: Any) -> None:
    def script(request: Request) -> Script:
        is_chat = request.prompt_ids[-11:] == ids("<assistant>")
        return spell("Hello") if is_chat else FAILS

    with page_before(chrome, script) as page:
        answer_candidates(page)
        ask(page, "Hi")
        branch(page, 0, 2)
        assert page.locator(".reply.left .error").count() == 1
        assert messages_of(page, "And?")[1]["content"] == "Hello"


def test_a_message_that_was_never_answered_is_not_sent_again(chrome: Any) -> None:
    scripts = [spell("Hello"), FAILS]
    with page_before(chrome, lambda _: scripts.pop()) as page:
        ask(page, "One")
        assert page.locator(".reply .error").count() == 1
        assert messages_of(page, "Two") == [{"role": "user", "content": "Two"}]


def test_a_link_asks_for_what_was_asked_and_an_open_page_takes_it(page: Any) -> None:
    ask(page, "Hi", temperature="1.1")
    page.fill("#option-temperature", "0.3")
    page.click("#share")
    link = page.inner_text("#share-text")
    page.check("label:has-text('curl')")
    assert '"temperature": 1.1' in page.inner_text("#share-text")
    page.click("#share-close")
    page.evaluate("hash => { location.hash = hash; }", link.partition("#")[2])
    page.wait_for_selector(".welcome")
    assert page.input_value("#option-temperature") == "1.1"
    assert page.input_value("#prompt") == "Hi"


# -- what is told ------------------------------------------------------------------------------


def test_a_stored_reply_of_another_model_keeps_its_numbers_and_is_given_no_candidates(
    page: Any,
) -> None:
    ask(page, "Hi")
    about = page.request.get(f"{page.url}playground/about").json()
    changed = about | {"vocabulary_size": 999_999}
    page.route("**/playground/about", lambda route: route.fulfill(json=changed))
    page.reload()
    page.wait_for_selector("body.ready")
    reopen(page)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.locator(".reply .t").first.click()
    assert " of 264 (" in page.inner_text(".facts")
    assert "is not served here" in page.inner_text("#candidates")
    assert [url for url in asked if "completions" in url] == []


def test_the_rate_leaves_out_what_came_with_the_first_read(page: Any) -> None:
    rate = """async reads => {
      const { Figures } = await import("/playground/strip.js");
      const figures = new Figures();
      for (const [count, after] of reads)
        figures.add(Array(count).fill({}), figures.started + after);
      figures.show();
      return document.getElementById("figure-rate").textContent;
    }"""
    assert page.evaluate(rate, [[50, 1000], [10, 1500], [10, 2000]]) == "20"
    assert page.evaluate(rate, [[50, 1000]]) == "50"
    assert page.evaluate(rate, [[1, 1000], [20, 2000], [0, 9000]]) == "20", "not the receipt's wait"


def test_no_gap_is_told_before_a_token_that_is_far_from_the_likeliest(page: Any) -> None:
    answer_candidates(page)
    ask(page, "Hi")
    page.locator(".reply .t").nth(3).click()
    page.wait_for_selector("#candidates table")
    gaps = page.locator("#candidates td:nth-child(3)").all_inner_texts()
    assert gaps == ["2.000"] * 7 + ["", ""]
    assert page.locator("#candidates tbody tr").nth(8).get_attribute("class") == "drawn"


def test_a_choice_that_fails_alone_says_why(chrome: Any) -> None:
    refused = Script([ids("H")], error="it cannot go on", refused=True)
    with page_before(chrome, lambda request: refused if request.choice else spell("Hi")) as page:
        ask(page, "Hi", n="2")
        assert page.locator(".reply").nth(1).locator(".error").inner_text() == "it cannot go on"
        assert page.locator(".reply .error").count() == 1


def test_what_cannot_be_read_is_seen_when_a_reply_is_asked_for_again_too(page: Any) -> None:
    ask(page, "Hi")
    page.fill("#option-schema", "{")
    page.click("text=Regenerate")
    assert page.locator("#announce.warning").inner_text().startswith("JSON schema is no JSON")
    assert words(page) == "Hello■"


def test_a_proof_whose_text_is_altered_meanwhile_marks_nothing(page: Any) -> None:
    answer_candidates(page)
    proofs: list[Any] = []
    reply = streamed(proven_reply("Hello"))
    page.route("**/v1/chat/completions", lambda route: route.fulfill(**reply))
    page.route("**/v1/receipts/verify", lambda route: proofs.append(route))
    ask(page, "Hi")
    page.locator(".reply .t").nth(5).click()
    page.click("text=Prove")
    page.locator("#candidates button", has_text="Alter").first.click()
    proofs[0].fulfill(**streamed(verdict(6)))
    page.wait_for_timeout(500)
    assert page.locator(".t.equal").count() == 0
    assert page.inner_text(".proof").startswith("Token 6 now reads d")
    page.click("text=Undo")
    assert words(page) == "Hello■"
    assert "the token that is drawn from the mass of top-p" in page.inner_text(".facts")


# -- keys, pointers and the focus --------------------------------------------------------------


def test_a_finished_reply_takes_the_focus_from_nothing(chrome: Any) -> None:
    focused = "document.activeElement.id"
    with page_before(chrome, lambda _: spell("Hello", seconds_per_step=0.05)) as page:
        ask(page, "Hi")
        assert page.evaluate(focused) == "prompt"
        ask(page, "Hi", wait=False)
        page.focus("#option-seed")
        answered(page)
        assert page.evaluate(focused) == "option-seed"


def test_keys_that_mean_something_else_are_left_alone(page: Any) -> None:
    page.fill("#prompt", "に")
    composed = {"key": "Enter", "keyCode": 229, "bubbles": True, "cancelable": True}
    page.dispatch_event("#prompt", "keydown", composed)
    assert page.locator(".turn").count() == 0
    ask(page, "Hi")
    page.focus(".reply .tokens")
    page.keyboard.press("Alt+ArrowRight")
    assert page.locator(".t.seen").count() == 0
    page.keyboard.press("ArrowDown")
    assert page.inner_text("#announce").startswith("end: ")


def test_a_pointer_at_rest_looks_at_nothing_that_scrolls_under_it(page: Any) -> None:
    ask(page, "Hi")
    for token, place, seen in ((0, 7, 0), (1, 7, 0), (2, 8, 2)):
        over = {"bubbles": True, "screenX": place, "screenY": 7}
        page.locator(".reply .t").nth(token).dispatch_event("pointerover", over)
        assert page.locator(".t.seen").inner_text() == "Hello"[seen]


def test_a_reply_is_copied_where_the_page_came_over_plain_http(page: Any) -> None:
    ask(page, "Hi")
    page.evaluate("""Object.defineProperty(navigator, "clipboard", { value: undefined });
      document.addEventListener("copy", ({ target }) => { window.copied = target.value; });""")
    page.click("text=Copy")
    page.wait_for_selector("#announce:text-is('Copied')", state="attached")
    assert page.evaluate("window.copied") == "Hello"
