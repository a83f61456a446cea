"""Measuring a finished checkpoint pair on held-out text."""

from __future__ import annotations

import json
import lzma
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers import PreTrainedTokenizerBase as TokenizerBase

from models.recipes.demo.export import TEMPERATURE
from models.recipes.demo.prompts import chat_texts, dialogue_prompts, generate, prose_prompts
from models.recipes.demo.recipe import Measurement
from models.recipes.demo.samples import samples, samples_text
from models.recipes.demo.texts.chat import Message, dialogue_messages
from models.recipes.demo.texts.corpus import Corpus
from models.recipes.demo.texts.tokenizer import END_OF_TEXT, render_chat
from models.recipes.demo.texts.windows import TokenSource

EVALUATION_FILE = "evaluation.json"
SAMPLES_FILE = "samples.md"


@dataclass(frozen=True)
class HeldOutText:
    """Held-out documents as the model reads them and as the bytes they are charged to."""

    name: str
    documents: list[str]
    raw: bytes


def held_out_texts(corpus: Corpus, limit: int) -> list[HeldOutText]:
    """At most ``limit`` bytes of every held-out kind of text."""
    texts: list[HeldOutText] = []
    for name, books in corpus.held_out_prose.items():
        share = limit // max(1, len(books))
        documents = ["\n\n".join(_leading(book, share)) for book in books]
        texts.append(HeldOutText(name, documents, "\n\n".join(documents).encode()))
    documents, turns, size = [], [], 0
    for dialogue in corpus.held_out_dialogues:
        if size >= limit:
            break
        messages = dialogue_messages(dialogue)
        documents.append(render_chat(messages))
        turns += [message["content"] for message in messages]
        size += sum(len(message["content"].encode()) + 1 for message in messages)
    if documents:
        texts.append(HeldOutText("dialogues", documents, "\n".join(turns).encode()))
    return texts


def _leading(paragraphs: Sequence[str], limit: int) -> list[str]:
    taken: list[str] = []
    size = 0
    for paragraph in paragraphs:
        if size >= limit:
            break
        taken.append(paragraph)
        size += len(paragraph.encode()) + 2
    return taken


def _token_bits(model: PreTrainedModel, tokens: torch.Tensor) -> float:
    """Bits the model needs for every token after the first, in full-length windows."""
    length = model.config.max_position_embeddings
    total = 0.0
    with torch.inference_mode():
        for begin in range(0, len(tokens) - 1, length):
            window = tokens[begin : begin + length + 1]
            logits = model(window[None, :-1]).logits[0].float()
            loss = torch.nn.functional.cross_entropy(logits, window[1:], reduction="sum")
            total += float(loss) / math.log(2)
    return total


def _unigram_bits(sources: Sequence[TokenSource], vocabulary: int) -> np.ndarray:
    frequency = np.zeros(vocabulary)
    for source in sources:
        counts = np.bincount(source.tokens, minlength=vocabulary) + 1e-2
        frequency += source.weight * counts / counts.sum()
    return -np.log2(frequency / frequency.sum())


def bits_per_byte(
    models: dict[str, PreTrainedModel],
    tokenizer: TokenizerBase,
    texts: Sequence[HeldOutText],
    sources: Sequence[TokenSource],
) -> dict[str, dict[str, float]]:
    """Bits per byte of each text under each model, a unigram model and xz."""
    unigram = _unigram_bits(sources, len(tokenizer))
    totals: dict[str, float] = {}
    table: dict[str, dict[str, float]] = {}
    size = 0
    for text in texts:
        joined = END_OF_TEXT.join(["", *text.documents, ""])
        tokens = torch.tensor(tokenizer(joined, verbose=False)["input_ids"])
        bits = {name: _token_bits(model, tokens) for name, model in models.items()}
        bits["unigram"] = float(unigram[tokens[1:].numpy()].sum())
        bits["xz -9e"] = 8.0 * len(lzma.compress(text.raw, preset=9 | lzma.PRESET_EXTREME))
        table[text.name] = {name: value / len(text.raw) for name, value in bits.items()}
        table[text.name]["bytes"] = len(text.raw)
        for name, value in bits.items():
            totals[name] = totals.get(name, 0.0) + value
        size += len(text.raw)
    table["all"] = {name: value / size for name, value in totals.items()}
    table["all"]["bytes"] = size
    return table


def ended_count(
    model: PreTrainedModel,
    tokenizer: TokenizerBase,
    prompts: Sequence[Sequence[Message]],
    new_tokens: int,
    sample: bool,
    seed: int = 0,
) -> int:
    """How many prompts are answered with an end token inside ``new_tokens`` tokens."""
    ends = set(model.generation_config.eos_token_id)
    texts = chat_texts(tokenizer, prompts)
    answers = generate(model, tokenizer, texts, new_tokens, sample, seed)
    return sum(answer[-1] in ends for _, answer in answers)


def match_rates(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    tokenizer: TokenizerBase,
    texts: Sequence[str],
    new_tokens: int,
    sample: bool,
    seed: int = 0,
) -> tuple[float, float]:
    """At how many of the positions of target-written text both models' best tokens agree, and at
    how many the tokens that they draw at ``TEMPERATURE`` with the same noise."""
    best = drawn = count = 0
    generator = torch.Generator().manual_seed(seed)
    for prompt, answer in generate(target, tokenizer, texts, new_tokens, sample, seed):
        tokens = torch.tensor([[*prompt, *answer]])[:, :-1]
        with torch.inference_mode():
            ours = target(tokens).logits[0, len(prompt) - 1 :]
            theirs = draft(tokens).logits[0, len(prompt) - 1 :]
        best += int((ours.argmax(dim=-1) == theirs.argmax(dim=-1)).sum())
        noise = -TEMPERATURE * torch.empty_like(ours).exponential_(generator=generator).log()
        drawn += int(((ours + noise).argmax(dim=-1) == (theirs + noise).argmax(dim=-1)).sum())
        count += len(answer)
    return best / count, drawn / count


def load_model(folder: Path) -> PreTrainedModel:
    """A checkpoint in float32."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def target_bits(
    folder: Path, corpus: Corpus, sources: Sequence[TokenSource], size: Measurement
) -> float:
    """Bits per byte of all held-out text under one checkpoint."""
    texts = held_out_texts(corpus, size.held_out_bytes)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    table = bits_per_byte({"target": load_model(folder)}, tokenizer, texts, sources)
    return table["all"]["target"]


def evaluate_pair(
    target_folder: Path,
    draft_folder: Path,
    corpus: Corpus,
    sources: Sequence[TokenSource],
    size: Measurement,
) -> dict[str, Any]:
    """All measurements of an exported pair."""
    target, draft = load_model(target_folder), load_model(draft_folder)
    tokenizer = AutoTokenizer.from_pretrained(target_folder)
    texts = held_out_texts(corpus, size.held_out_bytes)
    table = bits_per_byte({"target": target, "draft": draft}, tokenizer, texts, sources)
    books = [book for group in corpus.held_out_prose.values() for book in group]
    prose = prose_prompts(books, size.match_prompts)
    chats = dialogue_prompts(corpus.held_out_dialogues, size.end_prompts)
    prompts = {"prose": prose, "dialogues": chat_texts(tokenizer, chats[: size.match_prompts])}
    rates = {
        f"{kind}, {mode}": match_rates(
            target, draft, tokenizer, kind_texts, size.match_tokens, mode == "sampled"
        )
        for kind, kind_texts in prompts.items()
        for mode in ("greedy", "sampled")
        if kind_texts
    }
    ended = {
        mode: ended_count(target, tokenizer, chats, size.end_tokens, mode == "sampled")
        for mode in ("greedy", "sampled")
        if chats
    }
    return {
        "parameters": {
            "target": sum(value.numel() for value in target.parameters()),
            "draft": sum(value.numel() for value in draft.parameters()),
        },
        "bits_per_byte": table,
        "best_token_match_rate": _with_mean({name: best for name, (best, _) in rates.items()}),
        "drawn_token_match_rate": _with_mean({name: drawn for name, (_, drawn) in rates.items()}),
        "ended_prompts": {"prompts": len(chats), "tokens": size.end_tokens, **ended},
        "samples": samples(target, tokenizer, corpus, size),
        "prompts": chats[: size.shipped_prompts],
    }


def _with_mean(rates: dict[str, float]) -> dict[str, float]:
    return rates | {"mean": sum(rates.values()) / max(1, len(rates))}


def read_evaluation(folder: Path) -> dict[str, Any]:
    """What `write_evaluation` wrote there. Raises FileNotFoundError where it did not."""
    found: dict[str, Any] = json.loads((folder / EVALUATION_FILE).read_text(encoding="utf-8"))
    return found


def write_evaluation(result: dict[str, Any], folder: Path) -> None:
    """Write the measurements beside the weights, and the samples as the card prints them."""
    text = json.dumps(result, indent=2, ensure_ascii=False)
    (folder / EVALUATION_FILE).write_text(text + "\n", encoding="utf-8")
    (folder / SAMPLES_FILE).write_text(samples_text(result["samples"]), encoding="utf-8")
