"""The model and the index that the tests of this package share: neither is ever changed."""

from __future__ import annotations

import pytest

from lexshard.actors.body.loading import LoadedModel, load
from tests.support.index_cases import Tiny
from tests.support.paths import DEMO


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return Tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def demo() -> LoadedModel:
    return load(DEMO, device="cpu")
