"""Outcomes as text for people: a section of a document between two marks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import transformers

from lexshard.loadtest.model_families.probe import FamilyOutcome, Verdict

BEGIN = "<!-- written by python -m lexshard.loadtest.model_families --markdown -->"
END = "<!-- end of what it wrote -->"


def write_section(file: Path, outcomes: Sequence[FamilyOutcome]) -> None:
    """Put the outcomes between the marks of a document that has them.

    Raises ValueError where it has not.
    """
    text = file.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{file} needs the lines {BEGIN} and {END}")
    file.write_text(f"{before}{BEGIN}\n\n{section(outcomes)}\n{END}{after}", encoding="utf-8")


def section(outcomes: Sequence[FamilyOutcome]) -> str:
    """Lists of what is served and tables of what is not, by reason."""
    return "\n".join(
        [
            f"transformers {transformers.__version__}, {len(outcomes)} families.",
            "",
            *_list("Served and batch-invariant", outcomes, "invariant"),
            *_list("Served, not batch-invariant", outcomes, "served"),
            *_table("Refused", outcomes, "refused"),
            *_table("Not tested", outcomes, "untested"),
            *_table("Wrong", outcomes, "wrong"),
            *_table("Broken", outcomes, "broken"),
        ]
    )


def _list(title: str, outcomes: Sequence[FamilyOutcome], verdict: Verdict) -> list[str]:
    named = [outcome.family for outcome in outcomes if outcome.verdict == verdict]
    return [f"### {title} ({len(named)})", "", ", ".join(named) or "None.", ""]


def _table(title: str, outcomes: Sequence[FamilyOutcome], verdict: Verdict) -> list[str]:
    """Families by reason, the most frequent first; nothing where there is none."""
    by_reason: dict[str, list[str]] = {}
    for outcome in outcomes:
        if outcome.verdict == verdict:
            by_reason.setdefault(_common(outcome), []).append(outcome.family)
    if not by_reason:
        return []
    rows = sorted(by_reason.items(), key=lambda row: -len(row[1]))
    count = sum(len(named) for named in by_reason.values())
    return [
        f"### {title} ({count})",
        "",
        "| reason | families |",
        "|---|---|",
        *(f"| {reason} | {', '.join(named)} |" for reason, named in rows),
        "",
    ]


def _common(outcome: FamilyOutcome) -> str:
    """The reason without advice, names and numbers, so that families can share it."""
    reason, _, told_more = " ".join(outcome.reason.split()).partition(". This family")
    if not told_more:
        reason = reason.rpartition(": ")[0] or reason
    reason = re.sub(rf"\b{re.escape(outcome.family)}\b", "the model", reason)
    reason = re.sub(r"\b[A-Z]\w+Attention\b", "an attention layer", reason)
    reason = re.sub(r"\b[A-Z]\w+(ForCausalLM|LMHeadModel)\b", "its class", reason)
    return re.sub(r"\d+(\.\d+)?", "n", reason).replace("|", "\\|")
