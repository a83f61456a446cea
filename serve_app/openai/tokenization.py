"""The model's tokenizer: text to ids, conversations to prompts, ids to text."""

from __future__ import annotations

import hashlib
import inspect
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import orjson
from jinja2 import Environment, TemplateError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from lexshard.actors.text.token_bytes import TokenBytes
from lexshard.cluster.config import ToolFormat
from lexshard.cluster.nearest import did_you_mean
from lexshard.serve_app.openai.errors import bad_request, shortened
from lexshard.serve_app.openai.workers import TextWorkers
from lexshard.serve_app.tools.families import reply_format

MAX_TEMPLATE_MESSAGE = 500
# The longest text: four contexts' worth of four bytes a token, and for a short context as much as
# takes half a second and 100 MB.
BYTES_PER_TOKEN = 4
CONTEXTS = 4
LEAST_TEXT_LIMIT = 512 * 1024


def most_text_bytes(context: int) -> int:
    """The bytes of the longest text that is tokenised, whatever is kept of its tokens.

    A tokenizer's time and memory grow with the text. The last tokens of a text cannot be had from
    its end alone (where a token begins may depend on everything before it), so a text that is to
    be truncated is tokenised whole, or not at all.
    """
    return max(LEAST_TEXT_LIMIT, context * CONTEXTS * BYTES_PER_TOKEN)


def text_bytes(text: str) -> int:
    """The size of a text as tokenizers see it: a character may be four bytes and four tokens."""
    return len(text) if text.isascii() else len(text.encode())


class ModelTokenizer:
    """Wraps a fast transformers tokenizer. Safe to use from several threads at once; long texts
    belong to its ``workers``. ``tool_format`` names the family of `serve_app.tools.families` that
    the model's replies are of; None finds it."""

    def __init__(self, tokenizer: Any, tool_format: ToolFormat | None = None) -> None:
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
        self.workers = TextWorkers()
        templates = tokenizer.chat_template or None
        named = templates if isinstance(templates, dict) else {"default": templates}
        self.chat_template: str | None = named.get("default")
        # Of chats with tools, as transformers chooses it.
        self._tool_template: str | None = named.get("tool_use", self.chat_template)
        both = {self.chat_template, self._tool_template}
        self._variables = {template: _variables(template or "") for template in both}
        added = tokenizer.added_tokens_decoder
        self.reply_format = reply_format(
            self._tool_template or "",
            self.reads("tools", tools=True),
            getattr(tokenizer, "response_template", None),
            {str(token): token_id for token_id, token in added.items()},
            forced=tool_format,
        )
        # Like the visible ones, with the marks of the model's replies.
        self.marked_token_bytes = TokenBytes(tokenizer, skip_special_tokens=True)
        self.marked_token_bytes.update(
            (token_id, mark.encode()) for mark, token_id in self.reply_format.token_ids.items()
        )
        template_arguments = inspect.signature(tokenizer.apply_chat_template).parameters
        self._reserved_names = {*template_arguments, "messages"} - {"kwargs"}

    @classmethod
    def load(cls, folder: str | Path, tool_format: ToolFormat | None = None) -> ModelTokenizer:
        """Reads the tokenizer of a model folder; nothing is downloaded or executed from it."""
        # One text is tokenised at a time, here: handing it to threads of the tokenizer's own and
        # waiting for them takes a tenth of a millisecond.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        with _torch_left_out():
            from transformers import AutoTokenizer  # takes a second: only API processes need it

            return cls(
                AutoTokenizer.from_pretrained(
                    str(folder), local_files_only=True, trust_remote_code=False
                ),
                tool_format,
            )

    def json(self) -> str:
        """All of it, as in a ``tokenizer.json`` with what other files of a model add."""
        return str(self._backend.to_str())

    def special_tokens(self) -> frozenset[str]:
        """Those that no text holds, as the vocabulary spells them."""
        added = self._tokenizer.added_tokens_decoder.values()
        return frozenset(str(token) for token in added if token.special)

    def reads(self, variable: str, *, tools: bool = False) -> bool:
        """Whether the chat template, that of chats with ``tools``, reads such a variable."""
        return variable in self._variables[self._tool_template if tools else self.chat_template]

    def vocabulary(self) -> dict[str, int]:
        """Ids by token, added ones too."""
        return dict(self._backend.get_vocab())

    @cached_property
    def vocabulary_hash(self) -> str:
        """The same for two tokenizers whose tokens have the same ids; takes a moment at first."""
        tokens = sorted(self.vocabulary().items(), key=lambda item: (item[1], item[0]))
        return hashlib.sha256(orjson.dumps(tokens)).hexdigest()[:32]

    def normalized_bytes(self, text: str) -> int:
        """What is tokenised of a text: a normaliser may make ten characters of one."""
        normalizer = self._backend.normalizer
        if normalizer is None or text.isascii():
            return text_bytes(text)
        return text_bytes(normalizer.normalize_str(text))

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        # A batch of one: only the batch call lets other threads run while it works. The fast one
        # makes the same ids without their offsets, in half the memory.
        [encoding] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return list(encoding.ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=False))

    def token_strings(self, token_ids: Sequence[int]) -> list[str]:
        """The tokens as the vocabulary spells them; empty for ids beyond it."""
        return [token or "" for token in self._tokenizer.convert_ids_to_tokens(list(token_ids))]

    def render_chat(
        self,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool,
        continue_final_message: bool,
        variables: Mapping[str, Any],
        tools: list[dict[str, Any]] | None = None,
    ) -> str:
        """The conversation as the model's own (sandboxed) template writes it.

        Raises:
            ApiError: 400 when the model has no template, the template refuses the messages, or
                does not know one of the ``variables``, tools or calls of them.
        """
        template = self._tool_template if tools else self.chat_template
        if template is None:
            raise bad_request(
                "this model has no chat template: use /v1/completions with a prompt", "messages"
            )
        if reserved := sorted(self._reserved_names & variables.keys()):
            raise bad_request(
                f"'{reserved[0]}' cannot be set through chat_template_kwargs",
                "chat_template_kwargs",
            )
        known = self._variables[template]
        for name in variables.keys() - known:
            if variables[name] is not None:
                field = f"chat_template_kwargs.{shortened(name)}"
                raise bad_request(
                    f"the model's chat template does not read '{field}'"
                    + did_you_mean(name, known),
                    field,
                )
        if tools and "tools" not in known:
            raise bad_request(
                "the model's chat template does not read 'tools': this model calls none", "tools"
            )
        for i, message in enumerate(messages):
            if "tool_calls" in message and "tool_calls" not in template:
                field = f"messages.{i}.tool_calls"
                raise bad_request(f"the model's chat template does not read '{field}'", field)
        if "developer" not in template:
            messages = [
                message | {"role": "system"} if message["role"] == "developer" else message
                for message in messages
            ]
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    messages,
                    tools=tools,
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
        tokenizer, names = self._tokenizer, ("bos", "eos", "pad", "unk")
        return {
            "tokenizer_class": type(tokenizer).__name__,
            "vocab_size": len(tokenizer),
            **{f"{name}_token": getattr(tokenizer, f"{name}_token") for name in names},
            **{f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in names[:3]},
            "additional_special_tokens": list(tokenizer.all_special_tokens),
            "chat_template": self.chat_template,
        }


@contextmanager
def _torch_left_out() -> Iterator[None]:
    """Whatever is imported inside finds no torch, unless this process has it already, or a
    transformers that has found one.

    Tokenizers do not need it, and transformers imports it wherever it is: 330 MB and three seconds
    for an API process.
    """
    if {"torch", "transformers"} & sys.modules.keys():
        yield
        return
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # that there is no torch
    modules: dict[str, Any] = sys.modules
    modules["torch"] = None  # by Python's rules it cannot be imported then
    try:
        yield
    finally:
        del modules["torch"]


class _GenerationBlocks(Extension):
    """``{% generation %}``, by which templates mark what an assistant said."""

    tags = {"generation"}  # noqa: RUF012  (as jinja2 declares it)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _variables(template: str) -> frozenset[str]:
    """The names a chat template reads that neither it nor what renders it defines."""
    environment = Environment(extensions=[loopcontrols, _GenerationBlocks])
    environment.globals |= dict.fromkeys(("raise_exception", "strftime_now"))
    try:
        return frozenset(meta.find_undeclared_variables(environment.parse(template)))
    except TemplateError:
        return frozenset()  # users of the template are told what is wrong with it
