"""What is kept of a cluster of output rows: enough to bound every logit in it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from lexshard.kernels.quantize.rounding import SMALLEST_SIZE, norms, round_up

# So many rows of a cluster are in float64 at a time.
ROWS_AT_ONCE = 4096


class Clusters(NamedTuple):
    """A partition of V output rows into C clusters, described as the rows that logits use.

    Cluster ``c`` owns ``order[offsets[c]:offsets[c + 1]]``. With ``W_i`` any of its rows:

    - ``||W_i - centroid_c|| <= radius_c`` (ball; CSV-Decode eq. 4 and 5);
    - the angle between ``W_i`` and ``direction_c`` is at most ``angular_radius_c`` unless ``W_i``
      is zero (cone; CSV-Decode section III-A5), and ``smallest_norm_c <= ||W_i|| <=
      largest_norm_c``.

    ``bias_values`` are the largest biases of the cluster in descending order (zeros where the head
    has none), padded with ``-inf``, and ``bias_ids`` the tokens they belong to, padded with -1.
    """

    order: npt.NDArray[np.int32]  # [V] token ids, clusters contiguous
    offsets: npt.NDArray[np.int64]  # [C + 1]
    centroid: npt.NDArray[np.float32]  # [C, d]
    radius: npt.NDArray[np.float32]  # [C], rounded up
    direction: npt.NDArray[np.float32]  # [C, d], of length 1 but for its rounding, or 0
    angular_radius: npt.NDArray[np.float32]  # [C] radians, rounded up
    largest_norm: npt.NDArray[np.float32]  # [C], rounded up
    smallest_norm: npt.NDArray[np.float32]  # [C], rounded down
    bias_values: npt.NDArray[np.float32]  # [C, m]
    bias_ids: npt.NDArray[np.int32]  # [C, m]

    @property
    def sizes(self) -> npt.NDArray[np.int64]:
        """Rows per cluster [C]."""
        return np.diff(self.offsets)

    @property
    def metadata_bytes(self) -> int:
        """Bytes of what a bound of either kind reads of one cluster's ball or cone, times C:
        a vector, two radii or norms, the largest bias."""
        return len(self.radius) * (4 * self.centroid.shape[1] + 16)


def summarise(
    weight: npt.NDArray[Any] | torch.Tensor,
    bias: npt.NDArray[np.float32] | torch.Tensor | None,
    order: npt.NDArray[np.int32],
    offsets: npt.NDArray[np.int64],
    *,
    table_size: int = 8,
) -> Clusters:
    """Describes the clusters ``order[offsets[c]:offsets[c + 1]]`` of the rows of ``weight``.

    ``weight`` [V, d] fp32 or bf16 (a torch tensor, or numpy ``uint16`` with the bf16 bits),
    ``bias`` [V] or None, ``order`` [V] a permutation, ``offsets`` [C + 1]. Clusters may be empty.
    ``table_size`` (m, at least 1) is the length of the bias tables.

    Raises `ValueError` where shapes do not fit, ``order`` is no permutation, or a weight or bias is
    not finite.
    """
    rows = as_rows(weight)
    size, columns = rows.shape
    biases = np.zeros(size, np.float32) if bias is None else _bias_array(bias)
    order, offsets = np.ascontiguousarray(order, np.int32), np.ascontiguousarray(offsets, np.int64)
    _check(order, offsets, biases, size, table_size)
    count = len(offsets) - 1
    centroid = np.zeros((count, columns), np.float32)
    direction = np.zeros((count, columns), np.float32)
    radius, angle, largest = np.zeros(count), np.zeros(count), np.zeros(count)
    smallest = np.zeros(count)
    values = np.full((count, table_size), -np.inf, np.float32)
    ids = np.full((count, table_size), -1, np.int32)
    for cluster in range(count):
        members = order[offsets[cluster] : offsets[cluster + 1]]
        if not len(members):
            continue
        centroid[cluster], direction[cluster] = _centres(rows, members)
        radius[cluster], angle[cluster], largest[cluster], smallest[cluster] = _extent(
            rows, members, centroid[cluster], direction[cluster]
        )
        best = np.lexsort((members, -biases[members]))[:table_size]
        values[cluster, : len(best)] = biases[members[best]]
        ids[cluster, : len(best)] = members[best]
    # Far below any real row and far above fp32 denormals, which a GPU may take for zero.
    smallest = np.where(smallest < SMALLEST_SIZE, 0.0, smallest)
    return Clusters(
        order=order,
        offsets=offsets,
        centroid=centroid,
        radius=round_up(np.maximum(radius, SMALLEST_SIZE)),
        direction=direction,
        angular_radius=round_up(np.maximum(angle, SMALLEST_SIZE)),
        largest_norm=round_up(np.maximum(largest, SMALLEST_SIZE)),
        smallest_norm=-round_up(-np.minimum(smallest, np.finfo(np.float32).max)),
        bias_values=values,
        bias_ids=ids,
    )


def remaining_bias(clusters: Clusters, ids: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
    """The largest bias [C] among the rows that are not in ``ids`` (those already opened).

    Read from the tables of the m largest; where all m are opened, the last of them bounds the
    rest. ``-inf`` where nothing is known to be left.
    """
    opened = np.isin(clusters.bias_ids, ids)  # padding is never in ids
    table_size = opened.shape[1]
    exhausted = opened.all(axis=1)
    place = np.where(exhausted, table_size - 1, np.argmin(opened, axis=1))
    values = np.take_along_axis(clusters.bias_values, place[:, None], axis=1)[:, 0]
    return np.where(exhausted & (clusters.sizes <= table_size), np.float32(-np.inf), values)


def as_rows(weight: npt.NDArray[Any] | torch.Tensor) -> torch.Tensor:
    """Output weights as a tensor; numpy ``uint16`` holds bf16 bits."""
    if isinstance(weight, torch.Tensor):
        return weight.detach()
    tensor = torch.from_numpy(np.ascontiguousarray(weight))
    return tensor.view(torch.bfloat16) if tensor.dtype == torch.uint16 else tensor


def _bias_array(bias: npt.NDArray[np.float32] | torch.Tensor) -> npt.NDArray[np.float32]:
    array = bias.detach().float().numpy() if isinstance(bias, torch.Tensor) else np.asarray(bias)
    return array.astype(np.float32, copy=False)


def _check(
    order: npt.NDArray[np.int32],
    offsets: npt.NDArray[np.int64],
    biases: npt.NDArray[np.float32],
    size: int,
    table_size: int,
) -> None:
    if table_size < 1:
        raise ValueError("bias tables hold at least one value: give table_size >= 1")
    if biases.shape != (size,) or not np.isfinite(biases).all():
        raise ValueError(f"{size} finite biases expected")
    if len(order) != size or not np.array_equal(np.sort(order), np.arange(size)):
        raise ValueError(f"order must hold each of the {size} rows once")
    if offsets[0] != 0 or offsets[-1] != size or (np.diff(offsets) < 0).any():
        raise ValueError(f"offsets must ascend from 0 to {size}")


def _pieces(
    rows: torch.Tensor, members: npt.NDArray[np.int32]
) -> Iterator[npt.NDArray[np.float64]]:
    """The rows of a cluster in float64, some at a time."""
    for start in range(0, len(members), ROWS_AT_ONCE):
        chosen = torch.from_numpy(members[start : start + ROWS_AT_ONCE]).long()
        piece = rows[chosen].double().cpu().numpy()
        if not np.isfinite(piece).all():
            raise ValueError("the output weights contain NaN or infinity")
        yield piece


def _lengths(piece: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return np.sqrt(np.einsum("rd,rd->r", piece, piece))


def _centres(
    rows: torch.Tensor, members: npt.NDArray[np.int32]
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """The mean of the rows [d] and the direction of the mean of their directions [d]."""
    total = np.zeros(rows.shape[1])
    heading = np.zeros(rows.shape[1])
    any_row = np.zeros(rows.shape[1])
    for piece in _pieces(rows, members):
        lengths = _lengths(piece)
        total += piece.sum(axis=0)
        nonzero = lengths > 0
        unit = piece[nonzero] / lengths[nonzero, None]
        if len(unit):
            heading += unit.sum(axis=0)
            any_row = unit[0]
    length = float(np.sqrt(heading @ heading))
    # Opposite rows cancel to rounding errors: any direction serves as well.
    heading = heading / length if length > 1e-6 else any_row
    return (total / len(members)).astype(np.float32), heading.astype(np.float32)


def _extent(
    rows: torch.Tensor,
    members: npt.NDArray[np.int32],
    centroid: npt.NDArray[np.float32],
    direction: npt.NDArray[np.float32],
) -> tuple[float, float, float, float]:
    """Radius and angular radius, largest and smallest norm, each rounded outward in float64."""
    rounding = (len(centroid) + 16) * 2.0**-51
    axis = direction.astype(np.float64)
    axis_length = float(np.sqrt(axis @ axis))
    radius = angle = largest = 0.0
    smallest = np.inf
    for piece in _pieces(rows, members):
        lengths = _lengths(piece)
        radius = max(radius, float(norms(piece - centroid.astype(np.float64)).max()))
        largest = max(largest, float(lengths.max()) * (1.0 + rounding))
        smallest = min(smallest, float(lengths.min()) * (1.0 - rounding))
        nonzero = lengths > 0
        if nonzero.any():
            cosine = (piece[nonzero] @ axis) / (lengths[nonzero] * axis_length)
            lowest = max(float(cosine.min()) - rounding, -1.0)
            angle = max(angle, float(np.arccos(min(lowest, 1.0))) + 2.0**-50)
    return radius, angle, largest, smallest
