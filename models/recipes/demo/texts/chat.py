"""Chat records made from dialogues and, by rule, from books."""

from __future__ import annotations

import random
import re

from models.recipes.demo.texts.corpus import Dialogue, split_sentences
from models.recipes.demo.texts.tokenizer import render_chat

Message = dict[str, str]

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a friendly assistant. Answer in one or two sentences.",
    "You help people book tables, tickets and rooms.",
    "You are a polite assistant who answers briefly.",
    "Be brief and kind.",
    "Answer the user's questions.",
    "You are a helpful, respectful and honest assistant.",
    "You are a travel and entertainment assistant.",
    "Help the user with the task at hand.",
    "You are an assistant. Keep your answers short.",
)
STORY_SYSTEM_PROMPTS = (
    "You are a storyteller.",
    "You tell short stories for children.",
    "You are a helpful assistant.",
    "You are a friendly assistant who likes old tales.",
    "Be brief and kind.",
    "Tell stories in plain words.",
)
STORY_REQUESTS = (
    "Tell me a story.",
    "Please tell me a story.",
    "Tell me a short story.",
    "Can you tell me a story?",
    "I want to hear a story.",
    "Once upon a time...",
    "Write a short story.",
    "Write a story for children.",
    "Tell me a fairy tale.",
    "Tell me something.",
    "Can you tell me a bedtime story?",
    "Do you know a good story?",
)
TOPIC_REQUESTS = (
    "Tell me a story about the {noun}.",
    "Tell me a story about a {noun}.",
    "Tell me about the {noun}.",
    "Write a short story about a {noun}.",
    "Can you tell me a story about the {noun}?",
    "I would like a story about the {noun}.",
    "Do you know a story with a {noun} in it?",
    "What happened to the {noun}?",
    "Write a story about the {noun}, please.",
    "Who was the {noun}?",
)
CONTINUE_REQUESTS = (
    "Continue this story: {sentence}",
    "Go on with this story: {sentence}",
    "What happens next? {sentence}",
    "Please continue: {sentence}",
    "Finish this for me: {sentence}",
    "How does this go on? {sentence}",
    "{sentence} And then?",
    "Write what comes after this: {sentence}",
)
_NOUN_LIST = """
    king queen prince princess wolf fox bear lion tiger cat dog horse bird mouse rabbit giant
    witch wizard fairy dwarf dragon boy girl child mother father brother sister woman man farmer
    soldier sailor captain hunter miller tailor fisherman shepherd teacher doctor tree forest wood
    garden flower rose river sea island mountain castle house cottage palace village city ship boat
    ring crown sword gold treasure stone star moon sun snow storm elephant monkey snake frog fish
    duck goose hen swan eagle owl donkey goat sheep cow pig bee ant spider scarecrow lady gentleman
    uncle aunt grandmother grandfather baby merchant thief robber pirate peasant cook beggar"""
NOUNS = frozenset(_NOUN_LIST.split())
_OPENINGS = re.compile(
    r"^(Once|One (day|morning|evening|night|summer|winter)|There (was|were|once|lived)|Long ago"
    r"|Long, long ago|In the (days|old|beginning)|Many years|A (long time|certain|great many|poor"
    r"|young|little|rich)|It was|Far away|In a)\b"
)
_WORD = re.compile(r"[a-z]+")
_SHORTEST_ANSWER = 170
_LONGEST_ANSWER = 420


def dialogue_messages(dialogue: Dialogue) -> list[Message]:
    """Messages of a dialogue, user and system sides as ``user`` and ``assistant``."""
    roles = {"U": "user", "S": "assistant"}
    return [{"role": roles[speaker], "content": text} for speaker, text in dialogue.turns]


def dialogue_text(dialogue: Dialogue, generator: random.Random, system_share: float) -> str:
    """A dialogue in the chat template, some with a system prompt in front."""
    messages = dialogue_messages(dialogue)
    if generator.random() < system_share:
        messages.insert(0, {"role": "system", "content": generator.choice(SYSTEM_PROMPTS)})
    return render_chat(messages)


def _passage(sentences: list[str], generator: random.Random) -> str | None:
    """Leading sentences, between the shortest and longest answer, or nothing."""
    limit = generator.randint(_SHORTEST_ANSWER + 60, _LONGEST_ANSWER)
    length = 0
    taken: list[str] = []
    for sentence in sentences:
        if length + len(sentence) > limit:
            break
        taken.append(sentence)
        length += len(sentence) + 1
    passage = " ".join(taken)
    complete = passage.endswith((".", "!", "?", '"'))
    return passage if length >= _SHORTEST_ANSWER and complete else None


def _story_messages(paragraph: str, generator: random.Random) -> list[Message] | None:
    sentences = split_sentences(paragraph)
    opening = _OPENINGS.search(paragraph) is not None
    kinds = ("plain", "plain", "topic", "continue") if opening else ("topic", "continue")
    kind = generator.choice(kinds)
    if kind == "continue":
        passage = _passage(sentences[1:], generator)
        prompt = generator.choice(CONTINUE_REQUESTS).format(sentence=sentences[0])
    else:
        passage = _passage(sentences, generator)
        prompt = generator.choice(STORY_REQUESTS)
    if passage is None:
        return None
    if kind == "topic":
        nouns = [word for word in _WORD.findall(passage) if word in NOUNS]
        if not nouns:
            return None
        prompt = generator.choice(TOPIC_REQUESTS).format(noun=generator.choice(nouns))
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": passage}]


def story_chats(
    books: list[list[str]], count: int, generator: random.Random, system_share: float
) -> list[str]:
    """Chat texts whose answers are passages of the books."""
    paragraphs = [
        paragraph
        for book in books
        for paragraph in book
        if len(paragraph) >= _SHORTEST_ANSWER and paragraph[0].isalpha()
    ]
    generator.shuffle(paragraphs)
    paragraphs.sort(key=lambda paragraph: _OPENINGS.search(paragraph) is None)
    texts: list[str] = []
    for paragraph in paragraphs:
        if len(texts) == count:
            break
        messages = _story_messages(paragraph, generator)
        if messages is None:
            continue
        if generator.random() < system_share:
            prompt = generator.choice(STORY_SYSTEM_PROMPTS)
            messages.insert(0, {"role": "system", "content": prompt})
        texts.append(render_chat(messages))
    generator.shuffle(texts)
    return texts
