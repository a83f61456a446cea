"""``lexshard completion``: what a real shell offers."""

from __future__ import annotations

import contextlib
import io
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest

from lexshard.serve_app.cli import main


@cache
def script(shell: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as output:
        assert main(["completion", shell]) == 0
    return output.getvalue()


def offered(bash: str, typed: list[list[str]]) -> list[list[str]]:
    """What bash offers for the last word of each of ``typed``."""
    asked = [script("bash")]
    for words in typed:
        quoted = " ".join(f"'{word}'" for word in words)
        asked.append(f"COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; _lexshard")
        asked.append('printf "%s " "${COMPREPLY[@]}"; echo')
    done = subprocess.run(
        [bash], input="\n".join(asked), capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    return [line.split() for line in done.stdout.splitlines()]


def test_bash_completes_commands_options_values_and_files(tmp_path: Path) -> None:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("no bash here")
    (tmp_path / "serve.yaml").touch()
    begun = str(tmp_path / "ser")
    expected = {
        "conf": ["config"],
        "config s": ["show", "schema"],
        "serve --max-b": ["--max-batch-size", "--max-body-bytes"],
        "serve --log-format ": ["text", "json"],
        "serve --help s": ["sampling", "speculation"],
        "serve --tier int4": ["int4", "int4-dither"],
        f"config check {begun}": [f"{begun}ve.yaml"],
        f"serve --config {begun}": [f"{begun}ve.yaml"],
    }
    words = [["lexshard", *typed.split(" ")] for typed in (*expected, "", "completion ")]
    *told, first, shells = offered(bash, words)
    assert told == list(expected.values())
    assert {"serve", "status", "completion"} <= set(first)
    assert shells[-3:] == ["bash", "zsh", "fish"]


def test_zsh_reads_the_script() -> None:
    zsh = shutil.which("zsh")
    if zsh is None:
        pytest.skip("no zsh here")
    asked = f"autoload -U compinit && compinit -D\n{script('zsh')}\nprint $_comps[lexshard]"
    done = subprocess.run([zsh, "-f"], input=asked, capture_output=True, text=True, check=True)
    assert "_bash_complete" in done.stdout
    assert done.stderr == ""


def test_fish_completes_commands_and_options() -> None:
    fish = shutil.which("fish")
    if fish is None:
        pytest.skip("no fish here")
    for typed, expected in (
        ("lexshard serv", {"serve"}),
        ("lexshard config s", {"show", "schema"}),
        ("lexshard serve --log-format ", {"text", "json"}),
    ):
        asked = f"{script('fish')}\ncomplete -C '{typed}'"
        done = subprocess.run([fish], input=asked, capture_output=True, text=True, check=True)
        assert {line.split("\t")[0] for line in done.stdout.splitlines()} == expected
