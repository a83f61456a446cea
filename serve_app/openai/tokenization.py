"""The model's tokenizer: text to ids, conversations to prompts, ids to text."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from actors.text.token_bytes import TokenBytes
from serve_app.openai.errors import bad_request

LONG_TEXT_CHARACTERS = 4096
MAX_TEMPLATE_MESSAGE = 500
Converted = TypeVar("Converted")


class ModelTokenizer:
    """Wraps a fast transformers tokenizer. Safe to use from several threads at once."""

    def __init__(self, tokenizer: Any) -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise ValueError(
                "the model's tokenizer has no tokenizer.json: only those are supported"
            )
        self._tokenizer = tokenizer
        # Called directly: the wrapper's own call changes settings shared between threads.
        self._backend = tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self.token_bytes = TokenBytes(tokenizer, skip_special_tokens=False)
        self.visible_token_bytes = TokenBytes(tokenizer, skip_special_tokens=True)
        self.longest_token = max(map(len, tokenizer.get_vocab()))
        self.chat_template: str | None = tokenizer.chat_template or None
        template_arguments = inspect.signature(tokenizer.apply_chat_template).parameters
        self._reserved_names = {*template_arguments, "messages"} - {"kwargs"}

    @classmethod
    def load(cls, folder: str | Path) -> ModelTokenizer:
        """Reads the tokenizer of a model folder; nothing is downloaded or executed from it."""
        from transformers import AutoTokenizer  # takes seconds: only the replica needs it

        return cls(
            AutoTokenizer.from_pretrained(
                str(folder), local_files_only=True, trust_remote_code=False
            )
        )

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        # A batch of one: only the batch call lets other threads run while it works.
        [encoding] = self._backend.encode_batch([text], add_special_tokens=add_special_tokens)
        return list(encoding.ids)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens))

    def token_strings(self, token_ids: Sequence[int]) -> list[str]:
        """The tokens as the vocabulary spells them; empty for ids beyond it."""
        return [token or "" for token in self._tokenizer.convert_ids_to_tokens(list(token_ids))]

    def render_chat(
        self,
        messages: list[dict[str, str]],
        add_generation_prompt: bool,
        continue_final_message: bool,
        variables: Mapping[str, Any],
    ) -> str:
        """The conversation as the model's own (sandboxed) template writes it.

        Raises:
            ApiError: 400 when the model has no template or the template refuses the messages.
        """
        if self.chat_template is None:
            raise bad_request(
                "this model has no chat template: use /v1/completions with a prompt", "messages"
            )
        if reserved := sorted(self._reserved_names & variables.keys()):
            raise bad_request(
                f"'{reserved[0]}' cannot be set through chat_template_kwargs",
                "chat_template_kwargs",
            )
        if "developer" not in self.chat_template:
            messages = [
                message | {"role": "system"} if message["role"] == "developer" else message
                for message in messages
            ]
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    messages,
                    tokenize=False,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=continue_final_message,
                    **variables,
                )
            )
        except Exception as error:  # the template is a program run on the client's data
            reason = " ".join(str(error).split())[:MAX_TEMPLATE_MESSAGE]
            raise bad_request(
                f"the model's chat template refuses these messages: {reason}", "messages"
            ) from error

    def information(self) -> dict[str, Any]:
        """What ``/tokenizer_info`` tells."""
        tokenizer = self._tokenizer
        return {
            "tokenizer_class": type(tokenizer).__name__,
            "vocab_size": len(tokenizer),
            "bos_token": tokenizer.bos_token,
            "eos_token": tokenizer.eos_token,
            "pad_token": tokenizer.pad_token,
            "unk_token": tokenizer.unk_token,
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
            "additional_special_tokens": list(tokenizer.all_special_tokens),
            "chat_template": self.chat_template,
        }


async def off_loop_if_long(characters: int, work: Callable[[], Converted]) -> Converted:
    """Runs ``work`` in a thread when it is long enough to hold up every open stream."""
    if characters > LONG_TEXT_CHARACTERS:
        return await asyncio.to_thread(work)
    return work()
