"""The tiny pair that routers are trained for."""

from __future__ import annotations

import pytest

from tests.support.router_cases import TinyPair


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    return TinyPair(tmp_path_factory.mktemp("pair"))
