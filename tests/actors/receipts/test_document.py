"""A receipt is read as it was written, and what is none is refused in words."""

from __future__ import annotations

import base64
import json
import math
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st

from lexshard.actors.messages import SamplingParameters
from lexshard.actors.receipts.document import (
    VERSION,
    Arithmetic,
    DigestChain,
    Provenance,
    Receipt,
    ReceiptError,
    check_fits,
    options_of,
    read_receipt,
)
from lexshard.actors.receipts.hashes import hash_of
from lexshard.actors.receipts.signature import Signer, signed_by
from lexshard.actors.receipts.stop_rule import StopRule
from tests.support.paths import ROOT

MADE_BY = Provenance("a" * 64, "b" * 64, Arithmetic(1, "bfloat16", "fused", "AVX2"), (4, 0))


STOP = StopRule(("end", "\u00e9\n"), True, False, (3,))


def receipt(
    parameters: SamplingParameters | None = None,
    seed: int = 2**63 - 5,
    stop: StopRule | None = STOP,
) -> Receipt:
    asked = parameters or SamplingParameters(logit_bias=((3, 1.0),), bad_words=((1, 2),))
    options, prompt, output = options_of(asked), (5, 6), (7, 8, 9)
    chain = DigestChain(MADE_BY, seed, 0, options, stop, prompt)
    chain.add(output, (1.5, math.nan, -2.0))
    chain.end("length", None)
    told = chain.header, tuple(chain.digests)
    return Receipt(VERSION, MADE_BY, seed, 0, options, stop, prompt, output, "length", None, *told)


@settings(deadline=None)
@given(
    temperature=st.floats(0, 100),
    bias=st.dictionaries(st.integers(0, 99), st.floats(-100, 100), max_size=4),
    seed=st.integers(0, 2**64 - 1),
    allowed=st.none() | st.lists(st.integers(0, 99), unique=True).map(tuple),
    stop=st.none()
    | st.builds(
        StopRule,
        st.lists(st.text(min_size=1, max_size=9), min_size=1, max_size=4).map(tuple),
        st.booleans(),
        st.just(False),
        st.lists(st.integers(0, 99), max_size=3).map(tuple),
    ),
)
def test_what_is_read_is_what_was_written(
    temperature: float,
    bias: dict[int, float],
    seed: int,
    allowed: tuple[int, ...] | None,
    stop: StopRule | None,
) -> None:
    asked = SamplingParameters(
        temperature=temperature, logit_bias=tuple(sorted(bias.items())), allowed_ids=allowed
    )
    written = receipt(asked, seed, stop)
    read = read_receipt(json.loads(json.dumps(written.as_json())))
    assert read == written
    assert read.chain().header == written.header
    assert read.parameters() == replace(asked, seed=seed, receipt=True)


def test_a_client_that_writes_whole_numbers_for_floats_changes_nothing() -> None:
    """As JavaScript does: 1.0 becomes 1. A seed of 64 bits is a text for its sake."""
    told = receipt().as_json()
    assert told["seed"] == str(2**63 - 5)
    told["options"] = {
        name: int(value) if isinstance(value, float) and value.is_integer() else value
        for name, value in told["options"].items()
    }
    assert read_receipt(told).chain().header == receipt().header


def test_the_published_schema_describes_receipts() -> None:
    schema = json.loads((ROOT / "docs" / "receipt.schema.json").read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    judge = jsonschema.Draft202012Validator(schema)
    signed = Signer(Ed25519PrivateKey.generate()).signed(receipt())
    for each in (receipt(), receipt(stop=None), signed):
        assert judge.is_valid(json.loads(json.dumps(each.as_json())))
    assert not any(
        judge.is_valid(each) for each in (wrong(more=1), wrong(seed=5), wrong(version=2))
    )
    assert set(schema["properties"]) == {field.name for field in fields(Receipt)}
    rule = schema["properties"]["stop"]["anyOf"][1]
    assert set(rule["properties"]) == {field.name for field in fields(StopRule)}


def wrong(**changes: Any) -> dict[str, Any]:
    return {**receipt().as_json(), **changes}


@pytest.mark.parametrize(
    "told",
    [
        None,
        [],
        "receipt",
        {},
        {"version": VERSION},
        wrong(version=2),
        wrong(version="3"),
        wrong(more=1),
        wrong(seed=5),
        wrong(seed="-5"),
        wrong(seed="9" * 20),
        wrong(seed="0" * 400),
        wrong(choice=-1),
        wrong(prompt_ids=[]),
        wrong(prompt_ids=["a"]),
        wrong(prompt_ids=[1.5]),
        wrong(output_ids=[True, 1, 2]),
        wrong(digests="!"),
        wrong(digests=None),
        wrong(digests=""),
        wrong(finish_reason="error"),
        wrong(stop_reason=[1]),
        wrong(stop={}),
        wrong(stop={**asdict(STOP), "strings": []}),
        wrong(stop={**asdict(STOP), "strings": [""]}),
        wrong(stop={**asdict(STOP), "strings": ["a"] * 17}),
        wrong(stop={**asdict(STOP), "strings": ["a" * 1025]}),
        wrong(stop={**asdict(STOP), "special_shown": True}),
        wrong(stop={**asdict(STOP), "shown_ids": [1] * 65}),
        wrong(stop={**asdict(STOP), "include": 1}),
        wrong(stop=["end"]),
        wrong(made_by=None),
        wrong(made_by={"model": "", "tokenizer": ""}),
        wrong(made_by={**asdict(MADE_BY), "eos_token_ids": ["0"]}),
        wrong(options=None),
        wrong(options={}),
        wrong(options={**receipt().options, "temperature": "1"}),
        wrong(options={**receipt().options, "temperature": -1}),
        wrong(options={**receipt().options, "top_p": 0}),
        wrong(options={**receipt().options, "top_k": True}),
        wrong(options={**receipt().options, "logit_bias": [[1]]}),
        wrong(options={**receipt().options, "logit_bias": [[1, 1e9]]}),
        wrong(options={**receipt().options, "bad_words": [[]]}),
        wrong(options={**receipt().options, "max_tokens": 2}),
        wrong(options={**receipt().options, "max_tokens": 0}),
        wrong(output_ids=[], digests=base64.b64encode(b"12345678").decode()),
        wrong(options={**receipt().options, "min_tokens": -1}),
        wrong(options={**receipt().options, "grammar": 5}),
        wrong(options={**receipt().options, "more": 5}),
        wrong(options={**receipt().options, "temperature": math.nan}),
        wrong(signature=5),
    ],
    ids=lambda told: json.dumps(told)[-60:],
)
def test_what_is_no_receipt_is_refused_in_words(told: Any) -> None:
    with pytest.raises(ReceiptError, match=r"\w"):
        read_receipt(told)


def test_tokens_beyond_the_vocabulary_or_the_context_are_refused() -> None:
    check_fits(receipt(), 10, 18)
    with pytest.raises(ReceiptError, match="beyond a vocabulary of 9"):
        check_fits(receipt(), 9, 18)
    with pytest.raises(ReceiptError, match="beyond a vocabulary of 10"):
        check_fits(receipt(stop=replace(STOP, shown_ids=(10,))), 10, 18)
    with pytest.raises(ReceiptError, match="here are 17"):
        check_fits(receipt(), 10, 17)
    with pytest.raises(ReceiptError, match="beyond"):
        check_fits(receipt(SamplingParameters(top_k=11)), 10, 18)


def test_a_signature_is_of_all_that_is_said(tmp_path: Path) -> None:
    path = tmp_path / "key.pem"
    private = serialization.PrivateFormat.PKCS8
    pem = serialization.Encoding.PEM, private, serialization.NoEncryption()
    path.write_bytes(Ed25519PrivateKey.generate().private_bytes(*pem))
    signer = Signer.read(path)
    signed = read_receipt(json.loads(json.dumps(signer.signed(receipt()).as_json())))
    assert signed_by(signed) == signer.public_key
    assert signed_by(receipt()) is None
    for changed in (
        replace(signed, output_ids=(7, 8, 1)),
        replace(signed, finish_reason="stop"),
        replace(signed, signature={**(signed.signature or {}), "value": "AAAA"}),
        replace(signed, signature={"algorithm": "none"}),
        replace(signed, signature={}),
    ):
        with pytest.raises(ReceiptError, match="signature"):
            signed_by(changed)
    for content in (b"", generate_private_key(SECP256R1()).private_bytes(*pem)):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"key\.pem is no"):
            Signer.read(path)


def test_the_hash_of_files_is_of_names_and_contents(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    one.write_bytes(b"12")
    other.write_bytes(b"3")
    before = hash_of([one, other])
    assert before == hash_of([one, other])
    one.write_bytes(b"1")
    other.write_bytes(b"23")
    assert hash_of([one, other]) != before
    assert hash_of([one]) != hash_of([one.rename(tmp_path / "another")])
