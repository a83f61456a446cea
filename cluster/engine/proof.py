"""Models proven in a process that ends with that, before an engine loads them:
``python -m lexshard.cluster.engine.proof``, told a `ProofOrder`.

A fused body is compared with the model that transformers makes, at the first start and at the first
after anything has changed; what it finds out is remembered (`actors.body.proven`). transformers
and what that imports are a quarter of a gigabyte, which an engine would keep as long as it serves.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
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


@contextmanager
def prove_apart(configuration: EngineConfiguration, tell: Callable[[str], None]) -> Iterator[None]:
    """At the end of the block the models of ``configuration`` are proven, which ``tell`` hears of
    where they are not yet. The process that does it imports what it needs, longer than the proof
    takes, during the block, which compiles the kernels. What cannot be proven there is for the
    engine to load as ever, or to refuse."""
    from lexshard.actors.body.loading import choose_device  # which needs torch
    from lexshard.actors.body.proven import is_to_prove, note_tried

    models: list[tuple[str, Any, Any]] = []
    if configuration.tensor_parallel is None and choose_device(configuration.device).type == "cpu":
        models.append((configuration.model, configuration.dtype, configuration.body))
        if configuration.draft not in (None, NGRAM):
            models.append((str(configuration.draft), configuration.dtype, "auto"))
    left = [each for each in models if is_to_prove(Path(each[0]).expanduser(), *each[1:])]
    if not left:
        yield
        return
    order = msgspec.json.encode(ProofOrder(tuple(left)))
    process = start_process(ProcessRole("proof", command_of(__name__), order))
    assert process.stdin is not None
    yield
    tell("comparing the body with transformers' own, once")
    with suppress(BrokenPipeError):  # it has ended already
        process.stdin.write(b"\n")
        process.stdin.flush()
    process.wait()
    for folder, *options in left:
        note_tried(Path(folder).expanduser(), *options)


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
