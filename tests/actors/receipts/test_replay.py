"""What a receipt says can be made again, wherever it was made, and nothing else can."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from lexshard.actors.configuration import EngineConfiguration
from lexshard.actors.engine.engine import Engine
from lexshard.actors.messages import FinishReason, Request, SamplingParameters
from lexshard.actors.receipts.document import (
    ARITHMETIC_VERSION,
    Arithmetic,
    Receipt,
    ReceiptError,
    read_receipt,
)
from lexshard.actors.receipts.run import replayed
from lexshard.cluster.samplers.start import start_sampler
from tests.support.demo_engine import demo_engine
from tests.support.paths import DEMO, DEMO_DRAFT
from tests.support.quick import quick
from tests.support.receipt_cases import (
    maker_of,
    receipt_requests,
    receipts_of,
    spelling,
    verdicts_of,
    with_rule,
)
from tests.support.thread_shards import ThreadShards

COUNT, MANY = 64, 1000
BLOCK_BYTES = 65_536  # of keys and values of 16 tokens
ENGINES: dict[str, dict[str, Any]] = {
    "alone": {},
    "drafts": {"draft": str(DEMO_DRAFT)},
    "look-up": {"draft": "ngram"},
    "little room": {"kv_cache_bytes": 14 * BLOCK_BYTES, "prefix_cache": False},
    "samplers": {"samplers": 2},
    "dense": {"head": "dense"},
    "two threads": {"threads": 2},
    "four shards": {"shards": 4, "draft": str(DEMO_DRAFT)},
    "bfloat16": {"dtype": "bfloat16"},
}


def engine_of(**settings: Any) -> Engine:
    if "shards" not in settings:
        return demo_engine(**{"max_model_len": 128, **settings})
    told = {"dtype": "float32", "device": "cpu", "threads": 1, "max_model_len": 128, **settings}
    configuration = EngineConfiguration(str(DEMO), **told)
    return Engine(configuration, start_sampler, None, ThreadShards(configuration))


@pytest.fixture(scope="module")
def requests(prompt_ids: list[tuple[int, ...]]) -> list[Request]:
    return receipt_requests(prompt_ids, COUNT)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    running = engine_of()
    yield running
    running.close()


@pytest.fixture(scope="module")
def receipts(engine: Engine, requests: list[Request]) -> list[Receipt]:
    found = receipts_of(engine, requests)
    assert sum(map(len, (each.output_ids for each in found))) > 400
    assert len({each.stop_reason for each in found if isinstance(each.stop_reason, str)}) > 1
    return found


@pytest.mark.parametrize("name", quick(ENGINES, "bfloat16", "dense", "drafts"))
def test_a_reply_is_made_again_whatever_it_was_made_beside(
    name: str, requests: list[Request], receipts: list[Receipt], engine: Engine
) -> None:
    other = engine_of(**ENGINES[name])
    try:
        made = receipts_of(other, requests)
        if name != "bfloat16":
            assert made == receipts
        again = verdicts_of(other if name == "bfloat16" else engine, made)
    finally:
        other.close()
    assert [each for each in again if not each.right] == []
    assert [each.equal for each in again] == [len(each.output_ids) for each in made]


def test_a_receipt_of_26_november_2026_is_equal_on_every_machine(engine: Engine) -> None:
    """Made in float32 on an AMD EPYC without AVX-512. Where it fails and the demo is the same,
    logits have other bits: raise `ARITHMETIC_VERSION`, and make it anew."""
    path = Path(__file__).with_name("demo.json")
    receipt = read_receipt(json.loads(path.read_text(encoding="utf-8")))
    (verdict,) = verdicts_of(engine, [receipt])
    assert (verdict.explanation, verdict.equal) == ("", 64)


def altered(receipt: Receipt, random: np.random.Generator) -> Receipt:
    """One token is another, or one option, the seed or the end is."""
    place = int(random.integers(-4, len(receipt.output_ids)))
    if place >= 0:
        ids = list(receipt.output_ids)
        ids[place] = (ids[place] + int(random.integers(1, 16_384))) % 16_384
        return replace(receipt, output_ids=tuple(ids))
    options = receipt.options
    changes: tuple[Callable[[], Receipt], ...] = (
        lambda: replace(receipt, seed=receipt.seed ^ 1),
        lambda: replace(receipt, options={**options, "temperature": 0.31}),
        lambda: replace(receipt, options={**options, "max_tokens": options["max_tokens"] + 1}),
        lambda: replace(
            receipt, finish_reason="stop" if receipt.finish_reason == "length" else "length"
        ),
    )
    return changes[place]()


def test_whatever_is_altered_is_found(engine: Engine, receipts: list[Receipt]) -> None:
    random = np.random.default_rng(5)
    wrong = [altered(each, random) for each in receipts for _ in range(3)]
    found = verdicts_of(engine, wrong)
    assert [each for each in found if each.right] == []
    assert {each.reason for each in found} == {"altered"}
    at_tokens = [each for each in found if each.found is not None]
    assert len(at_tokens) > 100
    for verdict, receipt in zip(found, wrong, strict=True):
        if verdict.found is not None:
            assert verdict.found == receipt.output_ids[verdict.equal] != verdict.expected


def cut(receipt: Receipt, tokens: int, stop_reason: str) -> Receipt:
    return cut_with_end(receipt, tokens, "stop", stop_reason)


def cut_with_end(receipt: Receipt, tokens: int, reason: FinishReason, stop: Any) -> Receipt:
    """What any holder of the receipt can write: digests of ends take no logit."""
    chain = receipt.chain()
    chain.add([0] * tokens, [0.0] * tokens)
    chain.end(reason, stop)
    return replace(
        receipt,
        output_ids=receipt.output_ids[:tokens],
        finish_reason=reason,
        stop_reason=stop,
        digests=(*receipt.digests[:tokens], chain.digests[-1]),
    )


def test_a_reply_without_its_last_token_does_not_end_as_the_whole_one(
    engine: Engine, receipts: list[Receipt]
) -> None:
    """The engine draws that token, and ends with it."""
    whole = [each for each in receipts if len(each.output_ids) > 1]
    ends = [(each.finish_reason, each.stop_reason) for each in whole]
    assert {reason for reason, _ in ends} == {"stop", "length"}
    wrong = [
        cut_with_end(each, len(each.output_ids) - 1, *end)
        for each, end in zip(whole, ends, strict=True)
    ]
    assert {each.reason for each in verdicts_of(engine, wrong)} == {"altered"}


def test_no_stop_string_is_said_to_have_ended_what_it_did_not(
    engine: Engine, receipts: list[Receipt]
) -> None:
    long = [each for each in receipts if len(each.output_ids) > 2]
    stopped = [each for each in long if isinstance(each.stop_reason, str)]
    ruled = [each for each in long if each.stop is not None]
    assert len(stopped) > 5
    wrong = [cut(each, len(each.output_ids) - 1, '"') for each in ruled]
    wrong += [cut(each, len(each.output_ids), "of other words") for each in stopped]
    wrong += [cut(each, len(each.output_ids) - 1, '"') for each in long if each.stop is None]
    found = verdicts_of(engine, wrong)
    assert [each for each in found if each.right or each.reason != "altered"] == []
    here = replace(maker_of(engine), tokenizer="0" * 64)
    ((_, told),) = replayed(engine, [cut(stopped[0], 1, '"')], here, spelling())
    assert told.reason == "other tokenizer"
    with pytest.raises(ReceiptError, match="no tokenizer"):
        list(replayed(engine, stopped, maker_of(engine), None))


def test_what_goes_on_past_its_stop_string_is_found(
    engine: Engine, receipts: list[Receipt], requests: list[Request]
) -> None:
    """Another server might have looked for none; the receipt says that this one did."""
    index = next(i for i, each in enumerate(receipts) if each.stop_reason in ('"', "e"))
    unstopped = with_rule(engine, requests[index], None)
    assert len(unstopped.output_ids) > len(receipts[index].output_ids)
    (verdict,) = verdicts_of(engine, [unstopped])
    assert verdict.right
    claimed = with_rule(engine, requests[index], receipts[index].stop, cut_there=False)
    (verdict,) = verdicts_of(engine, [claimed])
    assert (verdict.reason, verdict.equal) == ("altered", len(receipts[index].output_ids))


@pytest.mark.slow
def test_a_thousand_receipts_are_equal_and_a_thousand_altered_ones_are_not(
    prompt_ids: list[tuple[int, ...]], engine: Engine
) -> None:
    prompts = [(index, *ids) for index, ids in enumerate(8 * prompt_ids)]
    drafting = engine_of(draft=str(DEMO_DRAFT), samplers=2)
    try:
        made = receipts_of(drafting, receipt_requests(prompts, MANY))
    finally:
        drafting.close()
    assert [each for each in verdicts_of(engine, made) if not each.right] == []
    random = np.random.default_rng(6)
    wrong = verdicts_of(engine, [altered(each, random) for each in made])
    assert [each for each in wrong if each.right] == []


def test_who_writes_new_digests_for_another_text_is_found(
    engine: Engine, receipts: list[Receipt]
) -> None:
    """Whoever can count cannot know the logit, and the token is not what this seed draws."""
    receipt = next(each for each in receipts if len(each.output_ids) > 5)
    chain = receipt.chain()
    forged = (*receipt.output_ids[:3], 77, *receipt.output_ids[4:])
    chain.add(forged, [1.0] * len(forged))
    chain.end(receipt.finish_reason, receipt.stop_reason)
    (verdict,) = verdicts_of(
        engine, [replace(receipt, output_ids=forged, digests=tuple(chain.digests))]
    )
    assert (verdict.reason, verdict.equal) == ("not its own", 0)


def test_one_weight_that_is_one_step_off_is_found(receipts: list[Receipt], tmp_path: Path) -> None:
    """Of the row of a token that was drawn last, and stands nowhere before, for it is what the
    token is embedded by, too; the hash of the files would tell of any."""
    receipt = next(
        each
        for each in receipts
        if each.options["grammar"] is None
        and len(each.output_ids) > 20
        and (*each.prompt_ids, *each.output_ids).count(each.output_ids[-1]) == 1
    )
    folder, token_id = tmp_path / "demo", receipt.output_ids[-1]
    shutil.copytree(DEMO, folder, ignore=shutil.ignore_patterns("*.lexshard*"))
    weights = load_file(folder / "model.safetensors")
    row = weights["model.embed_tokens.weight"][token_id]
    column = int(row.abs().argmax())
    row[column] *= 1 + 2**-7
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    other = Engine(
        EngineConfiguration(
            str(folder), dtype="float32", device="cpu", threads=1, max_model_len=128, head="dense"
        )
    )
    try:
        (verdict,) = verdicts_of(other, [receipt])
        assert verdict.reason == "not its own"
        assert receipt.output_ids[verdict.equal] == token_id or verdict.expected == token_id
        here = replace(maker_of(other), model="0" * 64)
        ((_, told),) = replayed(other, [receipt], here, spelling())
        assert told.reason == "other model"
    finally:
        other.close()


def test_a_model_of_another_name_is_told_of_though_every_token_is_equal(
    engine: Engine, receipts: list[Receipt]
) -> None:
    here = maker_of(engine)
    for changed, reason in (
        (replace(here, model="0" * 64), "other model"),
        (replace(here, tokenizer="0" * 64), "other tokenizer"),
    ):
        ((_, verdict),) = replayed(engine, receipts[:1], changed, spelling())
        assert (verdict.reason, verdict.equal) == (reason, verdict.tokens)
    arithmetic = replace(here.arithmetic, processor="another")
    ((_, verdict),) = replayed(
        engine, receipts[:1], replace(here, arithmetic=arithmetic), spelling()
    )
    assert verdict.right


def test_a_copy_whose_texts_end_with_other_ids_calls_no_reply_altered(
    engine: Engine, prompt_ids: list[tuple[int, ...]], tmp_path: Path
) -> None:
    """``generation_config.json`` may name them, of which there is no hash."""
    parameters = SamplingParameters(temperature=0.0, max_tokens=20, receipt=True)
    request = Request("", 0, prompt_ids[0], parameters)
    longer = with_rule(engine, request, None)
    folder = tmp_path / "demo"
    shutil.copytree(DEMO, folder, ignore=shutil.ignore_patterns("*.lexshard*"))
    ends = {"eos_token_id": [longer.output_ids[5]]}
    (folder / "generation_config.json").write_text(json.dumps(ends))
    told = {"dtype": "float32", "device": "cpu", "threads": 1, "max_model_len": 128}
    other = Engine(EngineConfiguration(str(folder), head="dense", **told))
    try:
        shorter = with_rule(other, request, None)
        assert shorter.output_ids == longer.output_ids[: len(shorter.output_ids)]
        assert (shorter.finish_reason, len(shorter.output_ids) < 7) == ("stop", True)
        found = [*verdicts_of(engine, [shorter]), *verdicts_of(other, [longer])]
    finally:
        other.close()
    assert [(each.reason, each.equal) for each in found] == [
        ("other model", len(shorter.output_ids))
    ] * 2
    assert "generation_config.json" in found[0].explanation


@pytest.mark.parametrize(
    ("body", "dtype", "processor", "reason"),
    [
        ("general", "float32", "another", "other arithmetic"),
        ("general", "float32", "this", "not its own"),
        ("fused", "float32", "another", "not its own"),
        ("fused", "bfloat16", "another", "not its own"),
        ("fused", "bfloat16", "AMX", "other arithmetic"),
        ("fused", "float32", "AMX", "not its own"),
    ],
)
def test_other_sums_on_another_processor_are_no_sign_of_a_forgery(
    body: str,
    dtype: Literal["float32", "bfloat16"],
    processor: str,
    reason: str,
    engine: Engine,
    receipts: list[Receipt],
) -> None:
    """torch's are, and those of bfloat16 where just one of the two has AMX."""
    arithmetic = Arithmetic(ARITHMETIC_VERSION, dtype, body, "this")
    here = replace(maker_of(engine), arithmetic=arithmetic)
    made = replace(here, arithmetic=replace(here.arithmetic, processor=processor))
    chain = (receipt := replace(receipts[2], made_by=made)).chain()
    chain.add(receipt.output_ids, [1.0] * len(receipt.output_ids))  # other bits
    chain.end(receipt.finish_reason, receipt.stop_reason)
    told = replace(receipt, header=chain.header, digests=tuple(chain.digests))
    ((_, verdict),) = replayed(engine, [told], here, spelling())
    assert (verdict.reason, verdict.equal) == (reason, 0)
