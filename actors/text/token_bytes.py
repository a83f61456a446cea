"""The exact bytes every token stands for, so that characters split between tokens survive."""

from __future__ import annotations

import json
import re
from typing import Any

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_PIECE_DECODERS = {"ByteFallback", "Fuse", "Metaspace", "Replace", "Strip"}


def byte_level_alphabet() -> dict[str, int]:
    """The characters byte-level BPE writes bytes as: printable ones stand for themselves, the
    other 68 are numbered from U+0100 (Radford et al. 2019, GPT-2)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    return alphabet | {chr(256 + i): byte for i, byte in enumerate(others)}


class TokenBytes(dict[int, bytes]):
    """Token id to bytes, filled in as ids are met. Ids beyond the tokenizer's are empty.

    A token is taken as the continuation of a text: the space that SentencePiece tokenizers strip
    from the beginning of a whole text is kept.

    Raises:
        ValueError: the tokenizer's decoder is of a kind whose tokens are not runs of bytes.
    """

    def __init__(self, tokenizer: Any, skip_special_tokens: bool) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._replacements: list[tuple[str, str]] = []
        self._alphabet: dict[str, int] | None = None
        self._read_decoder(tokenizer.backend_tokenizer.decoder)
        if skip_special_tokens:
            added = tokenizer.added_tokens_decoder
            self.update((i, b"") for i, token in added.items() if token.special)

    def _read_decoder(self, decoder: Any) -> None:
        description = {} if decoder is None else json.loads(decoder.__getstate__())
        parts = description.get("decoders", [description])
        kinds = {part.get("type") for part in parts}
        if "ByteLevel" in kinds:
            self._alphabet = byte_level_alphabet()
        elif kinds <= _PIECE_DECODERS:
            for part in parts:
                if part["type"] == "Replace":
                    self._replacements.append((part["pattern"]["String"], part["content"]))
                elif part["type"] == "Metaspace":
                    self._replacements.append((part["replacement"], " "))
        else:
            names = ", ".join(sorted(str(kind) for kind in kinds))
            raise ValueError(
                f"the tokenizer decodes with {names}; only byte-level and SentencePiece-like "
                "tokenizers can be streamed exactly"
            )

    def __missing__(self, token_id: int) -> bytes:
        token = self._tokenizer.convert_ids_to_tokens(token_id)
        content = b"" if token is None else self._convert(token)
        self[token_id] = content
        return content

    def _convert(self, token: str) -> bytes:
        if self._alphabet is not None:
            if all(character in self._alphabet for character in token):
                return bytes(self._alphabet[character] for character in token)
            return token.encode()
        if byte := _BYTE_TOKEN.fullmatch(token):
            return bytes([int(byte[1], 16)])
        for pattern, content in self._replacements:
            token = token.replace(pattern, content)
        return token.encode()


def token_text(content: bytes) -> str:
    """A token as a JSON string; bytes that are not whole characters as ``bytes:\\xe3\\x81``,
    which keeps different tokens different."""
    try:
        return content.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)
