"""The head that other programs draw with."""

from __future__ import annotations

from collections.abc import Callable

import torch

from lexshard.actors.messages import Request, SamplingParameters
from lexshard.actors.standalone.drawing_head import DrawingHead
from lexshard.actors.states.row_table import RowNames

SIZE, COLUMNS = 500, 32


def test_names_that_are_made_once_draw_as_those_of_each_step() -> None:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(SIZE, COLUMNS, generator=generator)
    hidden = 0.3 * torch.randn(8, 1, COLUMNS, generator=generator)
    head = DrawingHead(weight, None, None, 1.0, SIZE)
    once = RowNames((0,))

    def drawn(seed: int, names: Callable[[], RowNames]) -> list[int]:
        state = head.states.open(0, Request("", 0, (5, 6), SamplingParameters(seed=seed)))
        for row in hidden:
            [decision] = head.decide(row, names())
            assert decision is not None
            state.append(decision.token_id)
        head.states.close(0)
        return state.history[2:]

    anew = [drawn(seed, lambda: RowNames((0,))) for seed in (1, 2)]
    assert anew[0] != anew[1]
    assert [drawn(seed, lambda: once) for seed in (1, 2)] == anew
