"""The `lexshard` command itself: what it says of commands and options, and how soon."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from lexshard.loadtest.bench.options import head as head_options
from lexshard.loadtest.bench.options import shards as shard_options
from lexshard.loadtest.bench.shards import NEEDS
from lexshard.loadtest.bench.synthetic.head_workload import SAMPLING_METHODS
from lexshard.serve_app.cli import COMMANDS, main
from tests.support.http_stand_in import StandInHandler, serving
from tests.support.mock_server import model_folder
from tests.support.paths import ROOT

Captured = pytest.CaptureFixture[str]
OF_THE_HUB = ("huggingface_hub", "httpx2")
COMPUTING = ("torch", "numba", "scipy", "transformers", "ray", "triton", *OF_THE_HUB)


def ended(arguments: list[str]) -> int:
    """The exit code, wherever it is made."""
    try:
        return main(arguments)
    except SystemExit as end:
        return int(end.code or 0)


# -- help and what is mistyped --------------------------------------------------------------------


def test_help_of_a_command_imports_nothing_that_computes() -> None:
    """All of them in one process: what one imports stays."""
    look = f"""
import contextlib, io, sys
from lexshard.serve_app.cli import COMMANDS, main
for words in COMMANDS:
    with contextlib.redirect_stdout(io.StringIO()) as page, contextlib.suppress(SystemExit):
        main([*words, "--help"])
    assert "usage: lexshard" in page.getvalue(), words
    if found := [name for name in {COMPUTING!r} if name in sys.modules]:
        print(*words, "imports", *found)
        break
"""
    done = subprocess.run([sys.executable, "-c", look], cwd=ROOT, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("", "")


def test_choices_that_are_written_down_for_the_help_are_those_there_are() -> None:
    assert tuple(SAMPLING_METHODS) == head_options.NEEDS
    assert tuple(NEEDS) == shard_options.NEEDS


def test_help_is_there_for_all_commands_for_a_group_and_for_one(capsys: Captured) -> None:
    groups = {words[0] for words in COMMANDS if len(words) > 1}
    assert {"bench", "config", "topology"} <= groups
    for group in groups:
        for arguments in ([group, "--help"], [group, "-h"], ["help", group]):
            assert ended(arguments) == 0
            page = capsys.readouterr().out
            listed = [line.split()[1:3] for line in page.splitlines() if line.startswith("  ")]
            assert listed == [list(words) for words in COMMANDS if words[0] == group]
        assert ended([group]) == 2  # it does nothing: no success for a script
        assert "usage:" in capsys.readouterr().out
    assert ended(["help"]) == ended(["--help"]) == 0
    all_commands = capsys.readouterr().out
    assert all(" ".join(words) in all_commands for words in COMMANDS)
    for arguments in (["help", "serve"], ["help", "config", "show"]):
        assert ended(arguments) == 0
        assert f"usage: lexshard {' '.join(arguments[1:])}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        ("sevre", "no command 'sevre': did you mean serve?"),
        ("confg show", "no command 'confg': did you mean config?"),
        ("bench heads", "no command 'bench heads': did you mean bench head?"),
        ("help benhc", "no command 'benhc': did you mean bench?"),
        ("nothing-like-it", "no command 'nothing-like-it' ("),
        ("serve m --prot 80", "unknown option --prot: did you mean --port?"),
        ("serve m --prot=80", "unknown option --prot: did you mean --port?"),
        (
            "serve m --tensor-parallel-size 2",
            "did you mean --tensor-parallel?",
        ),
        ("serve m --wxyz 2", "unknown option --wxyz ("),
        ("status --ulr :80", "unknown option --ulr: did you mean --url?"),
        # Not that --against is missing, which is what it was meant to be.
        ("bench serve --agianst URL", "unknown option --agianst: did you mean --against?"),
        ("serve m --port eighty", "argument --port: invalid int value: 'eighty'"),
        ("serve m other", "unrecognized arguments: other"),
        ("status --url ftp://x", "'ftp://x' is no address: give HOST:PORT, :PORT, or a URL"),
        ("status --url :eighty", "':eighty' is no address"),
    ],
)
def test_what_is_mistyped_is_told_in_one_line(typed: str, told: str, capsys: Captured) -> None:
    assert ended(typed.split()) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert told in said.err
    assert said.err.startswith("lexshard")
    assert said.err.count("\n") == 1


def test_words_after_two_dashes_are_not_options_of_the_command(capsys: Captured) -> None:
    assert ended(["bench", "rest", "--seconds", "0", "--settle=-1", "--", "--prot", "1"]) == 1
    assert "--seconds, --settle" in capsys.readouterr().err


# -- what is said where it cannot be written ----------------------------------------------------


def said_to(arguments: list[str], shell: str, **environment: str) -> tuple[int, str]:
    """The status of a command that a ``shell`` runs, and what it says of errors."""
    command = [sys.executable, "-m", "lexshard.serve_app.cli", *arguments]
    done = subprocess.run(
        ["bash", "-c", f'"$0" "$@" {shell}', *command],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("arguments", [["--help"], ["serve", "--help=all"], ["config", "schema"]])
def test_output_that_nothing_takes_is_no_traceback(arguments: list[str], unbuffered: str) -> None:
    environment = {"PYTHONUNBUFFERED": unbuffered}
    full = said_to(arguments, "> /dev/full", **environment)
    assert full == (1, "lexshard: no more can be written: No space left on device\n")
    assert said_to(arguments, ">&-", **environment) == (0, "")
    code, told = said_to(arguments, "| true; exit ${PIPESTATUS[0]}", **environment)
    assert (code in (0, 141), told) == (True, "")


def test_what_is_no_letter_of_a_terminal_is_told_by_its_number() -> None:
    arguments = ["config", "show", "--model", "caf\u00e9"]
    assert said_to(arguments, "| grep -F 'caf\\xe9' >&2", PYTHONIOENCODING="ascii")[0] == 0


# -- refusals are quick ---------------------------------------------------------------------------


def test_a_server_that_cannot_start_says_so_before_anything_that_takes_time(tmp_path: Path) -> None:
    """Of all that is refused on Ray or without it, nothing waits for torch, numba or Ray."""
    folder = str(model_folder(tmp_path))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        refused = {
            "no model folder": ["serve", str(tmp_path / "absent")],
            "in use": ["serve", folder, "--port", str(taken.getsockname()[1])],
            "did you mean int8?": ["serve", folder, "--tier", "int88"],
            "no hot vocabulary": ["serve", folder, "--hot-vocabulary", "absent"],
            "is a folder: name the file": ["serve", folder, "--index", str(tmp_path)],
            "choose another": ["serve", folder, "--host", "no host"],
            "unknown option --prot": ["serve", folder, "--prot", "80"],
        }
        for told, arguments in refused.items():
            look = f"""
import sys
from lexshard.serve_app.cli import main
for backend in ("process", "ray"):
    try:
        code = main([*{arguments!r}, "--backend", backend])
    except SystemExit as end:
        code = end.code
    print(code, *(name for name in {COMPUTING!r} if name in sys.modules))
"""
            command = [sys.executable, "-c", look]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
            assert [told in line for line in done.stderr.splitlines()] == [True, True]
            assert done.stdout == "2\n2\n"


def test_a_servers_key_under_the_name_of_its_clients_key_leaves_it_not_open(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LEXSHARD_API_KEY", "secret")
    assert ended(["serve", "/absent", "--host", "0.0.0.0"]) == 2
    assert "would be open to all: set LEXSHARD_API_KEYS" in capsys.readouterr().err


# -- lexshard status ------------------------------------------------------------------------------


def answering(body: bytes) -> AbstractContextManager[str]:
    """The address of a server that says ``body``, whatever it is asked."""

    class Answer(StandInHandler):
        def answer(self) -> None:
            self.say(200, body)

    return serving(Answer)


def test_status_takes_an_address_as_people_write_it(capsys: Captured) -> None:
    with answering(json.dumps({"ready": True, "roles": []}).encode()) as address:
        port = address.rpartition(":")[2]
        for url in (
            f":{port}",
            f"localhost:{port}",
            f"127.0.0.1:{port}",
            f"http://localhost:{port}/",
            f"http://localhost:{port}/v1",
        ):
            assert ended(["status", "--json", "--url", url]) == 0, url
            assert json.loads(capsys.readouterr().out)["ready"] is True


@pytest.mark.parametrize("body", [b"<html>", b"[]", b'{"status": "ok"}'])
def test_status_of_what_is_no_server_of_ours_is_told(body: bytes, capsys: Captured) -> None:
    with answering(body) as address:
        assert ended(["status", "--url", address]) == 1
    assert capsys.readouterr().err == (
        f"lexshard: what answers at {address} is no lexshard server\n"
    )
