"""A real browser without a window, at the page that a server serves."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

CHROMIUMS = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")
ANSWERED = ".reply:not(.live) footer .told"


def chromium() -> str | None:
    """The browser of this machine; None where it has none."""
    return next(filter(None, map(shutil.which, CHROMIUMS)), None)


@contextmanager
def browser() -> Iterator[Any]:
    """Skips the test where there is none, unless the environment says that there must be."""
    path = chromium()
    if path is None:
        if os.environ.get("TESTS_NEED_CHROMIUM"):
            pytest.fail("no Chromium: .ci/browser installs it")
        pytest.skip("no Chromium on this machine: .ci/browser installs it on Debian and Ubuntu")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        try:
            yield started
        finally:
            started.close()


@contextmanager
def page_of(running: Any, url: str, *, ready: bool = True, **options: Any) -> Iterator[Any]:
    """A page of its own, without anything kept; fails where a script fails or the policy of what
    may be loaded is broken."""
    context = running.new_context(**{"viewport": {"width": 1440, "height": 900}, **options})
    page = context.new_page()
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on(
        "console",
        lambda said: wrong.append(said.text) if "Content Security Policy" in said.text else None,
    )
    page.goto(url)
    if ready:
        page.wait_for_selector("body.ready")
    yield page
    assert wrong == []
    context.close()


def ask(page: Any, text: str, *, wait: bool = True, **options: str) -> None:
    """Types ``text`` as a person would, with what stands in ``options``, and sends it."""
    page.evaluate("for (const each of document.querySelectorAll('details')) each.open = true")
    for name, value in options.items():
        page.fill(f"#option-{name}", value)
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")
    if wait:
        answered(page)


def answered(page: Any) -> None:
    """Waits until no reply comes any more."""
    page.wait_for_selector("#send:visible", timeout=60_000)
    page.wait_for_selector(ANSWERED)


def words(page: Any, reply: int = 0) -> str:
    """What a reply says, as its tokens stand there."""
    told: str = page.locator(".reply").nth(reply).locator(".tokens").evaluate(
        "all => [...all.querySelectorAll('.t')].map(each => each.textContent).join('')"
    )  # fmt: skip
    return told


def violations(page: Any) -> list[str]:
    """What axe-core finds against the Web Content Accessibility Guidelines and its own advice."""
    from axe_playwright_python.sync_playwright import Axe

    found = Axe().run(page).response["violations"]
    return [f"{each['id']}: {each['nodes'][0]['html'][:200]}" for each in found]
