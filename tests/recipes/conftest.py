"""The tiny pair that routers are trained for, and what a tiny demo is made from."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from models.recipes.demo.recipe import DemoRecipe, Measurement, Mixture, NetworkShape, Schedule
from tests.support.router_cases import TinyPair


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    return TinyPair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny folder of the shape the command takes."""
    folder = tmp_path_factory.mktemp("texts")
    paragraph = (
        "Once upon a time there was an old king who lived in a castle by the sea, number {}. "
        "He had a dog and a horse, and he was fond of both of them. "
        "Every morning he walked in the garden and looked at the roses and at the ships. "
        'One day a bird came and said, "Good morning, your majesty." The king was glad.'
    )
    books = [
        "\n\n".join(paragraph.format(7 * book + row) for row in range(40)) for book in range(4)
    ]
    (folder / "tales.txt").write_text("\n\n<|endoftext|>\n\n".join(books), encoding="utf-8")
    turns = [["U", "I need a room for 2 nights."], ["S", "In which city?"], ["U", "In York."]]
    records = [
        {"id": f"{part}/{number}", "services": [], "turns": [*turns, ["S", f"Room {number}."]]}
        for part in ("train", "test")
        for number in range(60)
    ]
    lines = "\n".join(json.dumps(record) for record in records)
    (folder / "talk.jsonl").write_text(lines, encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def recipe() -> DemoRecipe:
    schedule = Schedule(
        tokens=8 * 256,
        batch_tokens=256,
        micro_tokens=64,
        sequence=64,
        long_sequence=128,
        long_fraction=0.25,
        warmup_steps=2,
        frequent_tokens=64,
        sampled_tokens=32,
    )
    shape = NetworkShape(
        hidden=32, layers=1, heads=2, kv_heads=1, intermediate=48, vocabulary=400, positions=128
    )
    return DemoRecipe(
        tokenizer_sample_bytes=40_000,
        mixture=Mixture(held_out_books=1, story_chat_records=50),
        target=shape,
        draft=shape,
        target_schedule=replace(schedule, average_fraction=0.25),
        draft_schedule=schedule,
        measurement=Measurement(
            held_out_bytes=5_000,
            end_prompts=4,
            end_tokens=8,
            match_prompts=4,
            match_tokens=8,
            sample_prompts=2,
            sample_tokens=8,
            shipped_prompts=2,
        ),
    )
