"""``lexshard replay``: makes replies again from their receipts, without a server."""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lexshard.actors.receipts.document import Receipt, ReceiptError, check_fits, made_by
from lexshard.actors.receipts.replay import ReplayVerdict
from lexshard.actors.receipts.signature import signed_by
from lexshard.actors.receipts.stop_rule import Spelling
from lexshard.cluster.models.folders import model_folder
from lexshard.serve_app.commands.argument_types import at_least
from lexshard.serve_app.receipts.files import FoundReceipt, found_in

if TYPE_CHECKING:
    from lexshard.serve_app.openai.tokenization import ModelTokenizer

REFUSALS = (ValueError, OSError, RecursionError)  # among them every refusal of a model
INTERRUPTED = "what was told holds, the others were not tried"
EQUAL, DIFFERENT, UNTRIED = 0, 1, 2  # exit statuses; see docs/receipts.md
ALTERED_TEXT = "its tokens are right, its text differs from theirs"
ALTERED_END = "its tokens are right, its finish_reason differs from theirs"
IDS_ALONE = "; their ids alone are proven, its text was not compared"
# How an engine here computes as the body of a receipt did.
BODIES: Mapping[str, Mapping[str, Any]] = {
    "fused": {"device": "cpu"},
    "general": {"body": "general", "batch_invariant": True},  # as those with receipts are
    "parallel": {"tensor_parallel": 1, "device": "cpu"},  # the same bits for any number of ranks
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to a parser."""
    parser.add_argument(
        "paths",
        nargs="+",
        type=Path,
        metavar="RECEIPT",
        help="a receipt, a reply that has some, or a folder of such files (.json, .jsonl)",
    )
    parser.add_argument(
        "--model", required=True, metavar="MODEL", help="folder, or ORG/NAME on the Hub"
    )
    parser.add_argument(
        "--threads", type=at_least(1), metavar="N", help="default: as the server chooses"
    )
    parser.add_argument("--signed-by", metavar="KEY", help="refuse those without its signature")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every verdict there")


def run(arguments: argparse.Namespace) -> int:
    """Print a line for every receipt; returns the exit status."""
    try:
        return _run(arguments)
    except (*REFUSALS, ImportError):
        raise
    except Exception:  # Python's own status is 1, which says that a reply is not equal
        traceback.print_exc()
        return UNTRIED


def _run(arguments: argparse.Namespace) -> int:
    found = [each for path in arguments.paths for each in found_in(path)]
    outcomes = Outcomes(found)
    groups: dict[tuple[str, str], dict[int, Receipt]] = {}
    for index, each in enumerate(found):
        if (receipt := each.receipt) is None:
            outcomes.take(index, each.refusal)
            continue
        arithmetic = receipt.made_by.arithmetic
        try:
            signer = signed_by(receipt)
        except ReceiptError as error:
            outcomes.take(index, ReplayVerdict(len(receipt.output_ids), 0, "altered", str(error)))
            continue
        if arguments.signed_by not in (None, signer):
            outcomes.take(index, f"it is not signed by {arguments.signed_by}")
        elif arithmetic.body not in BODIES:
            outcomes.take(index, f"its body is {arithmetic.body!r}, which computes nowhere else")
        else:
            groups.setdefault((arithmetic.dtype, arithmetic.body), {})[index] = receipt
    if groups:
        folder = Path(model_folder(arguments.model, _tell_progress)).expanduser()
        if not folder.is_dir():
            raise ValueError(f"no model folder at {arguments.model}")
        outcomes.tokenizer = _tokenizer(folder, found)
        for (dtype, body), own in groups.items():
            settings = {"dtype": dtype, "threads": arguments.threads, **BODIES[body]}
            try:
                for index, outcome in _replayed(own, folder, outcomes.tokenizer, settings):
                    outcomes.take(index, outcome)
            except REFUSALS as error:
                for index in sorted(own.keys() - outcomes.told.keys()):
                    outcomes.take(index, str(error))
    if arguments.json is not None:
        told = [outcomes.told[index] for index in range(len(found))]
        arguments.json.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    return outcomes.end()


class Outcomes:
    """Of all that was ``found``, ``told`` as they come: a verdict, or why there is none."""

    def __init__(self, found: Sequence[FoundReceipt]) -> None:
        self.told: dict[int, dict[str, Any]] = {}
        self.tokenizer: ModelTokenizer | None = None
        self._found = found
        self._started = time.monotonic()

    def take(self, index: int, outcome: ReplayVerdict | str) -> None:
        """Tells it; of a reply whose tokens are right its text and end are compared first."""
        found, choice = self._found[index], ""
        told: dict[str, Any] = {"place": found.place, "choice": None}
        if found.receipt is not None:
            told["choice"] = found.receipt.choice
            choice = f", choice {found.receipt.choice}"
        if isinstance(outcome, str):
            told |= {"equal": None, "reason": "not tried", "explanation": outcome}
            words = f"NOT TRIED: {outcome}"
        else:
            same = None
            if outcome.right and found.beside:
                same = self._has_its_text(found)
                if same is False:
                    outcome = replace(outcome, reason="altered", explanation=ALTERED_TEXT)
                elif not found.has_its_end:
                    outcome = replace(outcome, reason="altered", explanation=ALTERED_END)
            told |= {**outcome.as_json(), "equal_text": same}
            words = _words(outcome, ", and the text" if same else IDS_ALONE * bool(found.beside))
        self.told[index] = told
        count = f"{len(self.told)} of {len(self._found)}: " if len(self._found) > 1 else ""
        # Whatever a file has put into it, it is one line.
        line = f"{count}{found.place}{choice}: {words}"
        print("".join(c if c.isprintable() else ascii(c)[1:-1] for c in line), flush=True)

    def _has_its_text(self, found: FoundReceipt) -> bool | None:
        """None where that cannot be told."""
        if self.tokenizer is None or found.receipt is None:
            return None
        from lexshard.serve_app.receipts.texts import is_text_of, told_text  # loads transformers

        text = told_text(found.beside)
        return text and is_text_of(text, found.receipt, self.tokenizer, whole=found.whole)

    def end(self) -> int:
        """Sums up; returns the exit status."""
        equal = [each["equal"] for each in self.told.values()]
        left = f", {equal.count(None)} not tried" * (None in equal)
        tokens = sum(each.get("equal_tokens", 0) for each in self.told.values())
        seconds = time.monotonic() - self._started
        if True in equal or False in equal:
            told = f"{equal.count(True)} of {len(equal)} equal{left}"
            print(f"{told}; {tokens} tokens in {seconds:.1f} s")
        return DIFFERENT if False in equal else UNTRIED if None in equal else EQUAL


def _replayed(
    receipts: Mapping[int, Receipt],
    folder: Path,
    tokenizer: ModelTokenizer | None,
    settings: Mapping[str, Any],
) -> Iterator[tuple[int, ReplayVerdict | str]]:
    # These load torch and numba.
    from lexshard.actors.configuration import EngineConfiguration
    from lexshard.actors.engine.engine import Engine
    from lexshard.actors.engine.start.kernels_ahead import compile_kernels
    from lexshard.actors.receipts.hashes import model_hashes
    from lexshard.actors.receipts.run import TOGETHER, replayed
    from lexshard.kernels.ahead import postpone

    configuration = EngineConfiguration(str(folder), max_running=TOGETHER, **settings)
    postpone(compile_kernels(configuration, _tell_progress))  # it does without
    engine = Engine(configuration, tell=_tell_progress)
    try:
        told = engine.information
        fitting: list[int] = []
        for index, receipt in receipts.items():
            try:
                check_fits(receipt, told.vocabulary_size, told.max_model_len)
            except ReceiptError as error:
                yield index, str(error)
                continue
            if receipt.stop is not None and tokenizer is None:
                yield index, "its stop strings take the model's tokenizer"
                continue
            fitting.append(index)
        here = made_by(model_hashes(folder), told)
        spelling = None
        if tokenizer is not None:
            spelling = Spelling(tokenizer.token_bytes, tokenizer.visible_token_bytes)
        for place, verdict in replayed(engine, [receipts[i] for i in fitting], here, spelling):
            yield fitting[place], verdict
    finally:
        engine.close()


def _tokenizer(folder: Path, found: Sequence[FoundReceipt]) -> ModelTokenizer | None:
    """The model's, where stop strings or texts ask for it and there is one."""
    if not any(each.beside or (each.receipt and each.receipt.stop) for each in found):
        return None
    # The engine of this process may have to make the model with transformers, which has no models
    # where it has not found torch; and a tokenizer alone does not show it any.
    import torch  # noqa: F401

    from lexshard.serve_app.openai.tokenization import ModelTokenizer  # loads transformers

    try:
        return ModelTokenizer.load(folder)
    except (OSError, ValueError) as error:
        _tell_progress(f"there is no use of the model's tokenizer: {error}")
        return None


def _words(verdict: ReplayVerdict, of_text: str) -> str:
    if verdict.right:
        return f"equal, all {verdict.tokens} tokens{of_text}"
    where = ""
    if verdict.expected is not None:
        where = f" token {verdict.equal} is {verdict.found}"
        where += f", drawn is {verdict.expected}" * (verdict.expected != verdict.found)
        where += ";"
    told = f"{verdict.reason}, {verdict.equal} of {verdict.tokens} tokens equal"
    return f"NOT EQUAL ({told}):{where} {verdict.explanation}"


def _tell_progress(phase: str) -> None:
    print(phase, file=sys.stderr, flush=True)
