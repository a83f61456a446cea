"""Prompts of the published sets that speculative decoding is measured on, as users send them.

Questions go through the target's chat template; HumanEval's function heads are continued as text.
"""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

SPEC_BENCH, HUMAN_EVAL = "spec_bench_question.jsonl", "HumanEval.jsonl.gz"
MT_BENCH, GSM8K = "mt_bench_question.jsonl", "gsm8k_test.jsonl"
# Spec-Bench's own tasks; the eight categories of MT-Bench are its multi-turn conversation.
SPEC_BENCH_TASKS = ("translation", "summarization", "qa", "math_reasoning", "rag")
CONVERSATION = "conversation"


def read_tasks(folder: Path, tokenizer: Any, most_tokens: int) -> dict[str, list[tuple[int, ...]]]:
    """The prompts of every task in ``folder`` as token ids: the last ``most_tokens`` of each.

    Files are those the projects publish: Spec-Bench's ``spec_bench_question.jsonl``, HumanEval's
    ``HumanEval.jsonl.gz``, FastChat's ``mt_bench_question.jsonl``, ``gsm8k_test.jsonl``. First
    turns alone. Raises ValueError where none of them is there.
    """
    questions: dict[str, list[str]] = {}
    for record in _records(folder / SPEC_BENCH):
        category = record["category"]
        task = category if category in SPEC_BENCH_TASKS else CONVERSATION
        questions.setdefault(f"Spec-Bench {task}", []).append(record["turns"][0])
    questions["MT-Bench"] = [record["turns"][0] for record in _records(folder / MT_BENCH)]
    questions["GSM8K"] = [record["question"] for record in _records(folder / GSM8K)]
    tasks = {
        name: [_asked(tokenizer, text)[-most_tokens:] for text in texts]
        for name, texts in questions.items()
    }
    tasks["HumanEval"] = [
        tuple(tokenizer(record["prompt"]).input_ids)[-most_tokens:]
        for record in _records(folder / HUMAN_EVAL)
    ]
    found = {name: prompts for name, prompts in tasks.items() if prompts}
    if not found:
        raise ValueError(
            f"{folder} has none of {SPEC_BENCH}, {MT_BENCH}, {GSM8K}, {HUMAN_EVAL}: get them from "
            "hemingkx/Spec-Bench, lm-sys/FastChat, openai/grade-school-math and openai/human-eval"
        )
    return found


def sample(prompts: Sequence[tuple[int, ...]], count: int, seed: int) -> list[tuple[int, ...]]:
    """``count`` of the prompts, drawn with the seed, in their order."""
    if len(prompts) <= count:
        return list(prompts)
    chosen = sorted(random.Random(seed).sample(range(len(prompts)), count))
    return [prompts[index] for index in chosen]


def _records(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a file of JSON lines, none where there is no file."""
    if path.is_file():
        content = path.read_bytes()
        text = gzip.decompress(content) if path.suffix == ".gz" else content
        for line in text.decode("utf-8").splitlines():
            if line.strip():
                yield json.loads(line)


def _asked(tokenizer: Any, question: str) -> tuple[int, ...]:
    if tokenizer.chat_template is None:
        return tuple(tokenizer(question).input_ids)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
    )
    return tuple(tokenizer(text).input_ids)
