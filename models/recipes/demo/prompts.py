"""Held-out prompts and batched generation with a checkpoint pair."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from models.recipes.demo.texts.chat import Message, dialogue_messages
from models.recipes.demo.texts.corpus import Dialogue


def dialogue_prompts(dialogues: Sequence[Dialogue], count: int) -> list[list[Message]]:
    """``count`` dialogues spread over the held-out ones, each cut after one of its user turns."""
    prompts: list[list[Message]] = []
    step = max(1, len(dialogues) // count)
    for number, dialogue in enumerate(dialogues[::step][:count]):
        messages = dialogue_messages(dialogue)
        ends = [place + 1 for place, message in enumerate(messages) if message["role"] == "user"]
        prompts.append(messages[: ends[number % len(ends)]])
    return prompts


def prose_prompts(books: Sequence[Sequence[str]], count: int) -> list[str]:
    """``count`` openings of long held-out paragraphs, about twenty words each."""
    paragraphs = [text for book in books for text in book if len(text) >= 300]
    step = max(1, len(paragraphs) // count)
    return [" ".join(text.split()[:20]) for text in paragraphs[::step][:count]]


def chat_texts(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Sequence[Message]]
) -> list[str]:
    """Prompts in the chat template, ready for the assistant's turn."""
    return [
        tokenizer.apply_chat_template(list(prompt), tokenize=False, add_generation_prompt=True)
        for prompt in prompts
    ]


def generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    new_tokens: int,
    sample: bool,
    seed: int,
) -> list[tuple[list[int], list[int]]]:
    """Prompt and answer token ids of every text; answers keep their end token, if any."""
    torch.manual_seed(seed)
    encoded = tokenizer(list(texts), return_tensors="pt", padding=True, padding_side="left")
    mask = encoded["attention_mask"]
    greedy = {"do_sample": False, "temperature": None, "top_k": None, "top_p": None}
    with torch.inference_mode():
        output = model.generate(
            input_ids=encoded["input_ids"],
            attention_mask=mask,
            max_new_tokens=new_tokens,
            **({} if sample else greedy),
        )
    width = mask.shape[1]
    ends = set(model.generation_config.eos_token_id)
    results: list[tuple[list[int], list[int]]] = []
    for row, length in zip(output.tolist(), mask.sum(dim=1).tolist(), strict=True):
        answer: list[int] = []
        for token in row[width:]:
            answer.append(token)
            if token in ends:
                break
        results.append((row[width - length : width], answer))
    return results
