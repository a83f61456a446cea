"""All families, each in a process of its own with bounded memory and time."""

from __future__ import annotations

import multiprocessing
import resource
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from lexshard.kernels import pool
from lexshard.loadtest.model_families.probe import FamilyOutcome, probe

MEMORY = 6 * 2**30  # bytes of one family's process
SECONDS = 120  # a family takes one or two
# What every family's process needs and takes seconds to import.
_IMPORTED = (
    "lexshard.loadtest.model_families.probe",
    "transformers.models.llama.modeling_llama",
    "lexshard.kernels.attention.cpu",
    "lexshard.kernels.linear.cpu",
    "lexshard.kernels.llama.cpu",
)


def families() -> list[str]:
    """The model types of every causal language model that transformers has."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def sweep(
    chosen: Sequence[str],
    *,
    at_once: int = 1,
    tell: Callable[[FamilyOutcome], None] = lambda outcome: None,
) -> list[FamilyOutcome]:
    """The outcome of every family in ``chosen``, in order; ``tell`` hears of each when it is done.

    One process imports everything and is forked for each family.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_IMPORTED))
    outcomes = []
    with ThreadPoolExecutor(at_once) as waiting:
        for outcome in waiting.map(partial(_one, context), chosen):
            tell(outcome)
            outcomes.append(outcome)
    return outcomes


def _one(context: multiprocessing.context.ForkServerContext, family: str) -> FamilyOutcome:
    ours, theirs = context.Pipe(duplex=False)
    with ours, tempfile.TemporaryDirectory(prefix="lexshard-family-") as folder:
        process = context.Process(target=_report, args=(family, folder, theirs), daemon=True)
        process.start()
        theirs.close()
        try:
            if ours.poll(SECONDS):
                outcome: FamilyOutcome = ours.recv()
                return outcome
            return FamilyOutcome(family, "broken", f"no answer within {SECONDS} seconds")
        except EOFError:
            process.join()
            return FamilyOutcome(family, "broken", f"the process ended with {process.exitcode}")
        finally:
            process.kill()
            process.join()


def _report(family: str, folder: str, answer: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    torch.set_num_threads(1)
    pool.set_threads(1)
    answer.send(probe(family, Path(folder)))
