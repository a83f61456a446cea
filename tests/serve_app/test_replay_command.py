"""`lexshard replay` says of everything it is given whether it is proven, and none of it is lost."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from safetensors.torch import load_file, save_file

from lexshard.actors.receipts.document import Receipt, read_receipt
from lexshard.actors.receipts.replay import ReplayVerdict
from lexshard.actors.receipts.signature import Signer
from lexshard.serve_app.cli import main
from lexshard.serve_app.commands import replay
from lexshard.serve_app.openai.tokenization import ModelTokenizer
from lexshard.serve_app.receipts.files import found_in
from lexshard.serve_app.receipts.texts import is_text_of, told_text
from tests.support.demo_engine import demo_engine
from tests.support.paths import DEMO, ROOT
from tests.support.receipt_cases import receipt_requests, receipts_of

Captured = pytest.CaptureFixture[str]
GOOD: dict[str, Any] = json.loads((ROOT / "tests/actors/receipts/demo.json").read_text("utf-8"))
RECEIPT = read_receipt(GOOD)
MANY = "[" * 200_000


@pytest.fixture(scope="module")
def tokenizer() -> ModelTokenizer:
    return ModelTokenizer.load(DEMO)


@pytest.fixture(scope="module")
def text(tokenizer: ModelTokenizer) -> str:
    return tokenizer.decode(RECEIPT.output_ids)


def replayed(*paths: Path, more: tuple[str, ...] = ()) -> int:
    return main(["replay", *map(str, paths), "--model", str(DEMO), "--threads", "1", *more])


def choice(text: str, receipt: Any = GOOD, **more: Any) -> dict[str, Any]:
    own = {} if receipt is None else {"receipt": receipt}
    return {"index": 0, "text": text, "finish_reason": "length", **own, **more}


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (json.dumps({"choices": [choice("a", None)]}), "choice 0: there is no receipt in it"),
        (json.dumps({"choices": [5]}), "there is no receipt in it"),
        (json.dumps({"choices": None}), "there is no receipt in it"),
        (json.dumps({"choices": [choice("a", None, finish_reason=None)]}), "no receipt in it"),
        (json.dumps([]), "there is no receipt in it"),
        (json.dumps({**GOOD, "seed": "x"}), "its seed is no whole number"),
        (MANY, "its JSON is nested too deeply"),
        ('{"a":' * 200_000, "its JSON is nested too deeply"),
        (b"\xff\xfe", "can't decode byte"),
        ("{", "it is no JSON"),
        ("", "it is no JSON"),
    ],
)
def test_what_has_no_receipt_is_told_with_its_place_and_counts(
    content: str | bytes, why: str, tmp_path: Path, capsys: Captured
) -> None:
    path = tmp_path / "reply.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert replayed(path) == replay.UNTRIED
    [line] = capsys.readouterr().out.splitlines()
    assert line.startswith(f"{path}: NOT TRIED: ")
    assert why in line


def test_a_crash_is_not_told_as_a_reply_that_is_not_equal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    def failing(*_: Any) -> Iterator[Any]:
        raise AssertionError("a fault of ours")

    monkeypatch.setattr(replay, "_replayed", failing)
    path = tmp_path / "receipt.json"
    path.write_text(json.dumps(GOOD))
    assert replayed(path) == replay.UNTRIED
    assert "a fault of ours" in capsys.readouterr().err

    def interrupted(*_: Any) -> Iterator[Any]:
        raise KeyboardInterrupt

    monkeypatch.setattr(replay, "_replayed", interrupted)
    assert replayed(path) == 130
    assert capsys.readouterr().err.splitlines()[-1].startswith("lexshard: interrupted; ")
    with pytest.raises(SystemExit) as refused:
        replayed(path, more=("--threads", "0"))
    assert refused.value.code == 2


def test_lines_end_where_json_says_and_pieces_of_a_stream_have_one_receipt(tmp_path: Path) -> None:
    odd = "one\u2028two\u0085three"
    lines = [
        json.dumps({"id": "a", "choices": [choice(odd, None, finish_reason=None)]}),
        "",
        json.dumps({"id": "a", "choices": [choice(odd)]}, ensure_ascii=False),
        json.dumps({"id": "b", "choices": [choice("cut off", None, finish_reason=None)]}),
        json.dumps(GOOD),
    ]
    for name in ("stream.jsonl", "packed.json.gz", "other.jsonx"):
        (tmp_path / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    found = list(found_in(tmp_path))
    numbers = [each.place.rpartition(":")[2] for each in found]
    assert numbers == ["3", "5", "4"]
    assert [each.receipt is None for each in found] == [False, False, True]
    (tmp_path / "whole").write_text(json.dumps({"choices": [choice("")], "usage": {}}))
    (tmp_path / "last").write_text(json.dumps({"choices": [choice("")], "usage": None}))
    assert [each.whole for name in ("whole", "last") for each in found_in(tmp_path / name)] == [
        True,
        False,
    ]
    (empty := tmp_path / "empty").mkdir()
    assert [each.receipt for each in found_in(empty)] == [None]


def test_a_folder_is_tried_whole_and_ends_with_the_worst(
    tmp_path: Path, text: str, capsys: Captured
) -> None:
    signed = Signer(Ed25519PrivateKey.generate()).signed(RECEIPT).as_json()
    files: dict[str, Any] = {
        "a-good": {"choices": [choice(text), choice("", None, index=1)]},
        "b-misfit": {**GOOD, "prompt_ids": [10**6]},
        "c-no-json": None,
        "d-forged": {**signed, "seed": "8"},
        "e-other-text": {"choices": [choice(text.replace(" ", "  ", 1))]},
        "f-chat": {"choices": [{"index": 0, "message": {"content": text}, "receipt": signed}]},
        "g-called": {"choices": [{"message": {"tool_calls": [{}]}, "receipt": GOOD}]},
        "h-receipt": GOOD,
        "i-other-end": {"choices": [choice(text, finish_reason="stop")]},
        "j-piece": {"choices": [{"finish_reason": "stop", "delta": {}, "receipt": GOOD}]},
    }
    for name, content in files.items():
        (tmp_path / f"{name}.json").write_text("{" if content is None else json.dumps(content))
    verdicts = tmp_path / "verdicts"
    assert replayed(tmp_path, more=("--json", str(verdicts))) == replay.DIFFERENT
    told = capsys.readouterr().out
    assert told.splitlines()[-1].startswith("4 of 11 equal, 3 not tried; ")
    assert "11 of 11: " in told
    assert told.count("its finish_reason differs") == 2
    assert "its text was not compared" in told
    found = [
        (Path(each["place"]).stem[0], each["equal"], each["reason"], each.get("equal_text"))
        for each in json.loads(verdicts.read_text())
    ]
    assert found == [
        ("a", True, None, True),
        ("a", None, "not tried", None),
        ("b", None, "not tried", None),
        ("c", None, "not tried", None),
        ("d", False, "altered", None),
        ("e", False, "altered", False),
        ("f", True, None, True),
        ("g", True, None, None),
        ("h", True, None, None),
        ("i", False, "altered", True),
        ("j", False, "altered", None),
    ]
    good = tmp_path / "a-good.json"
    assert replayed(good) == replay.UNTRIED  # equal, but one choice has no receipt
    assert replayed(tmp_path / "h-receipt.json") == replay.EQUAL


def test_receipts_are_replayed_on_the_body_that_made_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    seen: list[dict[str, Any]] = []

    def noted(own: Mapping[int, Receipt], _: Any, __: Any, settings: Mapping[str, Any]) -> Any:
        seen.append({**settings, "receipts": len(own)})
        return ((index, ReplayVerdict(1, 1)) for index in own)

    monkeypatch.setattr(replay, "_replayed", noted)
    bodies = ("general", "fused", "parallel", "parallel general of 2", "general")
    for number, body in enumerate(bodies):
        arithmetic = replace(RECEIPT.made_by.arithmetic, body=body)
        made = replace(RECEIPT, made_by=replace(RECEIPT.made_by, arithmetic=arithmetic))
        (tmp_path / f"{number}.json").write_text(json.dumps(made.as_json()))
    assert replayed(tmp_path) == replay.UNTRIED
    common = {"dtype": "float32", "threads": 1}
    assert seen == [
        {**common, "body": "general", "batch_invariant": True, "receipts": 2},
        {**common, "device": "cpu", "receipts": 1},
        {**common, "device": "cpu", "tensor_parallel": 1, "receipts": 1},
    ]
    assert "NOT TRIED: its body is 'parallel general of 2'" in capsys.readouterr().out


def test_texts_are_those_that_a_server_makes_of_the_tokens(
    tokenizer: ModelTokenizer, text: str
) -> None:
    def same(said: dict[str, Any], receipt: Receipt = RECEIPT, whole: bool = True) -> bool | None:
        told = told_text(said)
        assert told is not None
        return is_text_of(told, receipt, tokenizer, whole=whole)

    prompt = tokenizer.decode(RECEIPT.prompt_ids)
    assert same(choice(text))
    assert same(choice(prompt + text))  # an echo
    assert not same(choice("Another prompt" + text))
    assert not same(choice(text[:-1]))
    assert same(choice(text[5:])) is False
    assert same(choice(text[5:]), whole=False) is None  # it may be the last piece of a stream
    assert same(choice(text[5:] + "!"), whole=False) is False
    assert not same(choice(""))
    [end] = [tokenizer.vocabulary()[each] for each in sorted(tokenizer.special_tokens())][:1]
    ended = replace(RECEIPT, output_ids=(*RECEIPT.output_ids, end), finish_reason="stop")
    assert same(choice(text), ended)
    assert same(choice(text + tokenizer.decode([end])), ended)
    both: dict[str, Any] = {"text": text, "message": {"content": "another"}}
    for name, own in {"delta": {"content": text}, "message": {"tool_calls": [{}]}}.items():
        assert told_text({name: own}) is None
    assert told_text(both) is None


def test_a_reply_is_replayed_where_its_model_was_never_loaded(text: str, tmp_path: Path) -> None:
    """By the command itself, which has imported nothing that tests have: the body is proven there
    against transformers' own, whose tokenizer it needs, too."""
    folder, reply = tmp_path / "model", tmp_path / "reply.json"
    shutil.copytree(DEMO, folder, ignore=shutil.ignore_patterns("*.lexshard*"))
    reply.write_text(json.dumps({"choices": [choice(text)]}))
    command = [sys.executable, "-P", "-m", "lexshard.serve_app.cli", "replay", str(reply)]
    done = subprocess.run(
        [*command, "--model", str(folder), "--threads", "1"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == replay.EQUAL, done.stderr
    assert "equal, all 64 tokens, and the text" in done.stdout


def requantised(weights: dict[str, torch.Tensor]) -> None:
    """In int8, a scale for each row, and back."""
    for name, weight in weights.items():
        if weight.ndim == 2:
            scale = weight.float().abs().amax(dim=1, keepdim=True).clamp_min(1e-12) / 127
            weights[name] = ((weight.float() / scale).round() * scale).to(weight.dtype)


def one_row_a_step_off(weights: dict[str, torch.Tensor]) -> None:
    """Each weight of it by one step of bfloat16."""
    weights["model.embed_tokens.weight"][777].view(torch.int16).add_(1)


@pytest.mark.slow
@pytest.mark.parametrize("altered", [requantised, one_row_a_step_off])
def test_other_weights_are_told_of_every_receipt(
    altered: Callable[[dict[str, torch.Tensor]], None],
    tmp_path: Path,
    prompt_ids: list[tuple[int, ...]],
) -> None:
    every = receipt_requests([(index, *ids) for index, ids in enumerate(8 * prompt_ids)], 1000)
    asked = [each for each in every if each.parameters.min_tokens <= each.parameters.max_tokens]
    engine = demo_engine(max_model_len=128)
    try:
        receipts = receipts_of(engine, asked)
    finally:
        engine.close()
    lines = tmp_path / "receipts.jsonl"
    lines.write_text("\n".join(json.dumps(each.as_json()) for each in receipts))
    folder, verdicts = tmp_path / "demo", tmp_path / "verdicts"
    shutil.copytree(DEMO, folder, ignore=shutil.ignore_patterns("*.lexshard*"))
    weights = load_file(folder / "model.safetensors")
    altered(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    own = ("--model", str(folder), "--json", str(verdicts))
    assert replayed(lines, more=own) == replay.DIFFERENT
    told = json.loads(verdicts.read_text())
    assert [each["reason"] for each in told] == ["other model"] * len(asked)
    if altered is requantised:  # most say another token, or a logit of other bits, too
        assert sum(each["equal_tokens"] < each["tokens"] for each in told) > len(told) / 2
