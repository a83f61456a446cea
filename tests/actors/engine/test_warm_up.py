"""What an engine runs before it serves: every kind of sampling, and sizes where sizes matter."""

from __future__ import annotations

from lexshard.actors.engine.start.warm_up import warm_up_requests

MOST, STEP = 16, 512


def rounds(*, sizes_matter: bool) -> list[tuple[int, int]]:
    """How many requests each round has, and their longest prompt."""
    found = warm_up_requests(2048, MOST, STEP, 1000, sizes_matter=sizes_matter)
    return [(len(each), max(len(request.prompt_ids) for request in each)) for each in found]


def test_where_sizes_matter_every_one_is_run_and_a_prompt_that_fills_a_step() -> None:
    made = rounds(sizes_matter=True)
    assert [size for size, _ in made[-4:]] == [2, 4, 8, 16]
    assert any(prompt > STEP for _, prompt in made)


def test_elsewhere_every_kind_is_run_and_the_largest_batch_with_short_prompts() -> None:
    made = rounds(sizes_matter=False)
    kinds = len([size for size, _ in rounds(sizes_matter=True) if size == 1]) - 1
    assert [size for size, _ in made] == [1] * kinds + [kinds, MOST]
    assert max(prompt for _, prompt in made) < 32
