"""Who writes receipts: what this server's are made by, and its key."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from lexshard.actors.configuration import EngineInformation
from lexshard.actors.messages import BY_DISTRIBUTION, FinishReason, Request
from lexshard.actors.receipts.document import (
    VERSION,
    DigestChain,
    Provenance,
    Receipt,
    made_by,
    options_of,
)
from lexshard.actors.receipts.signature import Signer
from lexshard.actors.receipts.stop_rule import StopRule
from lexshard.cluster.config import ServeConfig
from lexshard.serve_app.openai.errors import ApiError, bad_request

AT_ONCE = 256  # digests: one by one cost more, and a millisecond is all that other streams wait


class ReceiptIssuer:
    """Writes the receipts of one server. Which files its model has is looked at once."""

    def __init__(self, config: ServeConfig) -> None:
        self._config = config
        self._signer = None if config.receipt_key is None else Signer.read(config.receipt_key)
        self._made_by: Provenance | None = None
        self._looking: asyncio.Task[None] | None = None

    async def provenance(self, information: EngineInformation) -> Provenance:
        """What makes this server's replies.

        Raises:
            ApiError: 400 where its tokens follow from more than a receipt tells.
        """
        config = self._config
        if config.draft is not None and config.verify in BY_DISTRIBUTION:
            raise bad_request(
                f"'receipt': this server tests drafts with --verify {config.verify}: tokens "
                "depend on them, and no receipt could be replayed",
                "receipt",
            )
        if information.dtype not in ("float32", "bfloat16"):
            raise bad_request(f"'receipt': none are written of {information.dtype}", "receipt")
        if not information.processor:
            raise bad_request("'receipt': this device writes none; ask its server", "receipt")
        if not information.batch_invariant:
            raise bad_request(
                "'receipt': logits depend on the batch here, and no receipt could be replayed: on "
                "one GPU start with --batch-invariant",
                "receipt",
            )
        if self._made_by is None:  # all that ask meanwhile wait for one look, and none ends it
            if self._looking is None or self._looking.done():
                self._looking = asyncio.create_task(self._look(information))
            await asyncio.shield(self._looking)
            assert self._made_by is not None
        return self._made_by

    async def _look(self, information: EngineInformation) -> None:
        self._made_by = made_by(await _hashes(self._config.model), information)

    def receipt_of(
        self, request: Request, made_by: Provenance, stop: StopRule | None, empty: bool
    ) -> OpenReceipt:
        """That of a reply which begins, and has no tokens where it is asked to be ``empty``."""
        return OpenReceipt(request, made_by, stop, empty, self._signer)


async def _hashes(model: str) -> tuple[str, str]:
    """As `model_hashes` finds them, in a process of its own: this one has nothing that computes.

    Raises:
        ApiError: 500 where the model's files cannot be read.
    """
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-Pm", "lexshard.actors.receipts.hashes", str(Path(model).expanduser())),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    told, error = await process.communicate()
    if process.returncode != 0:
        why = error.decode(errors="replace").strip().rpartition("\n")[2]
        raise ApiError(500, f"the model's files cannot be read: {why}")
    weights, tokenizer = told.decode().split()
    return weights, tokenizer


class OpenReceipt:
    """The receipt of one reply, while it is made."""

    def __init__(
        self,
        request: Request,
        made_by: Provenance,
        stop: StopRule | None,
        empty: bool,
        signer: Signer | None,
    ) -> None:
        parameters = request.parameters
        if empty:
            parameters = replace(parameters, max_tokens=0, min_tokens=0)
        self._request = request
        self._made_by = made_by
        self._signer = signer
        self._options = options_of(parameters)
        self._stop = stop
        self._chain = DigestChain(
            made_by, parameters.seed, request.choice, self._options, stop, request.prompt_ids
        )
        self._output: list[int] = []
        self._logits: list[float] = []

    def add(self, token_ids: tuple[int, ...], logits: tuple[float, ...]) -> None:
        """Tokens of the reply, in order, with their canonical logits."""
        self._output += token_ids
        self._logits += logits
        if len(self._logits) >= AT_ONCE:
            self._digest()

    def ended(self, finish_reason: FinishReason, stop_reason: int | str | None) -> dict[str, Any]:
        """The whole of it, as clients get it."""
        chain = self._chain
        self._digest()
        chain.end(finish_reason, stop_reason)
        receipt = Receipt(
            version=VERSION,
            made_by=self._made_by,
            seed=self._request.parameters.seed,
            choice=self._request.choice,
            options=self._options,
            stop=self._stop,
            prompt_ids=self._request.prompt_ids,
            output_ids=tuple(self._output),
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            header=chain.header,
            digests=tuple(chain.digests),
        )
        return (receipt if self._signer is None else self._signer.signed(receipt)).as_json()

    def _digest(self) -> None:
        told = len(self._chain.digests)
        self._chain.add(self._output[told:], self._logits)
        self._logits = []
