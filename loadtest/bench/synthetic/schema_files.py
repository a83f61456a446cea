"""Files with real schemas and instances, each held token by token: what grammars let through."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from llguidance import LLMatcher, LLTokenizer
from transformers import PreTrainedTokenizerBase

from lexshard.actors.grammar.limits import parser_limits
from lexshard.actors.grammar.matcher import GrammarError, Matcher
from lexshard.kernels.masks import mask_words
from lexshard.serve_app.openai.errors import ApiError
from lexshard.serve_app.structured.applying import checked_notes
from lexshard.serve_app.structured.compiling import Compiled
from lexshard.serve_app.structured.constraint import Constraint
from lexshard.serve_app.structured.fields import ConstraintFields
from lexshard.serve_app.structured.reading import read_constraint

Outcome = Literal["held", "left", "refused"]  # all of a schema, some of it, or nothing


class SchemaFile(NamedTuple):
    """A schema, and instances with whether they are valid."""

    name: str
    schema: dict[str, Any]
    instances: tuple[tuple[Any, bool], ...]


@dataclass(slots=True)
class Held:
    """What came of the schemas of files; files by name where something is to be told of them."""

    outcomes: dict[str, Outcome] = field(default_factory=dict)
    grammars: dict[str, str] = field(default_factory=dict)  # of those that are held
    reasons: dict[str, str] = field(default_factory=dict)  # of those refused
    right: int = 0  # valid instances that passed
    wrong: int = 0  # invalid ones that did not
    rejected: dict[str, str] = field(default_factory=dict)  # valid, and did not pass
    passed: dict[str, str] = field(default_factory=dict)  # invalid, passed, and no note says why
    left: int = 0  # invalid ones that passed where notes say what was left to the model
    tokens: int = 0


def read_files(folder: Path, wanted: int, seed: int) -> list[SchemaFile]:
    """As many of the files in ``folder`` as are ``wanted``. Raises ValueError where it has none."""
    paths = sorted(folder.glob("*.json"))
    if not paths:
        raise ValueError(f"{folder} has no *.json")
    chosen = random.Random(seed).sample(paths, min(wanted, len(paths)))
    files = []
    for path in sorted(chosen):
        told = json.loads(path.read_text(encoding="utf-8"))
        instances = tuple((each["data"], each["valid"]) for each in told.get("tests", ()))
        if isinstance(told["schema"], dict):
            files.append(SchemaFile(path.stem, told["schema"], instances))
    return files


class Holder:
    """Compiles schemas as a server with this tokenizer does, and walks through texts."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, tokens: LLTokenizer, vocabulary_size: int
    ) -> None:
        self._tokenizer = tokenizer
        self._tokens = tokens
        self._vocabulary_size = vocabulary_size
        self._eos_ids = tuple(tokens.eos_tokens)
        self._ends = mask_words(self._eos_ids, vocabulary_size)

    def compiled(
        self, schema: dict[str, Any], *, strict: bool
    ) -> tuple[Constraint, Matcher, tuple[str, ...]]:
        """The constraint, a matcher, and what was left to the model. Raises `ApiError` as a server
        refuses it."""
        named = {"name": "answer", "schema": schema, "strict": strict}
        wanted = {"response_format": {"type": "json_schema", "json_schema": named}}
        constraint = read_constraint(ConstraintFields.model_validate(wanted))
        assert constraint is not None
        inner = LLMatcher(self._tokens, constraint.text(), log_level=0, limits=parser_limits())
        told = Compiled(inner.get_error() or None, tuple(inner.get_grammar_warnings()))
        notes = checked_notes(told, constraint)
        matcher = Matcher(inner, self._tokens, self._vocabulary_size, self._eos_ids)
        return constraint, matcher, notes

    def passes(self, matcher: Matcher, text: str) -> tuple[bool, int]:
        """Whether every token of ``text`` is in the mask of its place, and an end may follow the
        last; and how many tokens were looked at. Raises `GrammarError`."""
        matcher = matcher.copy()
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        for place, token_id in enumerate(ids):
            [words] = matcher.masks(())
            if not words[token_id >> 6] >> (token_id & 63) & 1:
                return False, place + 1
            matcher.consume((token_id,))
        [words] = matcher.masks(())
        return bool((words & self._ends).any()), len(ids) + 1


def hold(files: Iterable[SchemaFile], holder: Holder, found: Held) -> Iterator[str]:
    """Every instance of every file against its schema: strictly where that is held, else as much of
    it as is. The name of each file that is done."""
    for each in files:
        try:
            _hold(each, holder, found)
        except ApiError as error:
            found.outcomes[each.name] = "refused"
            found.reasons[each.name] = error.message
        yield each.name


def _hold(file: SchemaFile, holder: Holder, found: Held) -> None:
    try:
        constraint, matcher, notes = holder.compiled(file.schema, strict=True)
        found.outcomes[file.name] = "held"
        found.grammars[file.name] = constraint.text()
    except ApiError:
        _, matcher, notes = holder.compiled(file.schema, strict=False)
        found.outcomes[file.name] = "left"
    for instance, valid in file.instances:
        text = json.dumps(instance, ensure_ascii=False, separators=(",", ":"))
        try:
            passes, tokens = holder.passes(matcher, text)
        except GrammarError as error:
            passes, tokens = False, 0
            if valid:
                found.rejected[file.name] = f"{error}: {text}"
                continue
        found.tokens += tokens
        if valid and passes:
            found.right += 1
        elif valid:
            found.rejected[file.name] = text
        elif not passes:
            found.wrong += 1
        elif notes:
            found.left += 1
        else:
            found.passed[file.name] = text
