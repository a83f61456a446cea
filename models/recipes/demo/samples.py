"""What the target writes after held-out beginnings taken unchosen, and how its card shows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from models.recipes.demo.prompts import chat_texts, dialogue_prompts, generate, prose_prompts
from models.recipes.demo.recipe import Measurement
from models.recipes.demo.texts.corpus import Corpus

SEED = 1
MODES = ("greedy", "sampled")

Sample = dict[str, str]
"""``kind`` of text, ``mode`` of writing, ``prompt`` and ``answer``."""


def samples(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, corpus: Corpus, size: Measurement
) -> list[Sample]:
    """Every kind's prompts, evenly spread over its held-out text, each answered in both modes."""
    count = size.sample_prompts
    prompts = {kind: prose_prompts(books, count) for kind, books in corpus.held_out_prose.items()}
    chats = dialogue_prompts(corpus.held_out_dialogues, count)
    prompts["dialogues"] = chat_texts(tokenizer, chats)
    return [
        {"kind": kind, "mode": mode, "prompt": text, "answer": tokenizer.decode(answer)}
        for kind, texts in prompts.items()
        if texts
        for mode in MODES
        for text, (_, answer) in zip(
            texts,
            generate(model, tokenizer, texts, size.sample_tokens, mode == "sampled", SEED),
            strict=True,
        )
    ]


def samples_text(written: Sequence[Mapping[str, str]]) -> str:
    """The samples in Markdown, an arrow where the model begins."""
    parts: list[str] = []
    heading = ""
    for sample in written:
        if heading != (heading := f"### {sample['kind']}, {sample['mode']}"):
            parts.append(heading)
        parts.append(f"````text\n{sample['prompt']}⟶{sample['answer']}\n````")
    return "\n\n".join(parts) + "\n"
