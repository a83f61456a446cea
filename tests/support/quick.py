"""Of parametrised tests, the cases that are run every time."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def quick(cases: Iterable[Any], *chosen: Any) -> list[Any]:
    """``cases`` for `pytest.mark.parametrize`, slow but for those that are ``chosen``."""
    return [
        case if case in chosen else pytest.param(case, marks=pytest.mark.slow) for case in cases
    ]


def slow(*values: Any) -> Any:
    """One case, of so many arguments, that `make prove` runs."""
    return pytest.param(*values, marks=pytest.mark.slow)
