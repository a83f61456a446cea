"""How the operator has pairs of texts scored: labels, and a template that asks for one of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, meta
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from lexshard.cluster.config import ServeConfig
from lexshard.cluster.nearest import did_you_mean
from lexshard.serve_app.openai.tokenization import ModelTokenizer

LEAST_LABELS, MAX_LABELS = 2, 64
VARIABLES = frozenset({"query", "document"})


def check_scoring_options(config: ServeConfig) -> None:
    """Looks at what needs no tokenizer.

    Raises:
        ValueError: labels or template are given alone, are too few or too many, or unusable.
    """
    labels, template = config.score_labels, config.score_template
    if template is None:
        if labels:
            raise ValueError("--score-label needs a template: give --score-template, too")
        return
    if not LEAST_LABELS <= len(labels) <= MAX_LABELS:
        raise ValueError(
            f"--score-template compares {LEAST_LABELS} to {MAX_LABELS} labels, not {len(labels)}: "
            "give --score-label for each, the positive one first"
        )
    ScoreTemplate(Path(template))


@dataclass(frozen=True, slots=True)
class PairScoring:
    """The score of a pair is the probability of the first of the ``labels`` among all of them,
    after what the ``template`` makes of the pair."""

    labels: tuple[int, ...]
    template: ScoreTemplate

    @classmethod
    def of(cls, config: ServeConfig, tokenizer: ModelTokenizer) -> PairScoring | None:
        """What ``config`` says; None where it says nothing.

        Raises:
            ValueError: as `check_scoring_options` and `label_ids` have it.
        """
        check_scoring_options(config)
        if config.score_template is None:
            return None
        labels = label_ids(config.score_labels, tokenizer)
        return cls(labels, ScoreTemplate(Path(config.score_template)))


def label_ids(labels: Sequence[str], tokenizer: ModelTokenizer) -> tuple[int, ...]:
    """The token of each label.

    Raises:
        ValueError: one is not one token, or two are the same.
    """
    found: dict[int, str] = {}
    for label in labels:
        ids = tokenizer.encode(label, add_special_tokens=False)
        if len(ids) != 1:
            tokens = " ".join(map(repr, tokenizer.token_strings(ids)))
            raise ValueError(
                f"--score-label {label!r} is {len(ids)} tokens of the model ({tokens}): "
                "give a text that is one"
            )
        if ids[0] in found:
            raise ValueError(
                f"--score-label {found[ids[0]]!r} and {label!r} are the same token: leave one out"
            )
        found[ids[0]] = label
    return tuple(found)


class ScoreTemplate:
    """A Jinja file that reads ``query`` and ``document``; sandboxed, and with the rules for white
    space that chat templates have. ``size`` is that of its own text."""

    def __init__(self, path: Path) -> None:
        """Raises ValueError for a file that is none or does not read both."""
        try:
            source = path.expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise ValueError(f"cannot read the score template {path}: {reason}") from error
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
        environment.globals["raise_exception"] = _raise
        try:
            names = meta.find_undeclared_variables(environment.parse(source))
            self._template = environment.from_string(source)
        except TemplateError as error:
            reason = " ".join(str(error).split())
            line = getattr(error, "lineno", None)
            where = f"{path}, line {line}" if line else str(path)
            raise ValueError(f"no use of the score template {where}: {reason}") from error
        if unknown := sorted(names - VARIABLES - environment.globals.keys()):
            raise ValueError(
                f"the score template {path} reads '{unknown[0]}', which it is not told"
                + (did_you_mean(unknown[0], VARIABLES) or ": it is told 'query' and 'document'")
            )
        if missing := sorted(VARIABLES - names):
            raise ValueError(
                f"the score template {path} does not read '{missing[0]}': write "
                f"{{{{ {missing[0]} }}}} where it belongs"
            )
        self.size = len(source.encode())

    def render(self, query: str, document: str) -> str:
        """What the model is asked. Raises whatever the template does: it is a program run on the
        client's data."""
        return self._template.render(query=query, document=document)


def _raise(message: Any) -> None:
    """``raise_exception`` of chat templates."""
    raise TemplateError(str(message))
