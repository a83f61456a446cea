"""Draft heads hold every token they should exactly once, with the model's own weights."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lexshard.actors.drafter.heads import (
    FILLER,
    clusters_of,
    frequency_head,
    full_head,
    routed_head,
)
from lexshard.kernels.draft.types import DraftHead
from lexshard.kernels.linear import PackedWeight, unpack
from lexshard.kernels.linear.tile import PANEL
from tests.support.router_cases import router_file

DEPTH = 24


def weights(rows: int, *, half: bool = False) -> torch.Tensor:
    values = torch.randn(rows, DEPTH, generator=torch.Generator().manual_seed(rows))
    return values.bfloat16() if half else values


def clusters(head: DraftHead) -> Iterator[npt.NDArray[np.int32]]:
    """The ids of each cluster as they stand, fillers included."""
    for first, last in zip(head.offsets[:-1], head.offsets[1:], strict=True):
        yield head.ids[first * PANEL : last * PANEL]


def check(head: DraftHead, weight: torch.Tensor, ids: npt.ArrayLike) -> None:
    assert sorted(head.ids[head.ids != FILLER]) == sorted(np.asarray(ids).tolist())
    assert len(head.ids) == len(head.panels) * PANEL == head.offsets[-1] * PANEL
    for members in clusters(head):
        real = members[members != FILLER]
        assert (np.diff(real) > 0).all()  # in the order of their ids,
        assert (members[: len(real)] == real).all()  # fillers behind them
        assert len(members) - len(real) < PANEL
    rows = unpack(PackedWeight(head.panels, len(head.ids), DEPTH))
    real = head.ids != FILLER
    assert torch.equal(rows[real], weight[head.ids[real]].float())
    assert not rows[~real].any()


@given(rows=st.integers(1, 70), half=st.booleans())
def test_the_full_head_is_every_row_in_one_cluster(rows: int, half: bool) -> None:
    weight = weights(rows, half=half)
    head = full_head(weight)
    check(head, weight, np.arange(rows))
    assert head.offsets.tolist() == [0, -(-rows // PANEL)]
    assert head.router is None
    assert head.panels.dtype == (
        np.uint16 if half else np.float32
    )  # no bits lost, none for nothing


def test_rows_beyond_the_tokenizer_are_in_no_head() -> None:
    weight = weights(40)
    check(full_head(weight, 33), weight, np.arange(33))
    with pytest.raises(ValueError, match=r"0 \.\. 32"):
        frequency_head(weight, [33], 33)


@given(st.sets(st.integers(0, 49), min_size=1))
def test_a_static_list_is_its_rows(ids: set[int]) -> None:
    weight = weights(50)
    check(frequency_head(weight, list(ids)), weight, list(ids))


@pytest.mark.parametrize(
    ("ids", "message"),
    [([], "at least one"), ([-1], "must lie in"), ([50], "must lie in"), ([3, 3], "named twice")],
)
def test_a_static_list_that_cannot_be_is_refused(ids: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        frequency_head(weights(50), ids)


@settings(max_examples=30)
@given(labels=st.lists(st.integers(0, 4), min_size=5, max_size=90), half=st.booleans())
def test_a_routed_head_is_every_row_in_its_cluster(labels: list[int], half: bool) -> None:
    cluster_of = np.array([*labels, *range(5)], np.int32)  # none is empty
    weight = weights(len(cluster_of), half=half)
    head = routed_head(weight, router_file(cluster_of, DEPTH))
    check(head, weight, np.arange(len(cluster_of)))
    for number, members in enumerate(clusters(head)):
        assert (cluster_of[members[members != FILLER]] == number).all()
    assert [len(each) for each in clusters_of(cluster_of)] == np.bincount(cluster_of).tolist()


def test_a_routed_head_has_the_files_network() -> None:
    cluster_of = np.arange(48, dtype=np.int32) % 5
    file = router_file(cluster_of, DEPTH)
    head = routed_head(weights(48), file)
    assert head.router is not None
    assert head.always.tolist() == [0]
    width = len(file.inner_bias)
    inner = unpack(PackedWeight(head.router.inner, width, 2 * DEPTH)).numpy()
    outer = unpack(PackedWeight(head.router.outer, 5, width)).numpy()
    np.testing.assert_array_equal(inner, file.inner)
    np.testing.assert_array_equal(outer, file.outer)
    assert head.router.budgets.tolist() == file.budgets.tolist()
