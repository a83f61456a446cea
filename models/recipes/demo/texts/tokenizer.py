"""The byte-level BPE tokenizer and its chat template."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
END_OF_TURN = "<|end|>"
ROLE_TOKENS = {"system": "<|system|>", "user": "<|user|>", "assistant": "<|assistant|>"}
SPECIAL_TOKENS = (END_OF_TEXT, *ROLE_TOKENS.values(), END_OF_TURN)

_PIECES = (
    r"'(?:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# A demo that is made anew keeps the one it has.
CHAT_TEMPLATE = Path(__file__).parents[3] / "lexshard-demo" / "chat_template.jinja"


def render_chat(messages: Iterable[dict[str, str]]) -> str:
    """What the chat template makes of the messages, without a generation prompt."""
    return "".join(
        f"{ROLE_TOKENS[message['role']]}\n{message['content']}{END_OF_TURN}\n"
        for message in messages
    )


def train_tokenizer(texts: Sequence[str], vocabulary: int) -> Tokenizer:
    """Train the byte-level BPE; digits are always single tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def as_fast_tokenizer(tokenizer: Tokenizer, positions: int) -> PreTrainedTokenizerFast:
    """Wrap the trained tokenizer as an ordinary Hugging Face fast tokenizer."""
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[*ROLE_TOKENS.values(), END_OF_TURN],
        model_max_length=positions,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE.read_text(encoding="utf-8")
    return fast
