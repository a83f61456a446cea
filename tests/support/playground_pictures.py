"""The pictures of docs/playground.md, made anew with Chromium from a server with a draft model:
``python -m tests.support.playground_pictures URL``."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from PIL import Image

from tests.support.browser import answered, ask, browser, page_of
from tests.support.paths import ROOT

PICTURES = ROOT / "docs" / "pictures"
FOX = "Tell me a story about a fox."
STORY = "Once upon a time there was a little girl who"
SCHEMA = (
    '{"type": "object", "properties": {"animal": {"enum": ["fox", "owl"]}, '
    '"age": {"type": "integer"}}, "required": ["animal", "age"], "additionalProperties": false}'
)
SIZE = {"width": 1400, "height": 800}


def saved(page: Any, name: str) -> None:
    """A picture with few colours, which is what a page has; rare ones are kept."""
    picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    picture = picture.quantize(256, Image.Quantize.MAXCOVERAGE, 4, dither=Image.Dither.NONE)
    picture.save(PICTURES / f"playground-{name}.png", optimize=True)


def evidence(page: Any) -> None:
    ask(page, FOX, seed="7")  # a server's first receipt waits for the hashes of its model's files
    page.click("text=Regenerate")
    answered(page)
    page.locator(".reply .t").nth(20).click()
    page.wait_for_selector("#candidates table")
    page.mouse.move(640, 600)
    saved(page, "evidence")


def proof(page: Any) -> None:
    ask(page, FOX, seed="7")
    page.locator(".reply .t").nth(20).click()
    page.wait_for_selector("#candidates table")
    page.locator("#candidates button", has_text="Alter").first.click()
    page.click("button:has-text('Prove')")
    page.wait_for_selector(".proof.wrong")
    saved(page, "altered")


def branches(page: Any) -> None:
    page.check("label:has-text('Completion')")
    ask(page, STORY, seed="5", max_tokens="70", schema="")
    page.check("#option-ghosts")
    page.locator(".reply .t").nth(8).click()
    page.wait_for_selector("#candidates table")
    page.locator("#candidates button", has_text="Branch").nth(1).click()
    page.wait_for_selector(".reply + .reply:not(.live)")
    saved(page, "branch")


def schema(page: Any) -> None:
    ask(page, "Which animal do you see?", seed="5", max_tokens="60", schema=SCHEMA)
    page.locator(".reply .t.forced").nth(2).click()
    page.wait_for_selector("#candidates table")
    saved(page, "dark")


def phone(page: Any) -> None:
    page.fill("#prompt", FOX)
    page.tap("#send")
    answered(page)
    page.locator(".reply .t").nth(6).tap()
    page.wait_for_selector("#candidates table")
    saved(page, "phone")


def recording(page: Any) -> None:
    """A reply that outlives its engine, and is proven: as an animated picture."""
    frames: list[Image.Image] = []
    times: list[int] = []

    def film(seconds: float, done: Callable[[], bool] = lambda: False) -> None:
        for _ in range(round(seconds * 5)):
            picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
            frames.append(picture.resize((980, 560), Image.Resampling.LANCZOS))
            times.append(200)
            if done():
                return
            page.wait_for_timeout(80)

    page.check("label:has-text('Completion')")
    page.evaluate("for (const each of document.querySelectorAll('details')) each.open = true")
    page.check("#option-ignore_eos")
    film(0.6)
    ask(page, STORY, wait=False, seed="11", max_tokens="900")
    film(0.8)
    page.click("[aria-label^='Kill the engine']")
    film(25, lambda: bool(page.is_visible("#send")))
    film(0.6)
    page.locator("button", has_text="Prove").click()
    film(8, lambda: page.locator(".proof.equal").count() > 0)
    film(2)
    whole = PICTURES / "playground-recording.webp"
    more = {"append_images": frames[1:], "duration": times, "loop": 0}
    frames[0].save(whole, save_all=True, quality=52, method=6, **more)


def main(url: str, names: list[str]) -> None:
    """Makes those of ``names``, or all."""
    Path(PICTURES).mkdir(exist_ok=True)
    small = {"viewport": {"width": 390, "height": 760}, "has_touch": True, "is_mobile": True}
    made: dict[str, tuple[Callable[[Any], None], dict[str, Any]]] = {
        "evidence": (evidence, {}),
        "proof": (proof, {}),
        "branches": (branches, {}),
        "schema": (schema, {"color_scheme": "dark"}),
        "phone": (phone, {**small, "device_scale_factor": 2}),
        "recording": (recording, {}),
    }
    with browser() as running:
        for name in names or made:
            take, options = made[name]
            with page_of(running, url, **{"viewport": SIZE, **options}) as page:
                take(page)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
