"""Would the model be refused, whatever its weights are? Asked before they are fetched.

Answered by a process of its own: it takes torch and transformers to tell, and the caller may be a
server's owner, which is to stay small. It runs ``python -m lexshard.cluster.models.refusal`` with a
`RefusalQuestion` as JSON on standard input, and prints the reason, if there is one, as JSON.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec

from lexshard.actors.configuration import BodyChoice, DataType, Device
from lexshard.cluster.models.names import HubName, ModelNameError


class LoadingOptions(msgspec.Struct, frozen=True):
    """Those of a server's options that say how its model is loaded."""

    dtype: DataType = "auto"
    body: BodyChoice = "auto"
    fast_prefill: bool = False
    device: Device = "auto"


class RefusalQuestion(msgspec.Struct, frozen=True):
    """See `actors.body.loading.check_before_weights`."""

    folder: str
    stored_bytes: int
    parameters: Mapping[str, int]
    options: LoadingOptions


class RefusalAnswer(msgspec.Struct, frozen=True):
    """``reason`` is None where nothing is known against the model."""

    reason: str | None


def check_refusal(
    name: HubName,
    folder: Path,
    stored_bytes: int,
    parameters: Mapping[str, int],
    options: LoadingOptions,
) -> None:
    """Raises ModelNameError where the model, whose ``config.json`` is in ``folder``, would be
    refused."""
    question = RefusalQuestion(str(folder), stored_bytes, dict(parameters), options)
    reason = ask(question).reason
    if reason is not None:
        told = reason.replace(str(folder), str(name))
        raise ModelNameError(f"{name} cannot be served, and is not fetched: {told}")


def ask(question: RefusalQuestion) -> RefusalAnswer:
    """Has a process answer it. Raises ModelNameError where that ends with something else."""
    asked = subprocess.run(
        [sys.executable, "-m", "lexshard.cluster.models.refusal"],
        input=msgspec.json.encode(question),
        capture_output=True,
        check=False,
    )
    if asked.returncode:
        said = asked.stderr.decode(errors="replace").strip().splitlines()
        why = said[-1] if said else f"exit code {asked.returncode}"
        raise ModelNameError(f"the model in {question.folder} could not be looked at: {why}")
    return msgspec.json.decode(asked.stdout.splitlines()[-1], type=RefusalAnswer)


def answer(question: RefusalQuestion) -> RefusalAnswer:
    """In this process."""
    from lexshard.actors.body.errors import ModelRefusedError
    from lexshard.actors.body.loading import check_before_weights

    try:
        check_before_weights(
            question.folder,
            question.stored_bytes,
            question.parameters,
            **msgspec.structs.asdict(question.options),
        )
    except ModelRefusedError as error:
        return RefusalAnswer(str(error))
    return RefusalAnswer(None)


if __name__ == "__main__":
    found = answer(msgspec.json.decode(sys.stdin.buffer.read(), type=RefusalQuestion))
    print(msgspec.json.encode(found).decode(), flush=True)
