"""``lexshard bench schemas`` over files with right and wrong instances."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lexshard.serve_app.cli import main
from tests.support.paths import DEMO

POINT = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
ODD = {"type": "object", "properties": {"a": {"not": {"type": "string"}}}}


def write(folder: Path, name: str, schema: Any, **valid: bool) -> None:
    instances = {"right": {"a": 1}, "wrong": {"a": "é"}}
    tests = [{"data": instances[each], "valid": told} for each, told in valid.items()]
    (folder / f"{name}.json").write_text(json.dumps({"schema": schema, "tests": tests}))


@pytest.mark.slow
def test_real_schemas_are_held_and_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    write(folder, "held", POINT, right=True, wrong=False)
    write(folder, "left", ODD, right=True, wrong=False)
    write(folder, "refused", {"type": "strange"}, right=True)
    record = tmp_path / "record.json"
    record.write_text(json.dumps({"held.json": {}, "left.json": {"json_error": "not"}}))
    written = tmp_path / "figures.json"
    asked = f"bench schemas --model {DEMO} --folder {folder} --record {record} --json {written}"
    assert main([*asked.split(), "--quick", "--requests", "1"]) == 0
    told = capsys.readouterr().out
    assert "3 schemas: 1 held, of 1 a part was left to the model, 1 refused" in told
    assert "valid instances: 2 passed, in 0 files some did not" in told
    assert "invalid instances: 1 stopped, 1 passed where a note tells" in told
    assert "1 of these schemas llguidance holds by its record: 1 are held" in told
    names = {each["name"] for each in json.loads(written.read_text())["results"]}
    assert names == {"lexshard", "lexshard, free text"}


def test_an_instance_that_comes_out_otherwise_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Here the files are wrong: what they call invalid is valid, and the other way round."""
    write(tmp_path, "held", POINT, right=False)
    write(tmp_path, "other", POINT, wrong=True)
    record = tmp_path / "record"
    record.write_text(json.dumps({"other.json": {}}))
    asked = f"bench schemas --model {DEMO} --folder {tmp_path} --record {record} --held-only"
    assert main(asked.split()) == 1
    told = capsys.readouterr()
    assert 'wrong: held: {"a":1}' in told.out
    assert 'wrong: other: {"a":"é"}' in told.out
    assert "2 instances are wrong" in told.err


def test_a_folder_without_files_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "schemas", "--model", str(DEMO), "--folder", str(tmp_path)]) == 1
    assert "has no *.json" in capsys.readouterr().err
