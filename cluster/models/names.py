"""Is what was given for a model a folder, or a name on the Hub?"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

# ORG/NAME, or NAME alone; as the Hub has it, which allows neither "--" nor ".." in a name.
_REPOSITORY = re.compile(r"(?!.*(--|\.\.))([A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
_REVISION_MARK = "@"


class ModelNameError(ValueError):
    """A model that cannot be had by its name, with one sentence that says why and what to do."""


@dataclass(frozen=True, slots=True)
class HubName:
    """A repository on the Hub (``ORG/NAME``, or ``NAME``) and a branch, tag or commit of it; None
    is its main branch."""

    repository: str
    revision: str | None = None

    def __str__(self) -> str:
        return self.repository + (f"{_REVISION_MARK}{self.revision}" if self.revision else "")


def hub_name(given: str, revision: str | None = None) -> HubName | None:
    """The name that ``given`` is; None where it is a folder, or a path to one that is not there.

    A folder that exists wins. ``NAME@REVISION`` says what ``revision`` does.

    Raises:
        ModelNameError: ``revision`` is given of a folder, or another one stands in the name.
    """
    repository, mark, written = given.partition(_REVISION_MARK)
    is_folder = Path(given).expanduser().is_dir()
    if is_folder or not _REPOSITORY.fullmatch(repository) or (mark and not written):
        if revision is not None:
            raise ModelNameError(
                f"--revision {revision} is of a model on the Hub, and {given} is a path: leave it "
                "out, or give the model's name (ORG/NAME)"
            )
        return None
    if written and revision not in (None, written):
        raise ModelNameError(
            f"{given} names a revision, and --revision {revision} another one: leave one out"
        )
    return HubName(repository, written or revision)
