"""The requests of the engine benchmark: mixed lengths, real text, the same for a given seed."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Protocol

from lexshard.loadtest.prompts import STORY

PROMPT_TOKENS = (16, 200)
OUTPUT_TOKENS = (32, 160)


class Tokenizer(Protocol):
    """What the workload needs of a Hugging Face tokenizer."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class Job:
    """One request: a prompt and exactly how many tokens follow it (end of sequence ignored), or how
    many at most where a grammar says what they are."""

    prompt_ids: tuple[int, ...]
    output_tokens: int
    grammar: str | None = None


def mixed_jobs(tokenizer: Tokenizer, count: int, seed: int) -> tuple[Job, ...]:
    """``count`` requests that arrive together.

    Lengths are the midpoints of ``count`` equal slices of their ranges, shuffled, so that a
    single request has the middle length and every count has the same mean. Prompts are excerpts
    that begin at random places of a story.
    """
    if count < 1:
        raise ValueError("a case needs at least one request")
    chance = random.Random(f"{seed}-{count}")
    text = story_tokens(tokenizer)
    prompt_lengths = _slice_midpoints(*PROMPT_TOKENS, count)
    output_lengths = _slice_midpoints(*OUTPUT_TOKENS, count)
    chance.shuffle(prompt_lengths)
    chance.shuffle(output_lengths)
    jobs = []
    for prompt_length, output_length in zip(prompt_lengths, output_lengths, strict=True):
        start = chance.randrange(len(text) - prompt_length)
        jobs.append(Job(tuple(text[start : start + prompt_length]), output_length))
    return tuple(jobs)


def story_tokens(tokenizer: Tokenizer) -> list[int]:
    """The story that every prompt is an excerpt of."""
    return [
        token
        for paragraph in STORY.read_text(encoding="utf-8").splitlines(keepends=True)
        for token in tokenizer.encode(paragraph, add_special_tokens=False)
    ]


def _slice_midpoints(low: int, high: int, count: int) -> list[int]:
    width = (high - low) / count
    return [round(low + (index + 0.5) * width) for index in range(count)]
