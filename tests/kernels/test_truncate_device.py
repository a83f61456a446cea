"""Top-p where the logits are: torch's functions leave the very tokens of the reference."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from lexshard.kernels.exponential.double_precision import exponential_array
from lexshard.kernels.truncate.device import _exponential, nuclei
from lexshard.kernels.truncate.reference import truncate

ROOM = 24
SCALES = tuple(float(np.float32(each)) for each in (1e-3, 0.5, 1.0, 1.7, 20.0))
TOP_P = (1e-9, 0.1, 0.5, 0.9, 0.95, 0.9999999, 1 - 1e-15)


@given(st.data())
def test_a_nucleus_is_that_of_the_reference(data: st.DataObject) -> None:
    """Ties, zeros of either sign, excluded tokens, logits that dwarf all others."""
    size = data.draw(st.integers(1, 200))
    values = st.one_of(
        st.floats(-30, 30, width=32),
        st.sampled_from([0.0, -0.0, 1.0, float("-inf"), -1e30, 3e38]),
    )
    rows = data.draw(
        st.lists(st.lists(values, min_size=size, max_size=size), min_size=1, max_size=3)
    )
    logits = np.array(rows, np.float32)
    logits[:, 0] = np.maximum(logits[:, 0], -40.0)  # one token is left at least
    chosen = [(data.draw(st.sampled_from(SCALES)), data.draw(st.sampled_from(TOP_P))) for _ in rows]
    scale, top_p = (torch.tensor(each, dtype=torch.float64) for each in zip(*chosen, strict=True))
    found = nuclei(torch.from_numpy(logits), scale, top_p, ROOM)
    for row, (own_scale, own_top_p) in enumerate(chosen):
        expected = np.flatnonzero(truncate(logits[row], own_scale, 0, own_top_p, -np.inf))
        count = int(found.counts[row])
        if len(expected) > ROOM:
            assert count > ROOM
        else:
            assert count == len(expected)
            assert sorted(found.ids[row, :count].tolist()) == expected.tolist()


def test_the_exponential_has_the_bits_of_the_reference() -> None:
    x = -np.concatenate([np.geomspace(1e-300, 800, 40_000), [0.0, np.inf, 700.0, 699.99]])
    ours = _exponential(torch.from_numpy(x)).numpy()
    assert np.array_equal(ours.view(np.int64), exponential_array(x).view(np.int64))
