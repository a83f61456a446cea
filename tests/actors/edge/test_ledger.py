"""Which batches a device takes for alive: those that its target will take up, and no others."""

from __future__ import annotations

from lexshard.actors.edge.frames import GuessBatch
from lexshard.actors.edge.ledger import GuessChain


def sent(chain: GuessChain, *token_ids: int) -> GuessBatch:
    """A batch behind all there is."""
    return chain.note(GuessBatch(0, len(chain.history), token_ids))


def test_what_is_built_on_a_guess_that_fell_is_dropped() -> None:
    """Though it begins right behind what is said: where the last guess fell."""
    chain = GuessChain((1, 2))
    first, second, third = sent(chain, 10, 11, 12), sent(chain, 13, 14), sent(chain, 15)
    assert [each.ahead for each in (first, second, third)] == [False, True, True]
    chain.told((10, 11, 99), 1)
    assert chain.going == []
    assert chain.history == [1, 2, 10, 11, 99]


def test_what_is_built_on_what_is_said_outlives_a_batch_that_was_dropped() -> None:
    """The target may have taken that up."""
    chain = GuessChain((1, 2))
    sent(chain, 10), sent(chain, 13)
    chain.told((99,), 1)
    fresh, ahead = sent(chain, 20, 21), sent(chain, 22)
    assert (fresh.ahead, ahead.ahead) == (False, True)
    chain.told((20,), 2)
    assert chain.going == [fresh, ahead]
    chain.told((21, 50), 3)
    assert chain.going == []


def test_batches_go_on_as_long_as_every_guess_stands() -> None:
    chain = GuessChain((1, 2))
    sent(chain, 10, 11), sent(chain, 12, 13), sent(chain, 14)
    chain.told((10, 11, 12), 1)
    assert [each.number for each in chain.going] == [2, 3]
    chain.told((13,), 2)  # the target had no room for more
    assert [each.number for each in chain.going] == [3]
