"""Weights, partitions of their rows and hidden states that aim at them."""

from __future__ import annotations

import numpy as np
import torch

from lexshard.actors.states.need import Need
from lexshard.kernels.bounds import Clusters

NEEDS = {
    "greedy": Need("top1"),
    "gumbel": Need("top1", key=5, inverse_temperature=1.0),
    "top-k": Need("topk", k=7, key=6, inverse_temperature=1.0),
    "min-p": Need("minp", min_p=0.1, key=7, inverse_temperature=1.0),
    "top-p": Need("nucleus", top_p=0.8, key=8, inverse_temperature=1.0),
    "epsilon": Need("epsilon", epsilon=0.05, key=9, inverse_temperature=1.0),
}


def flavoured_weight(
    random: np.random.Generator, size: int, columns: int, flavour: str
) -> np.ndarray:
    """[size, columns] float64 of a stated kind: those that break careless bounds, or plain."""
    weight = random.standard_normal((size, columns))
    if flavour == "clustered":
        centres = random.standard_normal((max(size // 12, 1), columns))
        weight = centres[random.integers(0, len(centres), size)] + 0.02 * weight
    elif flavour == "duplicates":
        weight = weight[random.integers(0, max(size // 3, 1), size)]
    elif flavour == "coarse":
        weight = weight.round(0)
    elif flavour == "zero":
        weight[random.random(size) < 0.5] = 0.0
    elif flavour == "opposite":
        weight = weight[:1] * random.choice([-1.0, 1.0], (size, 1))
    elif flavour == "huge rows":
        weight[random.random(size) < 0.1] *= 1e18
    elif flavour == "huge":
        weight *= random.choice([1e18, 1e22, 1e30, 1e37])
    elif flavour == "mixed":
        weight *= 10.0 ** random.integers(-44, 38, (size, 1))
    elif flavour == "denormal":
        weight *= 10.0 ** random.uniform(-44, random.choice([-40, -10]), (size, 1))
    elif flavour == "one":
        weight *= np.eye(columns)[0] * 1e-3 + (random.random(columns) < 0.1)
    elif flavour == "outlier channels":
        weight *= np.where(random.random(columns) < 0.1, 100.0, 1.0)
    elif flavour == "heavy tails":
        weight = random.standard_t(2, (size, columns))
    elif flavour == "low rank":
        rank = max(columns // 8, 1)
        weight = weight[:, :rank] @ random.standard_normal((rank, columns)) + 1e-3 * weight
    return weight


def weights(seed: int, flavour: str, size: int, columns: int) -> torch.Tensor:
    """The same in fp32."""
    weight = flavoured_weight(np.random.default_rng(seed), size, columns, flavour)
    return torch.from_numpy(np.clip(weight, -3e38, 3e38).astype(np.float32))


def partition(random: np.random.Generator, size: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """A random permutation and ``count`` random cuts of it; some clusters are empty."""
    cuts = np.sort(random.integers(0, size + 1, count - 1))
    return random.permutation(size).astype(np.int32), np.concatenate([[0], cuts, [size]])


def nearby(weight: torch.Tensor, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows sorted along the first principal axis and cut evenly: clusters of similar rows."""
    rows = weight.double().numpy()
    rows = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-300)
    axis = np.linalg.svd(rows - rows.mean(axis=0), full_matrices=False)[2][0]
    order = np.argsort(rows @ axis, kind="stable").astype(np.int32)
    return order, np.linspace(0, len(rows), count + 1).astype(np.int64)


def aimed(
    random: np.random.Generator, weight: torch.Tensor, clusters: Clusters, count: int
) -> np.ndarray:
    """Hidden states along ``W_i - mu``, ``mu``, ``W_i`` and ``u`` and against them, of lengths from
    denormal to 1e6, and zero."""
    rows = weight.double().numpy()
    owner = np.empty(len(rows), np.int64)
    owner[clusters.order] = np.repeat(np.arange(len(clusters.radius)), clusters.sizes)
    states = []
    for _ in range(count):
        row = random.integers(len(rows))
        centre = clusters.centroid[owner[row]].astype(np.float64)
        axis = clusters.direction[owner[row]].astype(np.float64)
        state = (
            rows[row] - centre,
            centre,
            rows[row],
            axis,
            random.standard_normal(rows.shape[1]),
        )[random.integers(5)]
        length = np.linalg.norm(state)
        wanted = random.choice([0.0, 1e-44, 1e-20, 1.0, 30.0, 1e6]) * random.choice([-1, 1])
        states.append(state * (wanted / length if length > 0 else 0.0))
    return np.array(states).astype(np.float32)
