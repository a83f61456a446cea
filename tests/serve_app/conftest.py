"""What tests of commands share."""

from __future__ import annotations

import os

import pytest


@pytest.fixture
def no_options_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine whose environment sets no option."""
    for name in list(os.environ):
        if name.startswith("LEXSHARD_"):
            monkeypatch.delenv(name)
