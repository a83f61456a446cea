"""What several tests of the cluster layer start from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from lexshard.actors.messages import Request
    from tests.support.rank_digests import Tokens


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    """A Ray of this process, for the tests of one module."""
    from lexshard.cluster.lifecycle import start_local_ray

    start_local_ray()
    yield
    import ray

    ray.shutdown()


@pytest.fixture(scope="session")
def requests(demo_tokenizer: Any) -> list[Request]:
    """Every kind of sampling, log-probabilities, several choices, common beginnings."""
    from lexshard.loadtest.token_digest import seeded_requests

    return seeded_requests(demo_tokenizer, 200, 1)


@pytest.fixture(scope="session")
def of_one_rank(requests: list[Request]) -> str:
    from tests.support.rank_digests import told
    from tests.support.rank_engines import engine_of

    return told(engine_of(1), requests)


@pytest.fixture(scope="session")
def tokens_of_one_rank(requests: list[Request]) -> Tokens:
    from tests.support.rank_digests import tokens_of
    from tests.support.rank_engines import STREAMS, engine_of

    return tokens_of(engine_of(1), requests[:STREAMS])


@pytest.fixture(scope="session")
def index(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One of the demo's rows with clusters."""
    from lexshard.actors.body.loading import load
    from lexshard.actors.index.automatic import open_or_build
    from tests.support.paths import DEMO

    path = tmp_path_factory.mktemp("index") / "index"
    open_or_build(DEMO, load(DEMO, "float32", device="cpu"), path, clusters=True)
    return str(path)
