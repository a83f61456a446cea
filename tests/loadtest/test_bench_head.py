"""``lexshard bench head``: heads are what they say, every contender decides the same rows, and the
certified tokens are compared with canonical ones."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from lexshard.loadtest.bench import head, machine
from lexshard.loadtest.bench.contenders.head import OURS, head_contenders
from lexshard.loadtest.bench.options import head as head_options
from lexshard.loadtest.bench.options.head import TIERS
from lexshard.loadtest.bench.synthetic.head_workload import (
    SAMPLING_METHODS,
    HeadWorkload,
    synthetic_workload,
)
from lexshard.loadtest.bench.synthetic.heads import (
    BEST,
    FLAT_SHARE,
    SIZE,
    synthetic_head,
    synthetic_hidden,
)
from tests.support.bench_options import parsed

# -- synthetic heads ------------------------------------------------------------------------------


def test_rows_and_hidden_states_are_what_was_asked_for() -> None:
    weight = synthetic_head(4096, 1024, dtype=torch.float32, seed=4)
    assert torch.equal(weight, synthetic_head(4096, 1024, dtype=torch.float32, seed=4))
    assert float(weight.norm(dim=1).mean()) == pytest.approx(1.0, abs=0.02)
    hidden = synthetic_hidden(weight, 16, seed=5)
    assert hidden.norm(dim=1).numpy() == pytest.approx(SIZE * 32, rel=1e-5)
    best = (hidden @ weight.T).amax(dim=1)
    assert int((best < BEST - 1).sum()) == FLAT_SHARE * 16
    assert float(best.max()) == pytest.approx(BEST, abs=1e-3)


@pytest.fixture(scope="module")
def workload() -> HeadWorkload:
    return synthetic_workload(2000, 128, torch.bfloat16, seed=8)


@pytest.mark.parametrize("tier", [*TIERS, "dense"])
@pytest.mark.parametrize("name", SAMPLING_METHODS)
def test_certified_tokens_are_those_of_all_canonical_logits(
    workload: HeadWorkload, tier: str, name: str
) -> None:
    ours = head_contenders(workload, tier, 3)[OURS]
    for number in range(4):
        step = head.step_of(workload, SAMPLING_METHODS[name], 3, number)
        output = ours.answer(step)
        assert np.array_equal(output.tokens, head.canonical_tokens(workload, step))
        assert len(output.certificates) == 3


# -- the command ----------------------------------------------------------------------------------


parse = partial(parsed, head_options.add_arguments)
SMALL = ("-V", "1024", "-d", "128", "--batch", "1,3", "--runs", "2")


@pytest.mark.slow
@pytest.mark.parametrize("tier", ["auto", "int8"])
def test_a_run_writes_times_certificates_and_ratios(
    tier: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "ARRAY_BYTES", 1 << 22)
    path = tmp_path / "head.json"
    needs_ = "greedy,gumbel,top50,minp"
    assert head.run(parse(*SMALL, "--need", needs_, "--tier", tier, "--json", str(path))) == 0
    printed = capsys.readouterr().out
    assert "equal to those of all canonical logits: 32 of 32" in printed
    written = json.loads(path.read_text())
    parts = {"machine", "versions", "date", "command", "seed", "results", "ratios"}
    assert set(written) == parts
    times = [each for each in written["results"] if each["case"]["measure"] == "time"]
    names = {each["name"] for each in times}
    assert names == {"certified", "own dense", "torch fp32", "torch bf16"}
    assert len(times) == 2 * 4 * 4
    assert all(each["runs"] == 2 and each["median"] > 0 for each in times)
    equal = [each for each in written["results"] if "equal" in each["case"]["measure"]]
    assert [each["median"] for each in equal] == [100.0] * 8
    assert {each["against"] for each in written["ratios"]} == names - {"certified"}


def test_a_wrong_token_fails_the_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "ARRAY_BYTES", 1 << 22)
    original = HeadWorkload.logits

    def shifted(self: HeadWorkload, hidden: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        return -original(self, hidden)

    monkeypatch.setattr(HeadWorkload, "logits", shifted)
    assert head.run(parse(*SMALL, "--need", "greedy", "--tier", "int8")) == 1
    captured = capsys.readouterr()
    assert "8 certified tokens are wrong" in captured.err
    assert "canonical logits: 0 of 8" in captured.out
