"""gloo as a `Link`: latency and bandwidth that explain the exchanges measured here."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import numpy as np

from lexshard.loadtest.bench.shards.case import ShardCase
from lexshard.loadtest.bench.shards.published import Link

NAME = "gloo, fitted here"


def fit_link(cases: Sequence[ShardCase], cores: int) -> Link | None:
    """Hops that take a base and bytes that take their time, by least squares of relative errors
    over the ``cases`` that had a core for every shard; None where there is none.

    What every further server costs is what the root's processor spends on it, for that does not
    depend on who else runs: cases of more shards than ``cores`` tell it, too.
    """
    fair = [case for case in cases if 1 < case.shards <= cores]
    if not fair:
        return None
    measured = np.array([1e3 * median(case.exchange) for case in fair])
    hops = np.array([case.hops for case in fair], np.float64)
    carried = np.array([median(case.step_bytes) + case.hidden_bytes for case in fair])
    # Bytes in megabytes: columns of about the same size.
    causes = np.stack([hops, carried / 1e6], axis=1) / measured[:, None]
    base, per_megabyte = np.linalg.lstsq(causes, np.ones(len(fair)), rcond=None)[0]
    if per_megabyte <= 0 or base <= 0:  # bytes that are too few to be seen, or nothing but bytes
        base, per_megabyte = 1.0 / np.mean(hops / measured), 0.0
    bandwidth = 1e12 / per_megabyte if per_megabyte else float("inf")
    return Link(NAME, float(bandwidth), float(base), per_peer=_per_peer(cases), broadcasts=False)


def _per_peer(cases: Sequence[ShardCase]) -> float:
    """Microseconds per hop: how the root's processor time grows with the servers of like cases."""
    fewest: dict[tuple[int, str], ShardCase] = {}
    slopes = []
    for case in sorted(cases, key=lambda case: case.shards):
        if case.others:
            least = fewest.setdefault((case.batch, case.need), case)
            if case.shards > least.shards:
                more = 1e3 * (median(case.busy) - median(least.busy))
                slopes.append(more / (case.hops * (case.shards - least.shards)))
    return max(0.0, median(slopes)) if slopes else 0.0
