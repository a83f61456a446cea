"""``lexshard bench draft``: prompts as users send them, heads of equal size, one record."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lexshard.loadtest.bench import draft
from lexshard.loadtest.bench.options.draft import add_arguments
from lexshard.loadtest.bench.synthetic.tasks import read_tasks
from lexshard.loadtest.draft_heads.compared import (
    AS_TRAINED,
    FIXED,
    FULL,
    PAPER,
    ROUTER,
    STATIC,
    DraftHeads,
)
from tests.support.bench_options import parsed
from tests.support.router_cases import TinyPair, router_file, some_positions


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    return TinyPair(tmp_path_factory.mktemp("pair"))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A record or two of every set, in the form it is published in."""
    spec = [
        {"question_id": 81, "category": "writing", "turns": ["Write a story.", "Again."]},
        {"question_id": 82, "category": "coding", "turns": ["Write a program."]},
        {"question_id": 161, "category": "translation", "turns": ["Translate: Guten Tag"]},
    ]
    files = {
        "spec_bench_question.jsonl": spec,
        "mt_bench_question.jsonl": spec[:2],
        "gsm8k_test.jsonl": [{"question": "How many eggs are left?", "answer": "#### 3"}],
    }
    for name, records in files.items():
        (tmp_path / name).write_text("\n".join(map(json.dumps, records)), encoding="utf-8")
    code = json.dumps({"task_id": "HumanEval/0", "prompt": "def one():\n"}).encode()
    (tmp_path / "HumanEval.jsonl.gz").write_bytes(gzip.compress(code))
    return tmp_path


def test_prompts_are_sent_as_users_send_them(data: Path, demo_tokenizer: Any) -> None:
    tasks = read_tasks(data, demo_tokenizer, 100)
    texts = {name: [demo_tokenizer.decode(ids) for ids in asked] for name, asked in tasks.items()}
    assert texts["Spec-Bench conversation"] == texts["MT-Bench"]
    assert len(texts["MT-Bench"]) == 2
    assert texts["GSM8K"] == ["<|user|>\nHow many eggs are left?<|end|>\n<|assistant|>\n"]
    assert texts["HumanEval"] == ["def one():\n"]
    assert "Guten Tag" in texts["Spec-Bench translation"][0]
    short = read_tasks(data, demo_tokenizer, 3)
    assert all(len(ids) <= 3 for asked in short.values() for ids in asked)


def test_rivals_of_the_router_look_at_no_fewer_tokens(pair: TinyPair) -> None:
    cluster_of = np.arange(pair.size, dtype=np.int32) % 9
    router = router_file(cluster_of, pair.weight.shape[1])
    heads = DraftHeads(pair.weight, router, 4, shares=(0.2, 0.4))
    compared = heads.lengths(some_positions(pair, 200))
    assert list(compared) == [AS_TRAINED, "20%", "40%"]
    for size, lengths in compared.items():
        ours = lengths[ROUTER if size == AS_TRAINED else PAPER]
        assert lengths[FULL].share == 1
        for rival in (PAPER, FIXED, STATIC):
            assert lengths[rival].share >= ours.share
        assert lengths[STATIC].share - ours.share <= 1 / pair.size
        # Every draft of 10 tokens that has room for four guesses.
        assert all(0 <= each.mean <= 4 and len(each.accepted) >= 40 for each in lengths.values())
    assert compared["20%"][PAPER].share >= 0.2
    assert compared["40%"][PAPER].share >= 0.4


@pytest.mark.slow
def test_the_demo_pair_is_measured(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = tmp_path / "draft.json"
    options = ["--data", str(data), "--quick", "--tokens", "32", "--shares", "0.05"]
    options += ["--json", str(written)]
    assert draft.run(parsed(add_arguments, *options)) == 0
    content = json.loads(written.read_text(encoding="utf-8"))
    names = {each["name"] for each in content["results"]}
    assert {FULL, ROUTER, PAPER, FIXED, STATIC} <= names
    assert "of the full head's accepted guesses" in capsys.readouterr().out
