"""The router file beside a draft model's weights: clusters, a small network, clusters per step.

safetensors in the container that index files use: two parts, each with the digest of what it was
made from, and the hash of the output weights it belongs to.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from lexshard.actors.index.container import FileKind, Header, read_header, read_part
from lexshard.actors.index.metadata import Weights
from lexshard.actors.stored_tensors import ROUTER_FILE

FILE_NAME = ROUTER_FILE
CLUSTERS, NETWORK = "clusters", "network"  # the parts

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int32]


class RouterFileError(ValueError):
    """The file is missing, damaged, of another format or of other weights: train again."""


TRAINING = "python -m models.recipes.router.train"  # in a checkout
ROUTER = FileKind("lexshard-router", "router", TRAINING, RouterFileError)


@dataclass(frozen=True, slots=True)
class Spread:
    """Quantiles of a value over all clusters."""

    least: float
    median: float
    most: float


@dataclass(frozen=True, slots=True)
class TrainingReport:
    """How a router was trained, and what it is worth on texts it has not seen.

    ``accepted`` are mean accepted guesses of a draft of ``len(budgets)`` guesses by head, ``share``
    the mean share of the vocabulary looked at, by head; ``recall`` the share of guesses of the full
    head that stand and are in the shortlist of their step, by step.
    """

    target: str
    seed: int
    prompts: int
    written_tokens: int
    temperatures: tuple[float, ...]
    hot_tokens: int
    cluster_sizes: Spread
    epochs: int
    losses: tuple[float, ...]  # by epoch
    recall: tuple[float, ...]
    accepted: dict[str, float]
    share: dict[str, float]


@dataclass(frozen=True, slots=True, eq=False)
class RouterFile:
    """A router for one draft model: its output rows in M clusters, and who picks among them.

    ``cluster_of`` is the cluster of every token; the clusters ``always`` hold the hot tokens and
    are looked at in every step. The scores of all clusters are ``outer silu(inner [embedding ;
    hidden before] + inner_bias) + outer_bias``, so low for those in ``always`` that they are never
    among the best. ``budgets`` is how many of the best draft step t looks at beside ``always``;
    the last one counts from there on. ``frequent`` are all tokens, those drawn most often in the
    training texts first: what a static list is made of.
    """

    cluster_of: Ids  # [V]
    frequent: Ids  # [V]
    always: Ids  # [A] ascending
    inner: Floats  # [h, 2 d]
    inner_bias: Floats  # [h]
    outer: Floats  # [M, h]
    outer_bias: Floats  # [M]
    budgets: Ids  # [steps]
    report: TrainingReport


def read_router_file(path: str | Path, weights: Weights) -> RouterFile:
    """The router at ``path``, checked against what `describe_weights` says of the draft's head.

    Rows beyond the tokenizer's vocabulary must have been cut off. Raises RouterFileError, which
    says to train again, for a file that is missing, damaged or made from other weights.
    """
    path = Path(path)
    header = read_header(path, ROUTER)
    if header.weights != weights:
        raise RouterFileError(
            f"{path} was trained for the output weights {header.weights.hash} "
            f"({header.weights.rows:,} x {header.weights.columns:,}), but the draft model has "
            f"{weights.hash} ({weights.rows:,} x {weights.columns:,}): train it again with "
            f"`{TRAINING}`"
        )
    clusters = read_part(path, header, CLUSTERS, ROUTER).tensors
    network = read_part(path, header, NETWORK, ROUTER).tensors
    return RouterFile(
        cluster_of=clusters["cluster_of"].astype(np.int32),
        frequent=clusters["frequent"].astype(np.int32),
        always=np.array(clusters["always"]),
        **{name: np.array(array) for name, array in network.items()},
        report=training_report(header),
    )


def training_report(header: Header) -> TrainingReport:
    """How the router of this header was trained."""
    return msgspec.convert(header.parts[NETWORK].about["report"], TrainingReport)
