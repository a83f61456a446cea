"""Models proven in a process that ends with that, before an engine loads them:
``python -m lexshard.cluster.engine.proof``, told a `ProofOrder`.

A fused body is compared with the model that transformers makes, at the first start and at the first
after anything has changed; what it finds out is remembered (`actors.body.proven`). transformers
and what that imports are a quarter of a gigabyte, which an engine would keep as long as it serves.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from lexshard.actors.configuration import NGRAM, EngineConfiguration
from lexshard.cluster.process_tree import leave
from lexshard.cluster.roles.process import (
    ProcessRole,
    command_of,
    end_with_owner,
    read_order,
    start_process,
)


class ProofOrder(msgspec.Struct, frozen=True):
    """Models to prove on the CPU, each a folder and how its weights and body are to be."""

    models: tuple[tuple[str, Any, Any], ...]


class Proof:
    """The models of ``configuration`` that are not proven yet, and the process that will. As soon
    as it is made that imports what it needs, longer than the proof takes: kernels are compiled
    meanwhile. What cannot be proven there is for the engine to load as ever, or to refuse."""

    def __init__(self, configuration: EngineConfiguration) -> None:
        self._models = _models_to_prove(configuration)
        self._process: subprocess.Popen[bytes] | None = None
        if self._models:
            order = msgspec.json.encode(ProofOrder(tuple(self._models)))
            self._process = start_process(ProcessRole("proof", command_of(__name__), order))

    def finish(self, tell: Callable[[str], None]) -> None:
        """Returns when they are proven, which ``tell`` hears of where there are any. The kernels
        that compute them are compiled now."""
        from lexshard.actors.body.proven import note_tried

        if self._process is None:
            return
        tell("comparing the body with transformers' own, once")
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended already
            self._process.stdin.write(b"\n")
            self._process.stdin.flush()
        self._process.wait()
        for folder, *options in self._models:
            note_tried(Path(folder).expanduser(), *options)


def _models_to_prove(configuration: EngineConfiguration) -> list[tuple[str, Any, Any]]:
    from lexshard.actors.body.loading import choose_device  # which needs torch
    from lexshard.actors.body.proven import is_to_prove

    on_cpu = choose_device(configuration.device).type == "cpu"
    if configuration.tensor_parallel is not None or not on_cpu:
        return []
    models: list[tuple[str, Any, Any]] = [
        (configuration.model, configuration.dtype, configuration.body)
    ]
    if configuration.draft not in (None, NGRAM):
        models.append((str(configuration.draft), configuration.dtype, "auto"))
    return [each for each in models if is_to_prove(Path(each[0]).expanduser(), *each[1:])]


def main() -> int:
    """Loads every model when told to; the exit code."""
    order = read_order(ProofOrder)
    from lexshard.actors.body.checkpoint import read_checkpoint
    from lexshard.actors.body.errors import ModelRefusedError
    from lexshard.actors.body.loading import load
    from lexshard.actors.body.refusals import model_class

    with suppress(ModelRefusedError):  # the engine is refused it, too, and says why
        for folder, *_ in order.models:
            model_class(read_checkpoint(folder).config)  # imports what the model is made of
        if not sys.stdin.buffer.readline():
            return 1  # the engine has ended
        end_with_owner()
        for folder, dtype, body in order.models:
            load(folder, dtype, body=body, device="cpu")
        return 0
    return 1


if __name__ == "__main__":
    leave(main())
