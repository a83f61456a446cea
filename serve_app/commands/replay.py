"""``lexshard replay``: makes replies again from their receipts, without a server."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lexshard.actors.body.errors import ModelRefusedError
from lexshard.actors.receipts.document import (
    Receipt,
    ReceiptError,
    check_fits,
    made_by,
    read_receipt,
)
from lexshard.actors.receipts.replay import ReplayVerdict
from lexshard.actors.receipts.signature import signed_by
from lexshard.actors.receipts.stop_rule import Spelling

REFUSALS = (ReceiptError, ModelRefusedError, OSError)
EQUAL, DIFFERENT = 0, 1  # exit statuses; 2 is of what cannot be tried


@dataclass(frozen=True, slots=True)
class FoundReceipt:
    """A receipt, and where it was found."""

    place: str
    receipt: Receipt


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to a parser."""
    parser.add_argument(
        "paths",
        nargs="+",
        type=Path,
        metavar="RECEIPT",
        help="a receipt, a reply that has some, or a folder of such files (.json, .jsonl)",
    )
    parser.add_argument("--model", required=True, metavar="DIR", help="folder of the model")
    parser.add_argument("--threads", type=int, metavar="N", help="default: as the server chooses")
    parser.add_argument("--signed-by", metavar="KEY", help="refuse those without its signature")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every verdict there")


def run(arguments: argparse.Namespace) -> int:
    """Print a line for every receipt; returns the exit status."""
    found = [each for path in arguments.paths for each in _found(path)]
    if not found:
        raise ReceiptError("there is no receipt in what was named")
    for each in found:
        try:
            signer = signed_by(each.receipt)
        except ReceiptError as error:
            raise ReceiptError(f"{each.place}: {error}") from error
        if arguments.signed_by not in (None, signer):
            raise ReceiptError(f"{each.place}: it is not signed by {arguments.signed_by}")
    verdicts: dict[int, ReplayVerdict] = {}
    started = time.monotonic()
    of_dtypes = [each.receipt.made_by.arithmetic.dtype for each in found]
    for dtype in sorted(set(of_dtypes)):
        own = [index for index, its in enumerate(of_dtypes) if its == dtype]
        for index, verdict in _replayed([found[i] for i in own], dtype, arguments):
            verdicts[own[index]] = verdict
            _tell(found[own[index]], verdict)
    right = sum(verdict.right for verdict in verdicts.values())
    tokens = sum(verdict.equal for verdict in verdicts.values())
    seconds = time.monotonic() - started
    print(f"{right} of {len(found)} equal; {tokens} tokens in {seconds:.1f} s")
    if arguments.json is not None:
        told = [
            {"place": each.place, "choice": each.receipt.choice, **verdicts[index].as_json()}
            for index, each in enumerate(found)
        ]
        arguments.json.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    return EQUAL if right == len(found) else DIFFERENT


def _replayed(
    found: list[FoundReceipt], dtype: Literal["float32", "bfloat16"], arguments: argparse.Namespace
) -> Iterator[tuple[int, ReplayVerdict]]:
    # These load torch and numba.
    from lexshard.actors.configuration import EngineConfiguration
    from lexshard.actors.engine.engine import Engine
    from lexshard.actors.engine.start.kernels_ahead import compile_kernels
    from lexshard.actors.receipts.hashes import model_hashes
    from lexshard.actors.receipts.run import TOGETHER, replayed

    folder = Path(arguments.model).expanduser()
    configuration = EngineConfiguration(
        model=str(folder),
        dtype=dtype,
        threads=arguments.threads,
        max_running=TOGETHER,
    )
    compile_kernels(configuration, _tell_progress)
    engine = Engine(configuration, tell=_tell_progress)
    try:
        told = engine.information
        for each in found:
            try:
                check_fits(each.receipt, told.vocabulary_size, told.max_model_len)
            except ReceiptError as error:
                raise ReceiptError(f"{each.place}: {error}") from error
        here = made_by(model_hashes(folder), told.dtype, told.body, told.processor)
        receipts = [each.receipt for each in found]
        yield from replayed(engine, receipts, here, _spelling(folder, receipts))
    finally:
        engine.close()


def _spelling(folder: Path, receipts: list[Receipt]) -> Spelling | None:
    """That of the model's tokens, where stop strings ask for it."""
    if all(each.stop is None for each in receipts):
        return None
    from lexshard.serve_app.openai.tokenization import ModelTokenizer  # loads transformers

    try:
        tokenizer = ModelTokenizer.load(folder)
    except (OSError, ValueError) as error:
        raise ReceiptError(f"stop strings take the model's tokenizer: {error}") from error
    return Spelling(tokenizer.token_bytes, tokenizer.visible_token_bytes)


def _found(path: Path) -> Iterator[FoundReceipt]:
    """Raises ReceiptError for a file that has none, OSError for one that cannot be read."""
    if path.is_dir():
        for file in sorted(path.rglob("*.json*")):
            yield from _found(file)
        return
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines() if path.suffix == ".jsonl" else [text]
    for number, line in enumerate(lines, 1):
        place = str(path) if len(lines) == 1 else f"{path}:{number}"
        try:
            told = json.loads(line)
        except ValueError as error:
            raise ReceiptError(f"{place} is no JSON: {error}") from error
        for each in _receipts_in(told):
            try:
                yield FoundReceipt(place, read_receipt(each))
            except ReceiptError as error:
                raise ReceiptError(f"{place}: {error}") from error


def _receipts_in(told: Any) -> list[Any]:
    """What may be a receipt in a reply, a list of them, or is one itself."""
    if isinstance(told, list):
        return [receipt for each in told for receipt in _receipts_in(each)]
    if not isinstance(told, dict):
        return [told]
    if "receipt" in told:
        return [told["receipt"]]
    if "choices" in told:
        return _receipts_in([each for each in told["choices"] if "receipt" in each])
    return _receipts_in(told["receipts"]) if "receipts" in told else [told]


def _tell(found: FoundReceipt, verdict: ReplayVerdict) -> None:
    place = f"{found.place}, choice {found.receipt.choice}"
    if verdict.right:
        print(f"{place}: equal, all {verdict.tokens} tokens", flush=True)
        return
    where = ""
    if verdict.expected is not None:
        where = f" token {verdict.equal} is {verdict.found}"
        where += f", drawn is {verdict.expected}" * (verdict.expected != verdict.found)
        where += ";"
    told = f"{verdict.reason}, {verdict.equal} of {verdict.tokens} tokens equal"
    print(f"{place}: NOT EQUAL ({told}):{where} {verdict.explanation}", flush=True)


def _tell_progress(phase: str) -> None:
    print(phase, file=sys.stderr, flush=True)
