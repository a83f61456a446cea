"""``lexshard config``: through the entry that users call."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from lexshard.actors.index.container import write
from lexshard.actors.index.format import describe_weights
from lexshard.actors.index.metadata import Weights
from lexshard.actors.stored_tensors import stored_tensors
from lexshard.cluster.config import GROUPS, OPTIONS, configuration_schema
from lexshard.cluster.ports import free_port
from lexshard.serve_app.cli import main
from tests.support.mock_server import model_folder
from tests.support.paths import DEMO, DEMO_DRAFT

pytestmark = pytest.mark.usefixtures("no_options_of_the_machine")

Captured = pytest.CaptureFixture[str]


def written(folder: Path, **values: object) -> str:
    path = folder / "serve.yaml"
    path.write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in values.items()))
    path.chmod(0o600)
    return str(path)


def demo_weights() -> Weights:
    """What an index of the demo model says of its output weights."""
    [embedding] = [each for each in stored_tensors(DEMO) if "embed_tokens" in each.name]
    weight = np.memmap(embedding.file, np.uint16, "r", embedding.start, embedding.shape)
    bits = torch.from_numpy(np.array(weight))
    return describe_weights(bits.view(torch.bfloat16), None)


def test_show_tells_every_value_with_its_origin_and_no_secret(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path, model="a", threads=1, api_keys=["sk-secret"])
    monkeypatch.setenv("LEXSHARD_THREADS", "2")
    arguments = ["config", "show", "--config", path, "--port", "9000"]
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    titles = [line for line in shown.splitlines() if not line.startswith(" ")]
    assert titles == list(GROUPS.values())
    rows = [line for line in shown.splitlines() if line.startswith(" ")]
    lines = dict(line.split(maxsplit=1) for line in rows)
    assert list(lines) == [option.key for option in OPTIONS]
    told = {key: re.split(r"\s{2,}", text) for key, text in lines.items()}
    assert told["port"] == ["9000", "flag --port"]
    assert told["threads"] == ["2", "environment LEXSHARD_THREADS"]
    assert told["model"] == ["a", f"file {path}"]
    assert told["api_keys"] == ["1 set", f"file {path}"]
    assert told["index"] == ["not set", "default"]
    assert main([*arguments, "--json"]) == 0
    as_json = capsys.readouterr().out
    assert json.loads(as_json)["port"] == {"value": 9000, "from": "flag --port"}
    assert "secret" not in shown + as_json


def test_the_schema_is_printed_as_json(capsys: Captured) -> None:
    assert main(["config", "schema"]) == 0
    assert json.loads(capsys.readouterr().out) == configuration_schema()


def test_check_takes_what_a_server_would_start_with(tmp_path: Path, capsys: Captured) -> None:
    path = written(tmp_path, model=str(DEMO), draft=str(DEMO_DRAFT), port=free_port())
    assert main(["config", "check", path]) == 0
    assert "is valid: 3 options set" in capsys.readouterr().out


def test_check_tells_what_would_keep_a_server_from_starting(
    tmp_path: Path, capsys: Captured
) -> None:
    model = str(model_folder(tmp_path))
    port = free_port()
    index = tmp_path / "index"
    write(index, Weights("0" * 64, 16_384, 256, "bfloat16", bias=False), {})
    own = tmp_path / "own"
    write(own, demo_weights(), {})
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_text("{}")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        cases = [
            ({"prot": 1}, "unknown option 'prot': did you mean port?"),
            ({"dtype": "int3"}, "not 'int3'"),
            ({"model": str(tmp_path / "absent")}, "no model folder at .* or a name on the Hugging"),
            ({"model": str(bare)}, r"has no tokenizer\.json; download the model again"),
            ({"draft": str(bare)}, r"has no tokenizer\.json"),
            ({"draft": str(DEMO_DRAFT)}, "cannot draft for .* Use a draft model with"),
            ({"model": str(DEMO), "index": str(index)}, "built from output weights 000.* --out"),
            ({"model": str(DEMO), "index": str(own)}, "has no tier int8, int4, only none: build"),
            ({"model": str(DEMO), "index": str(own), "head": "paper"}, "has no clusters"),
            ({"hot_vocabulary": "absent"}, "no hot vocabulary at /.*absent: make one with"),
            ({"port": taken.getsockname()[1]}, "in use; choose another --port"),
        ]
        for values, told in cases:
            path = written(tmp_path, **{"model": model, "port": port} | values)
            assert main(["config", "check", path]) == 2
            error = capsys.readouterr().err
            assert re.search(told, error), error
            assert error.count("\n") == 1


def test_a_flag_cut_short_and_a_key_on_the_command_line_are_refused(capsys: Captured) -> None:
    for flag in ("--max-batch", "--api-key"):
        with pytest.raises(SystemExit) as end:
            main(["config", "show", "--model", "a", flag, "3"])
        assert end.value.code == 2
        assert f"unknown option {flag}: did you mean --" in capsys.readouterr().err


def test_a_reader_that_has_read_enough_is_no_error() -> None:
    schema = f"{sys.executable} -m lexshard.serve_app.cli config schema"
    command = f"{schema} | head -1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode in (0, 141)
    assert done.stderr == ""
