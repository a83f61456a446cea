"""`lexshard chat` and `lexshard complete`: what is asked, what is shown, what Ctrl-C does."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator

import pytest

from lexshard.serve_app.cli import main
from lexshard.serve_app.commands.status import KEY_VARIABLE
from lexshard.serve_app.terminal import screen
from tests.support.http_stand_in import StandInHandler, serving
from tests.support.mock_engine import MockEngine, Script, spell
from tests.support.mock_server import listening

Captured = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch


@pytest.fixture
def engine() -> MockEngine:
    return MockEngine(script=lambda _: spell("Yes"))


@pytest.fixture
def url(engine: MockEngine) -> Iterator[str]:
    with listening(engine, api_keys=["key"]) as url:
        yield url


@pytest.fixture
def _key(monkeypatch: Patch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "key")


def prompts(engine: MockEngine) -> list[str]:
    return [bytes(request.prompt_ids).decode() for request in engine.requests]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def typing(monkeypatch: Patch, *lines: str | type[BaseException]) -> None:
    """A terminal at which those ``lines`` are typed, then Ctrl-D; an exception is a key, too."""
    left = iter(lines)

    def ask(_: str) -> str:
        line = next(left, EOFError)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr(sys, "stdin", Terminal())
    monkeypatch.setattr(screen.read_text, "__defaults__", (ask,))


@pytest.mark.usefixtures("_key")
def test_one_message_is_answered_with_what_was_asked_for(
    url: str, engine: MockEngine, capsys: Captured
) -> None:
    options = ["--url", url, "--max-tokens", "2", "--temperature", "0", "--seed", "5"]
    assert main(["chat", "Hi", "--system", "Be short", *options]) == 0
    assert capsys.readouterr().out == "Ye\n"
    assert prompts(engine) == ["<system>Be short\n<user>Hi\n<assistant>"]
    [request] = engine.requests
    assert (request.parameters.max_tokens, request.parameters.temperature) == (2, 0)
    assert request.parameters.seed == 5


@pytest.mark.usefixtures("_key")
def test_a_conversation_goes_on_until_it_is_begun_anew(
    url: str, engine: MockEngine, capsys: Captured, monkeypatch: Patch
) -> None:
    typing(monkeypatch, "Hi", "", KeyboardInterrupt, "a\\", "b", "/clear", '"""', "c", 'd"""')
    assert main(["chat", "--url", url]) == 0
    assert capsys.readouterr().out.count("Yes\n") == 3
    assert prompts(engine) == [
        "<user>Hi\n<assistant>",
        "<user>Hi\n<assistant>Yes\n<user>a\nb\n<assistant>",
        "<user>c\nd\n<assistant>",
    ]


@pytest.mark.usefixtures("_key")
def test_what_is_piped_in_is_gone_on_with(
    url: str, engine: MockEngine, capsys: Captured, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("Once\nupon"))
    assert main(["complete", "--url", url]) == 0
    assert capsys.readouterr().out == "Yes\n"
    assert prompts(engine) == ["Once\nupon"]


@pytest.mark.usefixtures("_key")
def test_each_text_that_is_typed_is_gone_on_with_by_itself(
    url: str, engine: MockEngine, monkeypatch: Patch
) -> None:
    typing(monkeypatch, "a", "b")
    assert main(["complete", "--url", url]) == 0
    assert prompts(engine) == ["a", "b"]


@pytest.mark.usefixtures("_key")
def test_a_refusal_is_told_in_the_servers_words_and_the_conversation_goes_on(
    url: str, engine: MockEngine, capsys: Captured, monkeypatch: Patch
) -> None:
    assert main(["complete", "x", "--url", url, "--model", "other"]) == 1
    assert capsys.readouterr() == ("", "lexshard: The model 'other' does not exist\n")
    typing(monkeypatch, "x" * 9999, "Hi")
    assert main(["chat", "--url", url]) == 0
    assert prompts(engine) == ["<user>Hi\n<assistant>"]


def test_a_key_that_is_missing_and_a_server_that_is(url: str, capsys: Captured) -> None:
    assert main(["chat", "x", "--url", url]) == 1
    assert f"(set {KEY_VARIABLE})" in capsys.readouterr().err
    assert main(["chat", "x", "--url", ":1"]) == 1
    assert "no server answers at http://127.0.0.1:1" in capsys.readouterr().err


def test_a_failure_of_the_stream_is_told(capsys: Captured) -> None:
    engine = MockEngine(script=lambda _: Script([(97,)], error="broken"))
    with listening(engine) as url:
        assert main(["complete", "x", "--url", url]) == 1
    told = capsys.readouterr()
    assert told.out == "a\n"
    assert "Internal error" in told.err


@pytest.mark.parametrize("command", ["chat", "complete"])
def test_a_reply_that_breaks_off_is_no_whole_one(command: str, capsys: Captured) -> None:
    """As where the process that sends it is killed: a client must not take it for all of it."""
    name = "text" if command == "complete" else "delta"
    said = "a" if command == "complete" else {"content": "a"}
    event = b"data: " + json.dumps({"choices": [{"index": 0, name: said}]}).encode() + b"\n\n"

    class Breaking(StandInHandler):
        def answer(self) -> None:
            self.head(200, {"Transfer-Encoding": "chunked"})
            self.wfile.write(b"%x\r\n%s\r\n" % (len(event), event))
            self.close_connection = True

    with serving(Breaking) as url:
        assert main([command, "x", "--url", url, "--model", "m"]) == 1
    told = capsys.readouterr()
    assert (told.out, "broke off" in told.err) == ("a\n", True)


def test_what_cannot_be_sent_is_told(url: str, capsys: Captured, monkeypatch: Patch) -> None:
    assert main(["complete", "a\udcff", "--url", url, "--model", "m"]) == 1
    assert main(["complete", "a", "--temperature", "nan", "--url", url, "--model", "m"]) == 1
    latin = io.TextIOWrapper(io.BytesIO(b"caf\xe9"), encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", latin)
    assert main(["complete", "--url", url, "--model", "m"]) == 1
    assert capsys.readouterr().err.count("cannot be sent") == 3


def pieces(
    *given: tuple[str, bool], then: Callable[[], None] = lambda: None
) -> Generator[tuple[str, bool], None, None]:
    yield from given
    then()


def interrupted() -> None:
    raise KeyboardInterrupt


def test_ctrl_c_stops_a_reply_and_keeps_what_it_said(capsys: Captured) -> None:
    assert screen.show(pieces(("Ye", False), then=interrupted)) == "Ye"
    assert capsys.readouterr().out == "Ye\n"


def test_thoughts_are_dim_on_a_terminal_and_left_out_elsewhere(
    capsys: Captured, monkeypatch: Patch
) -> None:
    reply = (("Hm", True), ("m", True), ("Yes", False))
    assert screen.show(pieces(*reply)) == "Yes"
    assert capsys.readouterr().out == "Yes\n"
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    assert screen.show(pieces(*reply)) == "Yes"
    assert terminal.getvalue() == "\x1b[2mHmm\x1b[0m\n\x1b[0mYes\x1b[0m\n"


def test_a_model_cannot_speak_to_the_terminal(capsys: Captured) -> None:
    assert screen.show(pieces(("a\x1b[2J\x07\n\tb\x9b", False))) == "a\x1b[2J\x07\n\tb\x9b"
    assert capsys.readouterr().out == "a\ufffd[2J\ufffd\n\tb\ufffd\n"


def test_they_start_at_once() -> None:
    program = (
        "import sys; from lexshard.serve_app.cli import main; main(['chat', 'x', '--url', ':1'])\n"
        "heavy = ('pydantic', 'starlette', 'numpy', 'httpx')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "[]\n"
