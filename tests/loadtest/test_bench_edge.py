"""``lexshard bench edge``: same-token is held to the server's own texts, whatever its budget."""

from __future__ import annotations

from dataclasses import replace

from lexshard.loadtest.bench import edge
from lexshard.loadtest.bench.options.edge import add_arguments
from tests.support.bench_options import parsed


def test_wrong_texts_count_with_every_budget() -> None:
    asked = parsed(add_arguments, "--modes", "same-token,csqs", "--budgets", "500,5000")
    run = edge.Run(((1, 2), (3,)), 1.0, 0.1, None)  # type: ignore[arg-type]
    devices = {name: [replace(run, texts=((1, 9), (3,)))] for name, _ in edge._settings(asked)}
    assert edge.wrong_texts({edge.SERVER_ALONE: [run], **devices}) == 2
