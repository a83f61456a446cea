"""Top-p where the logits are leaves the very tokens of the reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lexshard.kernels.exponential.double_precision import exponential_array
from lexshard.kernels.truncate.reference import MASS_UNIT, truncate
from tests.support.interpreted import interpret

ROOM = 24
SCALES = tuple(float(np.float32(each)) for each in (1e-3, 0.5, 1.0, 1.7, 20.0))
TOP_P = (1e-9, 0.1, 0.5, 0.9, 0.95, 0.9999999, 1 - 1e-15)


def check_nuclei_are_those_of_the_reference(device: str) -> None:
    """Ties, zeros of either sign, excluded tokens, logits that dwarf all others."""
    from lexshard.kernels.truncate.device import nuclei

    @settings(deadline=None)
    @given(st.data())
    def check(data: st.DataObject) -> None:
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
        drawn = [
            (data.draw(st.sampled_from(SCALES)), data.draw(st.sampled_from(TOP_P))) for _ in rows
        ]
        scale, top_p = (
            torch.tensor(each, dtype=torch.float64, device=device)
            for each in zip(*drawn, strict=True)
        )
        found = nuclei(torch.from_numpy(logits).to(device), scale, top_p, ROOM)
        for row, (own_scale, own_top_p) in enumerate(drawn):
            expected = np.flatnonzero(truncate(logits[row], own_scale, 0, own_top_p, -np.inf))
            count = int(found.counts[row])
            if len(expected) > ROOM:
                assert count > ROOM
            else:
                assert count == len(expected)
                assert sorted(found.ids[row, :count].tolist()) == expected.tolist()

    check()


def check_masses_have_the_bits_of_the_reference(device: str) -> None:
    """In rows of several programs, down to masses of nothing."""
    from lexshard.kernels.truncate.triton_kernel import row_masses

    distances = -np.concatenate([[0.0], np.geomspace(1e-30, 800, 20_000), [700.0, 699.99]])
    logits = torch.from_numpy(distances).float().expand(2, -1).contiguous().to(device)
    scales = torch.tensor([1.0, SCALES[3]], dtype=torch.float64, device=device)
    masses, totals, keys = (each.cpu().numpy() for each in row_masses(logits, scales))
    for row, scale in enumerate(scales.tolist()):
        scaled = logits[row].cpu().numpy().astype(np.float64) * scale
        expected = np.rint(exponential_array(scaled) * MASS_UNIT).astype(np.int64)
        assert np.array_equal(masses[row], expected)
        assert totals[row] == expected.sum()
    assert (np.diff(keys[:, :20_001]) < 0).all()


CHECKS = (check_nuclei_are_those_of_the_reference, check_masses_have_the_bits_of_the_reference)


def test_the_interpreter_leaves_the_tokens_of_the_reference() -> None:
    program = (
        "from tests.kernels import test_truncate_device as checks\n"
        "for check in checks.CHECKS: check('cpu')\n"
    )
    interpret(program)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_a_gpu_leaves_the_tokens_of_the_reference(check: object) -> None:
    check("cuda")  # type: ignore[operator]
