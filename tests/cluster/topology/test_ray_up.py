"""`ray up cluster/local.yaml` starts a cluster and `ray down` ends it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from lexshard.actors.configuration import EngineConfiguration
from lexshard.actors.engine.engine import Engine
from lexshard.actors.messages import SamplingParameters
from tests.support.paths import DEMO, ROOT
from tests.support.ray_up import PROMPT, SAMPLING, command, missing

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def test_ray_up_over_ssh_and_down_again(tmp_path: Path) -> None:
    why_not = missing()
    if why_not:
        pytest.skip(why_not)
    done = subprocess.run(command(tmp_path), cwd=ROOT, capture_output=True, text=True, check=False)
    print(done.stdout[-20_000:], done.stderr[-5_000:])
    assert done.returncode == 0
    told = json.loads(done.stdout.splitlines()[-1])
    assert "0.0/2.0 CPU" in told["status"]
    assert told["refused"], "Ray answers without a token"
    assert told["dashboard"] == "127.0.0.1"
    assert told["left"] == {"processes": [], "ports": [], "files": []}
    engine = Engine(EngineConfiguration(model=str(DEMO), head="dense", threads=1))
    [expected] = engine.generate([PROMPT], SamplingParameters(**SAMPLING))
    assert told["text"] == expected.text
