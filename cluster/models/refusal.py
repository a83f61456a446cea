"""Would the model be refused, whatever its weights are? Asked before they are fetched.

It takes torch and transformers to tell, so a process of its own does (`cluster.apart`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from lexshard.actors.configuration import BodyChoice, DataType, Device
from lexshard.cluster.apart import answer_apart
from lexshard.cluster.models.names import HubName, ModelNameError


class LoadingOptions(msgspec.Struct, frozen=True):
    """Those of a server's options that say how its model is loaded; whether ranks of its body may
    be ``spread`` over machines."""

    dtype: DataType = "auto"
    body: BodyChoice = "auto"
    device: Device = "auto"
    tensor_parallel: int | None = None
    spread: bool = False


def check_refusal(
    name: HubName,
    folder: Path,
    stored_bytes: int,
    parameters: Mapping[str, int],
    options: LoadingOptions,
) -> None:
    """Raises ModelNameError where the model, whose ``config.json`` is in ``folder``, would be
    refused."""
    try:
        asked = (str(folder), stored_bytes, dict(parameters), options)
        reason: str | None = answer_apart(__name__, "reason_against", *asked)
    except RuntimeError as error:
        raise ModelNameError(f"the model in {folder} could not be looked at: {error}") from error
    if reason is not None:
        told = reason.replace(str(folder), str(name))
        raise ModelNameError(f"{name} cannot be served, and is not fetched: {told}")


def reason_against(
    folder: str, stored_bytes: int, parameters: Mapping[str, int], options: LoadingOptions
) -> str | None:
    """In this process; None where nothing is known against the model. See
    `actors.body.loading.check_before_weights`."""
    from lexshard.actors.body.errors import ModelRefusedError
    from lexshard.actors.body.loading import check_before_weights

    told = msgspec.structs.asdict(options)
    try:
        check_before_weights(folder, stored_bytes, parameters, **told)
    except ModelRefusedError as error:
        return str(error)
    return None
