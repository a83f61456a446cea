"""Replays in an engine of this process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from lexshard.actors.receipts.document import Provenance, Receipt
from lexshard.actors.receipts.replay import Replay, ReplayVerdict
from lexshard.actors.receipts.stop_rule import Spelling

if TYPE_CHECKING:
    from lexshard.actors.engine.engine import Engine

# Side by side: their rows share what a step costs by itself.
TOGETHER = 4


def replayed(
    engine: Engine, receipts: Sequence[Receipt], here: Provenance, spelling: Spelling | None
) -> Iterator[tuple[int, ReplayVerdict]]:
    """The verdicts as they come, by the index of their receipts, each of which fits the engine.

    Raises ReceiptError for one with stop strings where no ``spelling`` is at hand.
    """
    waiting = iter(enumerate(receipts))
    running: dict[str, tuple[int, Replay]] = {}
    while True:
        while len(running) < TOGETHER and (following := next(waiting, None)) is not None:
            index, receipt = following
            replay = Replay(receipt, here, spelling, f"replay-{index}")
            drafts = replay.begin()
            if drafts is not None:
                at_once = engine.submit(replay.request)  # refused, or said by its grammar
                if at_once is None:
                    engine.draft(drafts)
                    running[replay.request.request_id] = index, replay
                    continue
                replay.take(at_once)
            if replay.verdict is not None:
                yield index, replay.verdict
        if not running:
            return
        for event in engine.step():
            if event.request_id not in running:
                continue
            index, replay = running[event.request_id]
            drafts = replay.take(event)
            if drafts is not None:
                engine.draft(drafts)
            elif replay.verdict is not None:
                engine.cancel(event.request_id)
                del running[event.request_id]
                yield index, replay.verdict
