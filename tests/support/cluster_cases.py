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


def weights(seed: int, flavour: str, size: int, columns: int) -> torch.Tensor:
    """[size, columns] fp32 of the kinds that break careless bounds."""
    random = np.random.default_rng(seed)
    weight = random.standard_normal((size, columns))
    if flavour == "clustered":
        centres = 3 * random.standard_normal((max(size // 8, 1), columns))
        weight = centres[random.integers(0, len(centres), size)] + 0.1 * weight
    elif flavour == "duplicates":
        weight = weight[random.integers(0, max(size // 4, 1), size)]
    elif flavour == "zero":
        weight[random.random(size) < 0.6] = 0
    elif flavour == "opposite":
        weight = weight[:1] * random.choice([-1.0, 1.0], (size, 1))
    elif flavour == "huge":
        weight *= 1e30
    elif flavour == "mixed":
        weight *= 10.0 ** random.integers(-44, 38, (size, 1))
    elif flavour == "denormal":
        weight *= 1e-44
    elif flavour == "one":
        weight *= np.eye(columns)[0] * 1e-3 + (random.random(columns) < 0.1)
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
