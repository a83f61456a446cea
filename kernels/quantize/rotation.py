"""Random rotations whose law is known exactly, and cheap enough to turn every hidden state.

A vector of ``d`` columns, zero-padded to ``K`` blocks of 128, meets three orthogonal maps in turn:
random signs, a fixed mixing of the blocks (column ``j`` of every block with column ``j`` of all
others), and for every block a random orthogonal matrix of its own. Each of those is drawn from the
uniform (Haar) distribution, independently of the others; the first two spread a vector evenly over
the blocks and need no assumption. ``d (K + 128)`` multiplications turn one vector.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lexshard.kernels.quantize.layout import BLOCK, padded

# How far ``Rotation`` and its float64 arithmetic turn a unit vector from where the exact rotation
# does. Rounding to fp32 moves a block by at most ``2**-24 sqrt(128) = 6.8e-7`` (Frobenius norm);
# the rest is float64.
ROTATION_ERROR = 7e-7


@dataclass(frozen=True, slots=True, eq=False)
class Rotation:
    """The map ``x -> blocks (mixing (signs x))`` of R^D."""

    signs: npt.NDArray[np.float32]  # [D], D = d rounded up to 128: 1 or -1
    mixing: npt.NDArray[np.float64]  # [K, K], K = D / 128, orthogonal and symmetric
    blocks: npt.NDArray[np.float32]  # [K, 128, 128], input column first, output column last


def draw_rotation(columns: int, seed: int) -> tuple[Rotation, npt.NDArray[np.float64]]:
    """The rotation of ``seed`` for ``columns``, and its blocks before they were rounded to fp32."""
    width = padded(columns, BLOCK)
    generator = np.random.Generator(np.random.Philox(key=seed))
    signs = (2.0 * generator.integers(0, 2, width) - 1.0).astype(np.float32)
    blocks = _haar(generator, width // BLOCK)
    return Rotation(signs, _mixing(width // BLOCK), blocks.astype(np.float32)), blocks


def rotate(
    vectors: npt.NDArray[np.float64], rotation: Rotation, blocks: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """``vectors`` [R, d] turned: [R, D]."""
    width = len(rotation.signs)
    values = np.pad(vectors, ((0, 0), (0, width - vectors.shape[1]))) * rotation.signs
    mixed = rotation.mixing @ values.reshape(len(values), -1, BLOCK)
    # Block by block: [K, R, 128] @ [K, 128, 128].
    turned = mixed.transpose(1, 0, 2) @ blocks
    return np.ascontiguousarray(turned.transpose(1, 0, 2)).reshape(len(values), width)


def rotate_back(
    vectors: npt.NDArray[np.float64], rotation: Rotation, columns: int
) -> npt.NDArray[np.float64]:
    """The transpose of the rotation, for ``vectors`` [R, D]: [R, columns]."""
    values = vectors.reshape(len(vectors), -1, BLOCK).transpose(1, 0, 2)
    mixed = values @ rotation.blocks.astype(np.float64).transpose(0, 2, 1)
    turned = rotation.mixing @ mixed.transpose(1, 0, 2)
    return (turned.reshape(len(vectors), -1) * rotation.signs)[:, :columns]


def _mixing(count: int) -> npt.NDArray[np.float64]:
    """An orthogonal, symmetric matrix with entries of about equal size: Hadamard's where the order
    is a power of two, otherwise Hartley's."""
    if count & (count - 1) == 0:
        matrix = np.ones((1, 1))
        while len(matrix) < count:
            matrix = np.block([[matrix, matrix], [matrix, -matrix]])
        return matrix / np.sqrt(count)
    angle = 2.0 * np.pi * (np.outer(np.arange(count), np.arange(count)) % count) / count
    return (np.cos(angle) + np.sin(angle)) / np.sqrt(count)


def _haar(generator: np.random.Generator, count: int) -> npt.NDArray[np.float64]:
    """``count`` independent orthogonal matrices [count, 128, 128] from the Haar distribution.

    Stewart (1980), theorem 3.2: the product of reflections that send independent Gaussian vectors
    of falling length to the first axis, times the signs of what they send them to. Reflections
    from freshly drawn vectors have no condition number, unlike the QR decomposition.
    """
    result = np.tile(np.eye(BLOCK), (count, 1, 1))
    for first in range(BLOCK):
        vector = generator.standard_normal((count, BLOCK - first))
        sign = np.where(vector[:, 0] < 0, -1.0, 1.0)
        if first < BLOCK - 1:
            vector[:, 0] += sign * np.linalg.norm(vector, axis=1)
            vector *= np.sqrt(2.0 / np.square(vector).sum(axis=1, keepdims=True))
            tail = result[:, :, first:]
            tail -= (tail @ vector[:, :, None]) * vector[:, None, :]
        # The reflection sends the vector to minus its sign times the first axis.
        result[:, :, first] *= sign[:, None] if first == BLOCK - 1 else -sign[:, None]
    return result
