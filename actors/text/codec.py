"""Text to token ids and back, for those who use the engine from Python."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lexshard.actors.text.detokenizer import Detokenizer
from lexshard.actors.text.token_bytes import TokenBytes


class TextCodec:
    """A model folder's tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._token_bytes = TokenBytes(tokenizer, skip_special_tokens=True)

    @classmethod
    def load(cls, folder: str | Path) -> TextCodec | None:
        """None where the folder has no ``tokenizer.json``."""
        if not (Path(folder) / "tokenizer.json").is_file():
            return None
        from transformers import AutoTokenizer  # takes seconds: only those who use text wait

        return cls(AutoTokenizer.from_pretrained(str(folder), local_files_only=True))

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer(text).input_ids)

    def detokenizer(self, stop: Sequence[str], min_tokens: int) -> Detokenizer:
        return Detokenizer(self._token_bytes, stop, min_tokens=min_tokens)
