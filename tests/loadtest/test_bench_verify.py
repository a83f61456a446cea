"""``lexshard bench verify``: contenders verify, the floor reads everything, errors are true."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from lexshard.kernels.noise import gumbel_row
from lexshard.kernels.verify import Verdict
from lexshard.kernels.verify.reference import log_softmax
from lexshard.loadtest.bench import verify
from lexshard.loadtest.bench.contenders.verify import (
    EXACT,
    READ,
    OwnVerify,
    ReadOnce,
    TorchVerify,
    transformers_loop,
    verify_contenders,
    verify_in_torch,
)
from lexshard.loadtest.bench.options.verify import AGREEMENTS, LIMITS, add_arguments
from lexshard.loadtest.bench.synthetic.drafts import SEQUENCES, VerifyStep, steps_of
from tests.support.bench_options import parsed


@pytest.mark.parametrize("batch", [1, 3, 16, 20])
def test_a_run_is_sixteen_sequences_whatever_the_batch(batch: int) -> None:
    steps = steps_of(100, 2, batch, "close", 3)
    assert {step.batch for step in steps} == {batch}
    assert {step.gamma for step in steps} == {2}
    assert sum(step.batch for step in steps) >= SEQUENCES
    keys = [int(key) for step in steps for key in step.rows.key[::2]]  # two drafts each
    assert keys == list(range(len(keys)))


def test_drafters_disagree_as_their_names_say() -> None:
    distances = {
        name: np.mean(verify.drafter_distances(steps_of(500, 2, 4, name, 5))) for name in AGREEMENTS
    }
    assert distances["same"] < 1e-12
    assert 0.05 < distances["close"] < 0.4 < distances["far"]


@pytest.fixture(scope="module")
def steps() -> list[VerifyStep]:
    return steps_of(300, 3, 4, "close", 7)


def test_ours_are_the_reference_and_errors_are_counted(steps: list[VerifyStep]) -> None:
    ours = OwnVerify(steps)
    assert verify.compare_with_reference({EXACT: ours}, steps, 6) == (0, 6)

    class Wrong(OwnVerify):
        def decide(self, number: int) -> Verdict:
            found = super().decide(number)
            return Verdict(found.tokens + 1, found.logits_read)

    wrong = Wrong(steps)
    assert verify.compare_with_reference({EXACT: ours, "wrong": wrong}, steps, 3) == (3, 6)


def test_the_token_after_all_drafts_is_drawn_by_ours_too() -> None:
    some = steps_of(300, 3, 4, "same", 7)[0]
    tokens = OwnVerify([some]).decide(0).tokens.reshape(4, 4)
    assert tokens[:, :3].tolist() == some.rows.drafts.reshape(4, 3).tolist()
    noise = [gumbel_row(key, 3, 300) for key in range(4)]
    assert tokens[:, 3].tolist() == (np.float64(some.logits[3::4]) + noise).argmax(1).tolist()


def test_all_contenders_accept_at_the_rate_of_the_law() -> None:
    """One token is likely to both models: p(x) / q(x) is known, and each contender's share of
    standing drafts is within 5 standard errors of it."""
    target, drafter = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.8, 0.1, 0.1])
    count = 2000
    logits = target.log().expand(count, 2, 3).contiguous()
    proposed = drafter.log().expand(count, 1, 3).contiguous()
    drafts = torch.zeros(count, 1, dtype=torch.int64)
    torch.manual_seed(0)
    accepted, tokens = verify_in_torch(logits, proposed, drafts)
    rate = 0.5 / 0.8
    assert abs(float(accepted.double().mean()) - rate) < 5 * np.sqrt(rate * (1 - rate) / count)
    assert not (tokens[accepted == 0] == 0).any()  # of max(0, p - q) nothing is left there


def test_transformers_takes_what_it_is_given() -> None:
    for gamma in (1, 3):
        some = steps_of(300, gamma, 4, "same", 7)
        contender = TorchVerify(some, transformers_loop)
        output = contender.output(contender.decide(0), some[0])
        assert output.accepted is not None
        assert output.accepted.tolist() == [gamma] * 4
        assert output.bytes_read == 4 * (2 * gamma + 1) * 300 * 4


def test_the_floor_reads_every_byte(steps: list[VerifyStep]) -> None:
    for threads in (1, 2):
        contender = ReadOnce(steps, threads)
        contender.decide(0)
        output = contender.output(None, steps[0])
        assert output.bytes_read == steps[0].input_bytes == 4 * 7 * 300 * 4


def test_the_error_of_the_true_weights_is_nothing(steps: list[VerifyStep]) -> None:
    p, q = (np.exp(log_softmax(row, 1.0)) for row in (steps[0].logits[0], steps[0].proposed[0]))
    assert verify.total_variation(verify.emitted_law(p, q, q), p) < 1e-12
    assert verify.total_variation(
        verify.emitted_law(np.ones(300), q, np.ones(300)), p
    ) == pytest.approx(verify.total_variation(p, q))
    wide, narrow = (np.mean(verify.sigmoid_errors(steps, -each, each)) for each in (1e4, 1.0))
    assert 0.01 < narrow < wide < 1.01 * np.mean(verify.drafter_distances(steps))


def test_peak_memory_is_what_a_call_takes_for_a_moment() -> None:
    taken = verify.peak_memory(lambda: np.ones(1 << 22).sum())
    nothing = verify.peak_memory(lambda: None)
    if taken is None or nothing is None:
        pytest.skip("this system does not tell")
    assert 30e6 < taken < 45e6
    assert nothing < 4e6


@pytest.mark.slow
def test_the_command_prints_and_writes_every_figure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "verify.json"
    options = "-V 500 --gamma 1,2 --batch 1,4 --runs 2 --json"
    assert verify.run(parsed(add_arguments, *options.split(), str(file))) == 0
    printed = capsys.readouterr().out
    for words in ("read once", "transformers", "total variation error", "40 of 40"):
        assert words in printed
    written = json.loads(file.read_text())
    names = {each["name"] for each in written["results"] if each["case"]["measure"] == "time"}
    assert names == set(verify_contenders([], LIMITS, 1))
    times = [each for each in written["results"] if each["case"]["measure"] == "time"]
    assert all(each["runs"] == 2 for each in times)
    assert {each["against"] for each in written["ratios"]} == names - {EXACT}
    assert READ in names
